"""The requests open at one engine process, and what its messages mean for them."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import TypeVar

import msgspec

from vllm_mlx.engine.core.outputs import ErrorInfo, FinishReason, StepOutputs
from vllm_mlx.engine.core.request import GenerationRequest
from vllm_mlx.engine.core.stats import CacheCleared, EngineStats
from vllm_mlx.engine.errors import EngineUnavailableError
from vllm_mlx.engine.host.messages import AbortRequest, AddRequest, ClearCache, GetStats, ToEngine
from vllm_mlx.engine.host.stream import RequestStream

Reply = TypeVar("Reply")


class EngineClient:
    """Own the streams of the requests open at one engine process.

    A stream leaves the table with its final output, so each gets exactly one, whoever is first:
    the engine, the reader that leaves, or the supervisor that ends them all. Event loop only.
    """

    def __init__(self, send: Callable[[ToEngine], None]) -> None:
        self._send = send
        self._open: dict[str, RequestStream] = {}
        self._became_idle = asyncio.Event()
        self._became_idle.set()
        self._has_produced = False
        #: Counts the engine's messages; each means that it has got to the end of a step.
        self.num_heard = 0
        self._stats: EngineStats | None = None
        self._stats_at = 0.0
        self._stats_reply: asyncio.Future[EngineStats | None] | None = None
        #: Those who wait for the answers to `ClearCache`, in order.
        self._clearings: deque[asyncio.Future[CacheCleared | None]] = deque()

    @property
    def num_open(self) -> int:
        """Count the requests that have no final output yet."""
        return len(self._open)

    @property
    def has_produced(self) -> bool:
        """Say whether the engine has generated anything for anybody."""
        return self._has_produced

    def generate(self, request: GenerationRequest) -> RequestStream:
        """Send `request` and return its stream; its id must be new to this process."""
        assert request.request_id not in self._open, f"request id in use: {request.request_id}"
        stream = RequestStream(request.request_id, self._leave)
        self._open[request.request_id] = stream
        self._became_idle.clear()
        self._send(AddRequest(request))
        return stream

    def abort(self, request_id: str) -> bool:
        """Ask the engine to end a request early; say whether it was open."""
        if request_id not in self._open:
            return False
        self._send(AbortRequest(request_id))
        return True

    def deliver(self, message: StepOutputs | EngineStats | CacheCleared) -> None:
        """Hand one message of the engine on to whom it concerns."""
        self.num_heard += 1
        if isinstance(message, CacheCleared):
            _answer(self._clearings.popleft(), message)
            return
        if isinstance(message, EngineStats):
            self._stats, self._stats_at = message, time.monotonic()
            self._answer_stats(message)
            return
        for row in message.rows:
            # Readers that have left are still named by steps that were under way.
            stream = self._open.get(row.request_id)
            if stream is None:
                continue
            self._has_produced = self._has_produced or bool(row.token_ids or row.text)
            stream.put(row)
            if row.finish_reason is not None:
                self._forget(row.request_id)

    def end_all(self, finish_reason: FinishReason, error: ErrorInfo | None = None) -> int:
        """End every open request now, without the engine; return how many there were."""
        ended = list(self._open.values())
        for stream in ended:
            stream.end(finish_reason, error)
            self._forget(stream.request_id)
        self._answer_stats(None)
        while self._clearings:
            _answer(self._clearings.popleft(), None)
        return len(ended)

    async def wait_idle(self) -> None:
        """Wait until no request is open."""
        await self._became_idle.wait()

    async def stats(self, timeout_s: float) -> EngineStats:
        """Ask the engine, at its next step boundary, for its statistics.

        An engine that does not answer within `timeout_s` (a long step, or stopped) is answered for
        with what it said last and the age of that; `EngineUnavailableError` if it never said
        anything or has died.
        """
        reply = self.ask_stats()
        await asyncio.wait([reply], timeout=timeout_s)
        if reply.done() and reply.result() is None:
            raise EngineUnavailableError("the engine ended before it answered", retry_after_s=1.0)
        if self._stats is None:
            raise EngineUnavailableError(
                f"the engine did not answer within {timeout_s:g} s", retry_after_s=1.0
            )
        if reply.done():
            return self._stats
        return msgspec.structs.replace(self._stats, age_s=time.monotonic() - self._stats_at)

    def ask_stats(self) -> asyncio.Future[EngineStats | None]:
        """Ask for statistics unless they are asked for already; return the answer to come."""
        if self._stats_reply is None:
            self._stats_reply = asyncio.get_running_loop().create_future()
            self._send(GetStats())
        return self._stats_reply

    async def clear_cache(self, *, ram: bool, ssd: bool) -> CacheCleared:
        """Have stored prefixes removed; raise `EngineUnavailableError` if the engine ends first."""
        reply: asyncio.Future[CacheCleared | None] = asyncio.get_running_loop().create_future()
        self._clearings.append(reply)
        self._send(ClearCache(ram=ram, ssd=ssd))
        cleared = await reply
        if cleared is None:
            raise EngineUnavailableError("the engine ended before it answered", retry_after_s=1.0)
        return cleared

    def _answer_stats(self, stats: EngineStats | None) -> None:
        if self._stats_reply is not None:
            _answer(self._stats_reply, stats)
        self._stats_reply = None

    def _leave(self, request_id: str) -> None:
        stream = self._open.get(request_id)
        if stream is None:
            return
        self._send(AbortRequest(request_id))
        stream.end("abort")
        self._forget(request_id)

    def _forget(self, request_id: str) -> None:
        del self._open[request_id]
        if not self._open:
            self._became_idle.set()


def _answer(reply: asyncio.Future[Reply | None], message: Reply | None) -> None:
    """Give an answer to whoever still waits for it."""
    if not reply.done():
        reply.set_result(message)
