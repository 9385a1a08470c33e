"""Kimi K3: tags made of special tokens around reasoning and around the answer."""

from __future__ import annotations

from vllm_mlx.engine.parsing.reasoning_format import ReasoningFormat


class KimiK3(ReasoningFormat):
    """Read `think` blocks; the tags of the answer are left out."""

    signs = (("<|open|>", "think"),)
    openers = ("<|open|>think<|sep|>",)
    closers = (
        "<|close|>think<|sep|>",
        "<|open|>response<|sep|>",
        "<|close|>response<|sep|>",
        "<|close|>message<|sep|>",
        "<|end_of_msg|>",
    )

    def render(self, reasoning: str) -> str:
        """Return the text of a block."""
        return f"<|open|>think<|sep|>{reasoning}<|close|>think<|sep|>"
