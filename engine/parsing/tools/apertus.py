"""Apertus: a JSON list of objects whose only key is the name of the function."""

from __future__ import annotations

from typing import Any

from vllm_mlx.engine.parsing.json_format import JsonFormat
from vllm_mlx.engine.parsing.reader import Steps
from vllm_mlx.engine.parsing.scan import Scan

_OPEN = "<|tools_prefix|>"
_CLOSE = "<|tools_suffix|>"


class Apertus(JsonFormat):
    """Read and write `<|tools_prefix|>[{"f": {...}}]<|tools_suffix|>`."""

    signs = ((_OPEN,),)
    tokens = (_OPEN,)
    triggers = (_OPEN,)
    closers = (_CLOSE,)
    opening = _OPEN
    closing = _CLOSE
    is_list = True

    @classmethod
    def parse(cls, scan: Scan) -> Steps[None]:
        """Read one list."""
        reader = scan.reader
        yield from reader.space()
        yield from reader.expect("[")
        while True:
            yield from reader.space()
            yield from reader.expect("{")
            yield from reader.space()
            name = yield from scan.quoted_name()
            yield from reader.space()
            yield from reader.expect(":")
            scan.start(name)
            yield from scan.json_object()
            yield from reader.space()
            yield from reader.expect("}")
            scan.end()
            yield from reader.space()
            if (yield from reader.find(",")) is None:
                break
            scan.candidate()
            yield from reader.expect(",")
        yield from scan.close(_CLOSE)

    @classmethod
    def call_object(cls, name: str, arguments: Any) -> dict[str, Any]:
        """Return a call as an object."""
        return {name: arguments}
