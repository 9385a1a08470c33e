"""Gemini's own JSON of calls, as plain text."""

from __future__ import annotations

from typing import Any

from vllm_mlx.engine.parsing.fenced_json import FencedJson
from vllm_mlx.engine.parsing.json_calls import CallKeys


class GeminiJson(FencedJson):
    """Read and write `{"functionCall": {"name": ..., "args": {...}}}`."""

    keys = CallKeys(
        arguments=("args", "arguments", "parameters"),
        nested=("functionCall", "function_call"),
        lists=("functionCalls", "function_calls", "parts"),
    )

    @classmethod
    def call_object(cls, name: str, arguments: Any) -> dict[str, Any]:
        """Return a call as an object."""
        return {"functionCall": super().call_object(name, arguments)}
