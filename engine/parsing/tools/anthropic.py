"""Anthropic's own JSON of calls, and the tags that its older models write."""

from __future__ import annotations

import secrets
from typing import Any

from vllm_mlx.engine.parsing.fenced_json import FencedJson
from vllm_mlx.engine.parsing.format_group import FormatGroup
from vllm_mlx.engine.parsing.json_calls import CallKeys
from vllm_mlx.engine.parsing.tools.minimax import MiniMax


class AnthropicJson(FencedJson):
    """Read and write `{"type": "tool_use", "id": ..., "name": ..., "input": {...}}`."""

    keys = CallKeys(arguments=("input", "arguments"), ids=("id",), lists=("content",))

    @classmethod
    def call_object(cls, name: str, arguments: Any) -> dict[str, Any]:
        """Return a call as an object."""
        return {"type": "tool_use", "name": name, "input": arguments}

    @classmethod
    def new_id(cls) -> str:
        """Make an id as the API has them."""
        return f"toolu_{secrets.token_hex(12)}"


class AnthropicTags(MiniMax):
    """Read and write `<function_calls>` with `<invoke>` and `<parameter>` tags."""

    triggers = ("<function_calls>", '<invoke name="')
    closers = ("</function_calls>",)
    block_open = "<function_calls>"
    block_close = "</function_calls>"


class Anthropic(FormatGroup):
    """Write JSON; read both."""

    members = (AnthropicJson, AnthropicTags)
