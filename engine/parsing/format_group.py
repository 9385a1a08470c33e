"""Formats that stand for several, tried in turn where they share a trigger."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vllm_mlx.engine.parsing.reader import MismatchError, Steps
from vllm_mlx.engine.parsing.scan import Scan
from vllm_mlx.engine.parsing.tool_format import ToolFormat


class FormatGroup(ToolFormat):
    """Read what any of `members` reads; write as the first of them does."""

    @classmethod
    def parse(cls, scan: Scan) -> Steps[None]:
        """Refuse: the driver asks the members."""
        del scan
        raise MismatchError

    @classmethod
    def render_call(cls, name: str, arguments: Mapping[str, Any]) -> str:
        """Return the text of one call as the first member writes it."""
        return cls.members[0].render_call(name, arguments)

    @classmethod
    def render_calls(cls, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
        """Return the text of several calls as the first member writes them."""
        return cls.members[0].render_calls(calls)

    @classmethod
    def grammar(
        cls,
        tools: Sequence[Mapping[str, Any]],
        *,
        special_tokens: Mapping[str, int] | None = None,
        parallel: bool = False,
    ) -> str:
        """Return Lark text that forces a call as the first member writes it."""
        return cls.members[0].grammar(tools, special_tokens=special_tokens, parallel=parallel)
