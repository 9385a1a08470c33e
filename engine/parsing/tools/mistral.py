"""Mistral: `[TOOL_CALLS]` before a JSON list, or before each name and its JSON."""

from __future__ import annotations

import re
import secrets
import string

from vllm_mlx.engine.parsing.json_calls import CallKeys, JsonCallReader
from vllm_mlx.engine.parsing.json_format import JsonFormat
from vllm_mlx.engine.parsing.named_format import NamedFormat
from vllm_mlx.engine.parsing.reader import MismatchError, Steps
from vllm_mlx.engine.parsing.scan import Scan

_CALLS = "[TOOL_CALLS]"
_ID = "[CALL_ID]"
_ARGUMENTS = "[ARGS]"

_NAME_END = re.compile(r"[\[{]")
_LETTERS = string.ascii_letters + string.digits


class Mistral(NamedFormat):
    """Read all three forms; write the one of tokenizer version 11 and later."""

    signs = (
        (
            "[TOOL_CALLS]",
            "[ARGS]",
        ),
    )
    triggers = (_CALLS,)
    inner_markers = (_ID,)

    @classmethod
    def frame(cls, name: str) -> tuple[str, str]:
        """Return what is written around the arguments."""
        return f"{_CALLS}{name}{_ARGUMENTS}", ""

    @classmethod
    def new_id(cls) -> str:
        """Make an id as Mistral's templates ask for: nine letters and digits."""
        return "".join(secrets.choice(_LETTERS) for _ in range(9))

    @classmethod
    def parse(cls, scan: Scan) -> Steps[None]:
        """Read what stands behind one marker: a list, or a name and its arguments."""
        reader = scan.reader
        yield from reader.space()
        if (yield from reader.peek()) in "[{":
            yield from JsonCallReader(scan, CallKeys()).payload()
            return
        name = yield from scan.name(_NAME_END)
        call_id = None
        found = yield from reader.accept(_ID, _ARGUMENTS, "{")
        if found == _ID:
            call_id = yield from reader.word(_NAME_END, lambda text: len(text) < 64)
            found = yield from reader.accept(_ARGUMENTS, "{")
        if found is None:
            raise MismatchError
        if found == "{":
            reader.pos -= 1
        scan.start(name, call_id)
        yield from scan.json_object()
        scan.end()


class MistralList(JsonFormat):
    """Read all three forms; write the list of tokenizer versions before 11."""

    signs = (("[TOOL_CALLS]",),)
    tokens = ("[TOOL_CALLS]",)
    triggers = (_CALLS,)
    inner_markers = (_ID, _ARGUMENTS)
    opening = _CALLS
    is_list = True

    @classmethod
    def new_id(cls) -> str:
        """Make an id as Mistral's templates ask for."""
        return Mistral.new_id()

    @classmethod
    def parse(cls, scan: Scan) -> Steps[None]:
        """Read what stands behind one marker."""
        yield from Mistral.parse(scan)
