"""`GET /v1/models` and `GET /v1/models/{id}`."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from quart import Response

from vllm_mlx.server.replies import json_response, wants_anthropic
from vllm_mlx.server.runtime import ServerRuntime
from vllm_mlx.server.services.hosted import HostedService


class ModelRoutes:
    """List the models that are served: the chat model, and those of other kinds."""

    def __init__(self, runtime: ServerRuntime) -> None:
        self._runtime = runtime

    async def index(self) -> Response:
        """List the models, for each API's clients in its own shape."""
        if not self._runtime.config.serves_chat:
            if wants_anthropic():
                return json_response({"data": [], "has_more": False})
            return json_response({"object": "list", "data": self._services()})
        if wants_anthropic():
            model = self._anthropic_model(self._runtime.names.primary)
            ids = {"first_id": model["id"], "last_id": model["id"]}
            return json_response({"data": [model], "has_more": False, **ids})
        return json_response({"object": "list", "data": [self._model(), *self._services()]})

    async def retrieve(self, model_id: str) -> Response:
        """Describe one model, by any of its names."""
        service = self._runtime.services.named(model_id)
        if service is not None and not self._runtime.is_chat_name(model_id):
            return json_response(_service_model(service))
        self._runtime.require_ready()
        is_anthropic = wants_anthropic()
        name = self._runtime.names.check(model_id, is_agents=is_anthropic)
        return json_response(self._anthropic_model(name) if is_anthropic else self._model())

    def _services(self) -> list[dict[str, Any]]:
        return [_service_model(service) for service in self._runtime.services]

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

    def _anthropic_model(self, name: str) -> dict[str, Any]:
        served = self._runtime.require_ready()
        return {
            "type": "model",
            "id": name,
            "display_name": served.info.model,
            "created_at": datetime.fromtimestamp(served.created, UTC).isoformat(),
            "max_input_tokens": served.max_model_len - 1,
            "max_tokens": self._runtime.config.max_request_tokens,
        }


def _service_model(service: HostedService) -> dict[str, Any]:
    info = service.port.info
    return {
        "id": service.names.primary,
        "object": "model",
        "created": service.created or 0,
        "owned_by": "vllm-mlx",
        "root": service.plan.model,
        "parent": None,
        "kind": service.kind,
        **(info.details if info is not None else {}),
    }
