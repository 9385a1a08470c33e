"""OpenAI's own JSON of calls, as plain text."""

from __future__ import annotations

from typing import Any

from vllm_mlx.engine.parsing.fenced_json import FencedJson
from vllm_mlx.engine.parsing.json_calls import CallKeys


class OpenAIJson(FencedJson):
    """Read and write `{"type": "function", "function": {"name": ..., "arguments": ...}}`.

    Arguments may be an object or, as in the API, its JSON text in a string.
    """

    keys = CallKeys(nested=("function", "function_call"), lists=("tool_calls",))

    @classmethod
    def call_object(cls, name: str, arguments: Any) -> dict[str, Any]:
        """Return a call as an object."""
        return {"type": "function", "function": super().call_object(name, arguments)}
