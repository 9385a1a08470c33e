"""One engine beside the chat model as the routes use it: its names, its limits and its calls."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from vllm_mlx.engine.errors import (
    EngineUnavailableError,
    InvalidRequestError,
    ModelLoadError,
    OverloadedError,
    RequestTimeoutError,
)
from vllm_mlx.engine.host.messages import ServiceInfo
from vllm_mlx.server.admission import not_ready_error
from vllm_mlx.server.metrics import ServerMetrics
from vllm_mlx.server.request_context import RequestContext
from vllm_mlx.server.served_model import ModelNames
from vllm_mlx.server.services.plan import ServicePlan
from vllm_mlx.server.services.port import PartStream, ServicePort

logger = logging.getLogger(__name__)

#: When those come again who find the queue full.
_QUEUE_RETRY_S = 1.0


class ServiceCall:
    """Read the parts of one answer, for one reader on the event loop; made by `HostedService`."""

    def __init__(self, stream: PartStream, timeout_s: float, ended: Callable[[str], None]) -> None:
        """Take over `stream`; `ended` is told once how the call has ended, in a word."""
        self._stream = stream
        self._timeout_s = timeout_s
        self._ended: Callable[[str], None] | None = ended

    async def parts(self) -> AsyncIterator[Any]:
        """Yield each part as it comes.

        Raises the call's own error, or `RequestTimeoutError` when none comes for too long.
        """
        while True:
            try:
                async with asyncio.timeout(self._timeout_s):
                    part = await anext(self._stream)
            except StopAsyncIteration:
                self._end("success")
                return
            except TimeoutError:
                self._end("error")
                raise RequestTimeoutError(f"no progress for {self._timeout_s:g} s") from None
            except InvalidRequestError:
                self._end("refused")
                raise
            except Exception:
                # Whatever it is, it is counted and goes on to the route, which answers with it.
                self._end("error")
                raise
            yield part

    async def collect(self) -> list[Any]:
        """Wait for the end and return all parts."""
        return [part async for part in self.parts()]

    async def aclose(self) -> None:
        """End the call if it has not ended: its client has left, or was refused."""
        self._end("aborted")
        await self._stream.aclose()

    def _end(self, outcome: str) -> None:
        ended, self._ended = self._ended, None
        if ended is not None:
            ended(outcome)


class HostedService:
    """Own one service of the server and admit calls to it. Event loop only."""

    def __init__(
        self,
        plan: ServicePlan,
        port: ServicePort,
        metrics: ServerMetrics,
        *,
        max_queue: int,
        timeout_s: float,
        loads_on_demand: bool,
    ) -> None:
        """Prepare; the port is started by `start`, or by the first call where loading is so."""
        self.plan = plan
        self.port = port
        self.names = ModelNames(plan.model, plan.served_name)
        self.loads_on_demand = loads_on_demand
        #: Unix time at which it was ready first; None before.
        self.created: int | None = None
        self._metrics = metrics
        self._max_open = plan.kind.max_active + max_queue
        self._timeout_s = timeout_s
        self._num_starting = 0
        self._is_stopping = False

    @property
    def kind(self) -> str:
        """Return the name of the engine's kind."""
        return self.plan.kind.name

    @property
    def is_ready(self) -> bool:
        """Say whether a call would be answered now."""
        return self.port.state.phase == "ready"

    async def start(self) -> None:
        """Begin to load in the background, unless the first call is to do that."""
        if not self.loads_on_demand:
            await self.port.start()

    async def wait_loaded(self) -> None:
        """Wait until it was ready once, not at all where it loads on demand; raise why it fails."""
        if self.loads_on_demand:
            return
        self._loaded(await self.port.wait_ready())

    async def stop(self, drain_timeout_s: float) -> None:
        """Refuse new calls, let open ones finish for so long, and end the process."""
        self._is_stopping = True
        await self.port.stop(drain_timeout_s)

    async def start_call(self, context: RequestContext, request: Any) -> ServiceCall:
        """Start a call that ends with the HTTP request of `context`, whatever happens to that.

        Raises `OverloadedError` and `EngineUnavailableError`; where the engine loads on demand it
        is waited for.
        """
        num_open = self.port.num_open + self._num_starting
        if num_open >= self._max_open:
            raise OverloadedError(
                f"the queue of the {self.kind} model is full: {num_open} requests are open",
                retry_after_s=_QUEUE_RETRY_S,
            )
        self._num_starting += 1
        context.condition = self.port.state
        try:
            await self._be_ready()
            stream = self.port.call(context.id, request)
        finally:
            self._num_starting -= 1
        started = time.monotonic()
        name = self.names.primary

        def ended(outcome: str) -> None:
            self._metrics.service_ended(name, self.kind, outcome, time.monotonic() - started)

        call = ServiceCall(stream, self._timeout_s, ended)
        context.closing.push_async_callback(call.aclose)
        return call

    def count_tokens(self, num_tokens: int, num_truncated: int = 0) -> None:
        """Count an answer's tokens, and its texts that were cut, for the metrics."""
        self._metrics.service_texts(
            self.names.primary, self.kind, num_tokens=num_tokens, num_truncated=num_truncated
        )

    async def _be_ready(self) -> None:
        state = self.port.state
        if self.loads_on_demand and state.phase in ("stopped", "loading", "restarting"):
            if self._is_stopping:
                raise EngineUnavailableError("the server is shutting down")
            if state.phase == "stopped":
                await self.port.start()
            try:
                async with asyncio.timeout(self._timeout_s):
                    self._loaded(await self.port.wait_ready())
            except TimeoutError:
                raise not_ready_error(self.port.state, f"{self.kind} model") from None
            return
        if state.phase == "failed" and isinstance(state.error, ModelLoadError):
            raise EngineUnavailableError(
                f"the {self.kind} model cannot be loaded: {state.error.message}"
            )
        if state.phase != "ready":
            raise not_ready_error(state, f"{self.kind} model")
        if self.created is None and self.port.info is not None:
            self._loaded(self.port.info)

    def _loaded(self, info: ServiceInfo) -> None:
        self.names.also({info.model, info.path})
        if self.created is None:
            self.created = int(time.time())
            logger.info("the %s model answers: %s", self.kind, self.names.primary)
