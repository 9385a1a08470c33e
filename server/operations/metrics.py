"""`GET /metrics`: what Prometheus scrapes."""

from __future__ import annotations

from quart import Response, request

from vllm_mlx.engine.core.stats import EngineStats
from vllm_mlx.server.errors import reply_to_http_fault
from vllm_mlx.server.replies import error_response
from vllm_mlx.server.request_context import current_context
from vllm_mlx.server.runtime import ServerRuntime


class MetricsRoute:
    """Write the metrics out; it answers in every phase, with what is known."""

    def __init__(self, runtime: ServerRuntime) -> None:
        self._runtime = runtime

    async def show(self) -> Response:
        """Give Prometheus all metrics, where the server was started with `--metrics`."""
        runtime = self._runtime
        if not runtime.config.metrics:
            reply = reply_to_http_fault(404, "no metrics: start the server with --metrics")
            current_context().error_code = reply.code
            return error_response(reply)
        stats = await runtime.generations.progress.glance()
        runtime.metrics.describe_engine(
            stats,
            runtime.generations.up_to_date(stats or EngineStats()),
            num_restarts=runtime.engine.state.num_restarts,
            is_up=runtime.is_ready,
            info=runtime.served.info if runtime.served is not None else None,
        )
        for service in runtime.services:
            runtime.metrics.describe_service(
                service.names.primary,
                service.kind,
                is_up=service.is_ready,
                num_open=service.port.num_open,
                num_restarts=service.port.state.num_restarts,
            )
        page, content_type = runtime.metrics.page(request.headers.get("accept", ""))
        return Response(page, content_type=content_type)
