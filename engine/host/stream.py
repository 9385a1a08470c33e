"""The outputs of one request, as an asynchronous iterator with one merging slot."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from vllm_mlx.engine.core.outputs import ErrorInfo, FinishReason, RowOutput
from vllm_mlx.engine.host.delta import DeltaSlot


class RequestStream:
    """Iterate over the outputs of one request; the last one, and only it, has a `finish_reason`.

    For one reader, on the event loop's thread. Iterating raises nothing of its own: a failed
    request ends with an output whose `error` is set. Outputs that come faster than they are read
    merge into one. A cancelled `__anext__` loses nothing.
    """

    def __init__(self, request_id: str, leave: Callable[[str], None]) -> None:
        """Make the stream of `request_id`; `leave` is called if the reader goes before the end."""
        self.request_id = request_id
        self._leave = leave
        self._slot = DeltaSlot()
        self._newest: RowOutput | None = None
        self._is_finished = False
        self._arrived = asyncio.Event()

    @property
    def is_finished(self) -> bool:
        """Say whether the final output has arrived; it may not have been read yet."""
        return self._is_finished

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> RowOutput:
        while self._slot.is_empty:
            if self._is_finished:
                raise StopAsyncIteration
            self._arrived.clear()
            await self._arrived.wait()
        return self._slot.take()

    async def collect(self) -> RowOutput:
        """Wait for the end and return everything as one output, which has the `finish_reason`."""
        merged = DeltaSlot()
        async for row in self:
            merged.put(row)
        return merged.take()

    async def aclose(self) -> None:
        """Abort the request if it has not finished; without waiting for the engine's answer."""
        if not self._is_finished:
            self._leave(self.request_id)

    def put(self, row: RowOutput) -> None:
        """Add what the engine says; called by the owner of the stream, in the engine's order."""
        if self._is_finished:
            return
        self._newest = row
        self._is_finished = row.finish_reason is not None
        self._slot.put(row)
        self._arrived.set()

    def end(self, finish_reason: FinishReason, error: ErrorInfo | None = None) -> None:
        """End a stream for which the engine will say nothing more, with the counts known so far."""
        newest = self._newest or RowOutput(request_id=self.request_id)
        self.put(
            RowOutput(
                request_id=self.request_id,
                finish_reason=finish_reason,
                error=error,
                num_prompt_tokens=newest.num_prompt_tokens,
                num_cached_tokens=newest.num_cached_tokens,
                num_stored_tokens=newest.num_stored_tokens,
                num_completion_tokens=newest.num_completion_tokens,
                num_reasoning_tokens=newest.num_reasoning_tokens,
            )
        )
