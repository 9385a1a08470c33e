"""Gemma 4: channels of which the one named `thought` is reasoning."""

from __future__ import annotations

import re

from vllm_mlx.engine.parsing.outbox import Mode
from vllm_mlx.engine.parsing.reader import Reader, Steps
from vllm_mlx.engine.parsing.reasoning_format import ReasoningFormat

_OPEN = "<|channel>"
_CLOSE = "<channel|>"
_NAME_END = re.compile(r"[\s<]")
_CHANNELS = {"thought": Mode.REASONING, "response": Mode.CONTENT, "final": Mode.CONTENT}


class Gemma4(ReasoningFormat):
    """Read `<|channel>thought` up to `<channel|>`."""

    signs = (("<|channel>",),)
    openers = (_OPEN,)
    closers = (_CLOSE,)

    def enter(self, marker: str, reader: Reader) -> Steps[Mode]:
        """Read the channel's name."""
        if marker == _CLOSE:
            return Mode.CONTENT
        name = yield from reader.word(
            _NAME_END, lambda text: any(channel.startswith(text) for channel in _CHANNELS)
        )
        return _CHANNELS.get(name, Mode.CONTENT)

    def is_open(self, prompt: str) -> bool:
        """Say whether a rendered prompt ends within the thought channel."""
        return prompt.rstrip().endswith(f"{_OPEN}thought")

    def render(self, reasoning: str) -> str:
        """Return the text of a block."""
        return f"{_OPEN}thought\n{reasoning}{_CLOSE}"
