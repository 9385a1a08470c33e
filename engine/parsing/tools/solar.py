"""Solar Open: an id, a name and JSON between markers."""

from __future__ import annotations

import re
import secrets
import string

from vllm_mlx.engine.parsing.named_format import ID, NamedFormat
from vllm_mlx.engine.parsing.reader import Steps
from vllm_mlx.engine.parsing.reasoning.solar import Solar as SolarMessages
from vllm_mlx.engine.parsing.scan import Scan

_BLOCK = "<|tool_calls|>"
_BLOCK_END = "<|calls|>"
_CALL = "<|tool_call:begin|>"
_NAME = "<|tool_call:name|>"
_ARGUMENTS = "<|tool_call:args|>"
_CALL_END = "<|tool_call:end|>"

_MARKER = re.compile("<")
_LETTERS = string.ascii_lowercase + string.digits


class Solar(NamedFormat):
    """Read and write Solar Open's calls, with the model's own ids."""

    signs = ((_CALL,),)
    tokens = (_CALL,)
    triggers = (_BLOCK, _CALL)
    closers = (_BLOCK_END,)
    opening = _BLOCK
    closing = _BLOCK_END
    id_pattern = "/[a-z0-9]{10}/"
    framing = SolarMessages

    @classmethod
    def new_id(cls) -> str:
        """Make an id as the template asks for: ten letters and digits."""
        return "".join(secrets.choice(_LETTERS) for _ in range(10))

    @classmethod
    def render_id(cls, index: int) -> str:
        """Return an id for call number `index` of a block."""
        return f"call{index:06}"

    @classmethod
    def frame(cls, name: str) -> tuple[str, str]:
        """Return what is written around the arguments."""
        return f"{_CALL}{ID}{_NAME}{name}{_ARGUMENTS}", _CALL_END

    @classmethod
    def parse(cls, scan: Scan) -> Steps[None]:
        """Read the calls of one block, or one call without a block."""
        reader = scan.reader
        if scan.trigger == _BLOCK:
            yield from reader.space()
            yield from reader.expect(_CALL)
        while True:
            call_id = yield from reader.word(_MARKER, lambda text: len(text) < 64)
            yield from reader.expect(_NAME)
            name = yield from scan.name(_MARKER)
            yield from reader.expect(_ARGUMENTS)
            scan.start(name, call_id.strip())
            yield from scan.json_object()
            yield from reader.space()
            yield from reader.expect(_CALL_END)
            scan.end()
            yield from reader.space()
            if (yield from reader.find(_CALL, _BLOCK_END)) != _CALL:
                yield from scan.close(_BLOCK_END)
                return
            scan.candidate()
            yield from reader.expect(_CALL)
