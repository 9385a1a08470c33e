"""Harmony, the format of gpt-oss: a call is a message to a function."""

from __future__ import annotations

from vllm_mlx.engine.parsing.harmony_header import (
    CALL,
    CHANNEL,
    END,
    RECIPIENT,
    RETURN,
    START,
    read_header,
)
from vllm_mlx.engine.parsing.named_format import NamedFormat
from vllm_mlx.engine.parsing.reader import MismatchError, Steps
from vllm_mlx.engine.parsing.reasoning.harmony import HarmonyMessages
from vllm_mlx.engine.parsing.scan import Scan, UnknownNameError

_NAMESPACE = "functions."


class Harmony(NamedFormat):
    """Read and write `<|channel|>commentary to=functions.f <|constrain|>json<|message|>{...}`.

    A call starts with the end of its header: only then is its recipient final.
    """

    signs = (
        (
            "<|channel|>commentary",
            "functions.",
        ),
        (
            "<|channel|>",
            "commentary",
            "to=",
        ),
    )
    triggers = (CHANNEL, START)
    anchored = (RECIPIENT,)
    closers = (CALL, END, RETURN)
    between = f"{START}assistant"
    ends_reasoning = True
    framing = HarmonyMessages

    @classmethod
    def frame(cls, name: str) -> tuple[str, str]:
        """Return what is written around the arguments."""
        header = f"{CHANNEL}commentary to={_NAMESPACE}{name} <|constrain|>json<|message|>"
        return header, CALL

    @classmethod
    def parse(cls, scan: Scan) -> Steps[None]:
        """Read one message to a function."""

        def may_be_recipient(text: str) -> bool:
            name = text.removeprefix(_NAMESPACE)
            return _NAMESPACE.startswith(text) or scan.tools.may_start(name)

        header = yield from read_header(scan.trigger, scan.reader, may_be_recipient)
        if not header.recipient:
            raise MismatchError
        name = header.recipient.removeprefix(_NAMESPACE)
        if not header.recipient.startswith(_NAMESPACE) and not scan.tools.knows(name):
            raise UnknownNameError
        scan.start(scan.known(name))
        yield from scan.json_object()
        yield from scan.close(*cls.closers)
        scan.end()
