"""Harmony, the format of gpt-oss: messages in channels, of which `analysis` is reasoning."""

from __future__ import annotations

from vllm_mlx.engine.parsing.harmony_header import CHANNEL, END, RETURN, START, read_header
from vllm_mlx.engine.parsing.outbox import Mode
from vllm_mlx.engine.parsing.reader import MismatchError, Reader, Steps
from vllm_mlx.engine.parsing.reasoning_format import ReasoningFormat

#: To whom a message may go that is no call.
_RECIPIENTS = ("assistant", "all")


class Harmony(ReasoningFormat):
    """Read messages; what goes to a function is left to the tool format."""

    signs = (("<|channel|>analysis",),)
    openers = (CHANNEL, START)
    closers = (END, RETURN)
    answer_opening = "<|channel|>final<|message|>"
    #: What the text of the analysis channel is.
    analysis = Mode.REASONING

    def enter(self, marker: str, reader: Reader) -> Steps[Mode]:
        """Read the header that `marker` begins and return what its channel is."""
        if marker in self.closers:
            return Mode.CONTENT
        header = yield from read_header(marker, reader, _may_be_recipient)
        if header.recipient not in ("", *_RECIPIENTS):
            raise MismatchError
        return self.analysis if header.channel == "analysis" else Mode.CONTENT

    def is_open(self, prompt: str) -> bool:
        """Say whether a rendered prompt ends within an analysis message."""
        return prompt.endswith("<|channel|>analysis<|message|>")

    def render(self, reasoning: str) -> str:
        """Return an analysis message and the header of the one behind it."""
        return f"<|channel|>analysis<|message|>{reasoning}<|end|><|start|>assistant"


class HarmonyMessages(Harmony):
    """Read messages where reasoning is not asked for: the analysis is content like the rest."""

    analysis = Mode.CONTENT


def _may_be_recipient(text: str) -> bool:
    return any(name.startswith(text) for name in _RECIPIENTS)
