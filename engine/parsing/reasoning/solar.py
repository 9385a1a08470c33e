"""Solar Open: messages of one answer, of which the one that thinks is reasoning."""

from __future__ import annotations

from vllm_mlx.engine.parsing.reasoning_format import ReasoningFormat


class Solar(ReasoningFormat):
    """Read messages behind `<|think|>` and `<|content|>`."""

    signs = (("<|think|>", "<|content|>"),)
    openers = ("<|think|>",)
    closers = ("<|end|>", "<|content|>", "<|begin|>assistant")

    def render(self, reasoning: str) -> str:
        """Return a message of reasoning and the beginning of the next one."""
        return f"<|think|>{reasoning}<|end|><|begin|>assistant"
