"""`POST /v1/requests/{id}/cancel` and `DELETE /v1/requests/{id}`."""

from __future__ import annotations

from quart import Response

from vllm_mlx.engine.errors import RequestNotFoundError
from vllm_mlx.server.replies import json_response
from vllm_mlx.server.runtime import ServerRuntime


class CancelRoute:
    """End open requests by the id that their clients know."""

    def __init__(self, runtime: ServerRuntime) -> None:
        self._runtime = runtime

    async def cancel(self, request_id: str) -> Response:
        """End one request; what it generated goes to its client, with finish reason `abort`."""
        found = self._runtime.generations.cancel(request_id)
        if found is None:
            raise RequestNotFoundError(
                f"no open request has the id {request_id!r}: it is unknown here or has ended"
            )
        return json_response(
            {
                "object": "request.cancel",
                "id": found,
                "cancelled": True,
                "model": self._runtime.names.primary,
            }
        )
