"""`GET /v1/models` and `GET /v1/models/{id}`."""

from __future__ import annotations

from typing import Any

from quart import Response

from vllm_mlx.server.replies import json_response
from vllm_mlx.server.runtime import ServerRuntime


class ModelRoutes:
    """List the one model that is served."""

    def __init__(self, runtime: ServerRuntime) -> None:
        self._runtime = runtime

    async def index(self) -> Response:
        """List the models."""
        return json_response({"object": "list", "data": [self._model()]})

    async def retrieve(self, model_id: str) -> Response:
        """Describe one model, by any of its names."""
        self._runtime.require_ready()
        self._runtime.names.check(model_id)
        return json_response(self._model())

    def _model(self) -> dict[str, Any]:
        served = self._runtime.require_ready()
        return {
            "id": self._runtime.names.primary,
            "object": "model",
            "created": served.created,
            "owned_by": "vllm-mlx",
            "root": served.info.model,
            "parent": None,
            "max_model_len": served.max_model_len,
            "tool_call_parser": served.formats.tools,
            "reasoning_parser": served.formats.reasoning,
        }
