"""Reasoning between two markers that the user names."""

from __future__ import annotations

from vllm_mlx.engine.errors import UsageError
from vllm_mlx.engine.parsing.reasoning_format import ReasoningFormat


class Delimiters(ReasoningFormat):
    """Read blocks between two markers; raises `UsageError` if they cannot be told apart."""

    def __init__(self, opener: str = "", closer: str = "") -> None:
        opener, closer = opener.strip(), closer.strip()
        if not opener or not closer or opener.startswith(closer) or closer.startswith(opener):
            raise UsageError(
                "the reasoning parser 'delimiters' needs two markers of which neither begins with "
                f"the other, not {opener!r} and {closer!r}"
            )
        self.openers = (opener,)
        self.closers = (closer,)
