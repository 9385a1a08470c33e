"""The calls open at one service's process, and the stream of parts that each of them is."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, Literal, TypeVar

import msgspec

from vllm_mlx.engine.core.outputs import ErrorInfo
from vllm_mlx.engine.errors import RequestAbortedError
from vllm_mlx.engine.host.messages import (
    AbortRequest,
    CallEnd,
    CallPart,
    CallService,
    FromService,
    GetStats,
    ServiceStats,
    ToEngine,
)

PartT = TypeVar("PartT")


class CallStream(Generic[PartT]):
    """Iterate over the parts of one answer; raises the error of a call that has failed.

    For one reader, on the event loop's thread. A cancelled `__anext__` loses nothing. Whoever has
    one must see to it that `aclose` is called, which ends a call that has not ended.
    """

    def __init__(self, request_id: str, leave: Callable[[str], None]) -> None:
        """Make the stream of `request_id`; `leave` is called if the reader goes before the end."""
        self.request_id = request_id
        self._leave = leave
        self._parts: deque[PartT] = deque()
        self._is_ended = False
        self._error: ErrorInfo | None = None
        self._arrived = asyncio.Event()

    @property
    def is_ended(self) -> bool:
        """Say whether the end has arrived; it may not have been read yet."""
        return self._is_ended

    def __aiter__(self) -> CallStream[PartT]:
        return self

    async def __anext__(self) -> PartT:
        while not self._parts:
            if self._is_ended:
                if self._error is not None:
                    raise self._error.to_error()
                raise StopAsyncIteration
            self._arrived.clear()
            await self._arrived.wait()
        return self._parts.popleft()

    async def aclose(self) -> None:
        """End the call if it has not ended; without waiting for the process's answer."""
        if not self._is_ended:
            self._leave(self.request_id)

    def put(self, part: PartT) -> None:
        """Add a part; called by the owner of the stream, in the process's order."""
        self._parts.append(part)
        self._arrived.set()

    def end(self, error: ErrorInfo | None = None) -> None:
        """End the stream; a second end is ignored."""
        if not self._is_ended:
            self._is_ended, self._error = True, error
            self._arrived.set()


class ServiceClient(Generic[PartT]):
    """Own the streams of the calls open at one process. Event loop only."""

    def __init__(self, send: Callable[[ToEngine], None], part_type: type[PartT]) -> None:
        self._send = send
        self._decoder = msgspec.msgpack.Decoder(part_type)
        self._open: dict[str, CallStream[PartT]] = {}
        self._became_idle = asyncio.Event()
        self._became_idle.set()
        self._has_produced = False
        self.num_heard = 0
        self._stats_reply: asyncio.Future[ServiceStats | None] | None = None

    @property
    def num_open(self) -> int:
        """Count the calls that have not ended."""
        return len(self._open)

    @property
    def has_produced(self) -> bool:
        """Say whether the process has answered anybody anything."""
        return self._has_produced

    def call(self, request_id: str, request: Any) -> CallStream[PartT]:
        """Send `request` and return its stream; its id must be new to this process."""
        assert request_id not in self._open, f"request id in use: {request_id}"
        stream: CallStream[PartT] = CallStream(request_id, self._leave)
        self._open[request_id] = stream
        self._became_idle.clear()
        self._send(CallService(request_id, msgspec.Raw(msgspec.msgpack.encode(request))))
        return stream

    def deliver(self, message: FromService) -> None:
        """Hand one message of the process on to whom it concerns."""
        self.num_heard += 1
        if isinstance(message, ServiceStats):
            self._answer_stats(message)
            return
        # Readers that have left are still named by what was under way.
        stream = self._open.get(message.request_id)
        if stream is None:
            return
        self._has_produced = True
        if isinstance(message, CallPart):
            stream.put(self._decoder.decode(message.part))
        elif isinstance(message, CallEnd):
            stream.end(message.error)
            self._forget(message.request_id)

    def end_all(
        self, finish_reason: Literal["abort", "error"], error: ErrorInfo | None = None
    ) -> int:
        """End every open call now, without the process; return how many there were."""
        ended = list(self._open.values())
        if finish_reason == "abort":
            error = ErrorInfo.of(RequestAbortedError("the server is shutting down"))
        for stream in ended:
            stream.end(error)
            self._forget(stream.request_id)
        self._answer_stats(None)
        return len(ended)

    async def wait_idle(self) -> None:
        """Wait until no call is open."""
        await self._became_idle.wait()

    def ask_stats(self) -> asyncio.Future[ServiceStats | None]:
        """Ask for statistics unless they are asked for already; return the answer to come."""
        if self._stats_reply is None:
            self._stats_reply = asyncio.get_running_loop().create_future()
            self._send(GetStats())
        return self._stats_reply

    def _answer_stats(self, stats: ServiceStats | None) -> None:
        reply, self._stats_reply = self._stats_reply, None
        if reply is not None and not reply.done():
            reply.set_result(stats)

    def _leave(self, request_id: str) -> None:
        stream = self._open.get(request_id)
        if stream is None:
            return
        self._send(AbortRequest(request_id))
        stream.end(ErrorInfo.of(RequestAbortedError("the client has left")))
        self._forget(request_id)

    def _forget(self, request_id: str) -> None:
        del self._open[request_id]
        if not self._open:
            self._became_idle.set()
