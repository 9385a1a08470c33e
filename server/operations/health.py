"""`GET /health` and `GET /ready`: is the process alive, and would a request be answered."""

from __future__ import annotations

from quart import Response

from vllm_mlx.server.admission import not_ready_error, progress_fields
from vllm_mlx.server.engine_port import EngineCondition
from vllm_mlx.server.errors import retry_after_header
from vllm_mlx.server.replies import json_response
from vllm_mlx.server.runtime import ServerRuntime


class HealthRoutes:
    """Answer probes; neither route asks the engine anything."""

    def __init__(self, runtime: ServerRuntime) -> None:
        self._runtime = runtime

    async def health(self) -> Response:
        """Say that the process is alive; always 200."""
        return json_response({"status": "healthy", "model_loaded": self._runtime.is_serving})

    async def ready(self) -> Response:
        """Say whether a request would be answered: 200, or 503 with how far loading is."""
        if self._runtime.is_serving:
            return json_response({"status": "ready", "model": self._runtime.names.primary})
        condition, what = self._awaited()
        error = not_ready_error(condition, what)
        fields = progress_fields(condition)
        response = json_response(
            {"status": fields["phase"], "message": error.message, **fields}, 503
        )
        response.headers["retry-after"] = str(retry_after_header(error.retry_after_s or 0))
        return response

    def _awaited(self) -> tuple[EngineCondition, str]:
        """Return the condition of the engine that is not ready, the chat model's first."""
        runtime = self._runtime
        if runtime.config.serves_chat and not runtime.is_ready:
            return runtime.engine.state, "model"
        for service in runtime.services:
            if not service.is_ready and not service.loads_on_demand:
                return service.port.state, f"{service.kind} model"
        return runtime.engine.state, "model"
