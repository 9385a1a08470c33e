"""The requests that are being answered: started, read with time limits, cancelled and counted."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

import msgspec

from vllm_mlx.engine.core.logprobs import Logprobs
from vllm_mlx.engine.core.outputs import TOKEN_BYTES, RowOutput
from vllm_mlx.engine.core.request import GenerationRequest
from vllm_mlx.engine.core.stats import EngineStats, Phase, RequestStats
from vllm_mlx.engine.errors import (
    EngineUnavailableError,
    RequestAbortedError,
    RequestTimeoutError,
    RowFailedError,
)
from vllm_mlx.server.admission import Admission
from vllm_mlx.server.engine_port import EnginePort, OutputStream
from vllm_mlx.server.progress import ProgressReader
from vllm_mlx.server.request_record import RequestRecords

#: How long a stream's response waits for its first output, so that a request which the engine
#: refuses still gets its true status instead of an event after a 200.
_FIRST_OUTPUT_GRACE_S = 1.0

#: What one reading finds: the row and its output, or None when nothing came in time.
News = tuple[int, RowOutput] | None


@dataclass
class Totals:
    """Count what has ended since the server started, over all engines it had."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0


@dataclass
class Answer:
    """Gather the whole output of one row."""

    text: str = ""
    logprobs: list[Logprobs] = field(default_factory=list)
    prompt_logprobs: Logprobs | None = None
    last: RowOutput = field(default_factory=lambda: RowOutput(request_id=""))

    def add(self, output: RowOutput) -> None:
        """Take one output, but for its text, which the reader gathers."""
        self.last = output
        if output.logprobs is not None:
            self.logprobs.append(output.logprobs)
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs


class Generation:
    """Read the rows of one client request until each has ended.

    One reader, on the event loop. `aclose` aborts the rows that have not ended; whoever makes a
    generation must see to it that it is called.
    """

    def __init__(
        self,
        request_id: str,
        streams: dict[str, OutputStream],
        registry: GenerationRegistry,
        keep_alive_s: float,
        timeout_s: float,
    ) -> None:
        self.id = request_id
        self.row_ids = tuple(streams)
        self.is_cancelled = False
        self._registry = registry
        self._streams = dict(enumerate(streams.values()))
        self._pending: dict[asyncio.Task[RowOutput], int] = {}
        self._tick_s = min(keep_alive_s, max(0.02, timeout_s / 4))
        self._timeout_s = timeout_s
        self._peeked: News = None
        self._last_progress = registry.clock()
        self._marks = ((0, 0),) * len(streams)
        self._newest: dict[int, RowOutput] = {}

    @property
    def departs_at(self) -> int | None:
        """Return where the first row's prompt departs from what is stored, if that is known."""
        newest = self._newest.get(0)
        return newest.departs_at if newest is not None else None

    async def peek(self) -> None:
        """Wait a moment for the first output and keep it; raise what the engine refused."""
        self._peeked = await self._read(min(_FIRST_OUTPUT_GRACE_S, self._tick_s))

    async def outputs(self) -> AsyncGenerator[News]:
        """Yield (row, output) as outputs come, and None whenever none came for a while.

        Ends when every row has ended. Raises the error of a row that failed, after what text it
        still had; `RequestTimeoutError` when nothing moves; `RequestAbortedError` when the
        shutdown ended it.
        """
        if self._peeked is not None:
            yield self._peeked
        while self._streams:
            news = await self._read(self._tick_s)
            if news is None:
                await self._check_progress()
            yield news

    async def collect(self) -> list[Answer]:
        """Wait for the end of every row and return their answers in order."""
        parts: list[list[str]] = [[] for _ in self.row_ids]
        answers = [Answer() for _ in self.row_ids]
        async with aclosing(self.outputs()) as outputs:
            async for news in outputs:
                if news is not None:
                    row, output = news
                    parts[row].append(output.text)
                    answers[row].add(output)
        for answer, texts in zip(answers, parts, strict=True):
            answer.text = "".join(texts)
        return answers

    async def aclose(self) -> None:
        """Abort what has not ended and forget the request; may be called twice."""
        for task in self._pending:
            task.cancel()
        self._pending.clear()
        streams, self._streams = self._streams, {}
        for row, stream in streams.items():
            await stream.aclose()
            self._registry.count(self, row, self._newest.get(row, RowOutput(request_id="")))
        self._registry.forget(self)

    async def _read(self, timeout_s: float) -> News:
        """Return the next output of any row, or None after `timeout_s` without one."""
        if len(self._streams) == 1 and not self._pending:
            ((row, stream),) = self._streams.items()
            try:
                async with asyncio.timeout(timeout_s):
                    output = await stream.__anext__()
            except TimeoutError:
                return None
            return row, self._accept(row, output)
        waiting = set(self._pending.values())
        for row, stream in self._streams.items():
            if row not in waiting:
                self._pending[asyncio.ensure_future(_next(stream))] = row
        done, _ = await asyncio.wait(
            self._pending, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
        )
        if not done:
            return None
        # One at a time: the others stay done and are found at the next reading.
        task = next(iter(done))
        row = self._pending.pop(task)
        return row, self._accept(row, task.result())

    def _accept(self, row: int, output: RowOutput) -> RowOutput:
        """Note that `output` came; raise its error once it has no text left to deliver."""
        self._last_progress = self._registry.clock()
        self._newest[row] = output
        self._registry.progressed(self, row, output)
        if output.finish_reason is None:
            return output
        if output.finish_reason == "error" or (
            output.finish_reason == "abort" and not self.is_cancelled
        ):
            if output.text:
                # The text is delivered first; the stream is kept to raise at the next reading.
                bare = msgspec.structs.replace(output, text="", logprobs=None, prompt_logprobs=None)
                self._streams[row] = _Ended(bare)
                return msgspec.structs.replace(output, finish_reason=None, error=None)
            del self._streams[row]
            self._registry.count(self, row, output)
            raise _error_of(output)
        del self._streams[row]
        self._registry.count(self, row, output)
        return output

    async def _check_progress(self) -> None:
        """Raise `RequestTimeoutError` if the engine, too, has seen nothing move for too long."""
        marks = await self._registry.progress.marks(self.row_ids)
        now = self._registry.clock()
        if marks is not None and marks != self._marks:
            self._marks = marks
            self._last_progress = now
        if now - self._last_progress >= self._timeout_s:
            raise RequestTimeoutError(
                f"no progress for {self._timeout_s:g} s; the request was aborted. "
                "Try a shorter prompt, fewer requests at once or a longer --timeout"
            )


class GenerationRegistry:
    """Own the open requests and the totals of those that ended; event loop only."""

    def __init__(
        self,
        engine: EnginePort,
        *,
        max_rows: int,
        max_queue: int,
        max_queue_tokens: int,
        keep_alive_s: float,
        timeout_s: float,
        records: RequestRecords,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.clock = clock
        self._records = records
        self.progress = ProgressReader(engine, clock)
        self.totals = Totals()
        self._engine = engine
        self._admission = Admission(
            max_rows, max_queue, max_queue_tokens, lambda: self.num_open_rows
        )
        self._keep_alive_s = keep_alive_s
        self._timeout_s = timeout_s
        self._open: dict[str, tuple[Generation, float]] = {}
        self._by_row: dict[str, str] = {}
        #: What each open row was accepted as.
        self._accepted: dict[str, RequestStats] = {}

    @property
    def num_open_rows(self) -> int:
        """Count the rows that have not been read to their end."""
        return len(self._by_row)

    @property
    def num_waiting_tokens(self) -> int:
        """Count the prompt tokens of the rows that have answered nothing yet."""
        return self._admission.num_waiting_tokens

    def check_room(self, num_rows: int, *, param: str = "prompt") -> None:
        """Raise `OverloadedError` when so many more rows do not fit; spares work in vain."""
        self._admission.check(num_rows, param)

    def start(self, request_id: str, requests: Sequence[GenerationRequest]) -> Generation:
        """Hand all rows of one client request to the engine.

        Raises `OverloadedError` when the queue is full, `EngineUnavailableError` when there is no
        engine to take them; none is then left behind.
        """
        self.check_room(len(requests))
        self._admission.check_tokens(sum(map(_num_prompt_tokens, requests)))
        streams: dict[str, OutputStream] = {}
        try:
            for request in requests:
                streams[request.request_id] = self._engine.generate(request)
        except EngineUnavailableError:
            for row_id in streams:
                self._engine.abort(row_id)
            raise
        generation = Generation(request_id, streams, self, self._keep_alive_s, self._timeout_s)
        self._open[request_id] = (generation, self.clock())
        self._by_row |= dict.fromkeys(generation.row_ids, request_id)
        for request in requests:
            self._admission.wait(request.request_id, _num_prompt_tokens(request))
            self._accepted[request.request_id] = _accepted(request)
        return generation

    def up_to_date(self, stats: EngineStats) -> EngineStats:
        """Return what the engine told, with the requests that came and went since.

        It tells between two steps, and has not heard of those that came during one. Of older
        figures, those of requests that have been read to their end are left out as well.
        """
        is_old = stats.age_s > 0
        seen = {row.request_id for row in stats.requests}
        requests = [r for r in stats.requests if not is_old or r.request_id in self._by_row]
        num_running, num_waiting = stats.num_running, stats.num_waiting
        if is_old:
            num_running = sum(row.phase == "generation" for row in requests)
            num_waiting = len(requests) - num_running
        for row_id, request_id in self._by_row.items():
            has_answered = self._admission.has_answered(row_id)
            # One that has answered, and is unknown to an engine that tells of now, has ended there.
            if row_id in seen or (has_answered and not is_old):
                continue
            row = self._accepted[row_id]
            age_s = self.clock() - self._open[request_id][1]
            phase: Phase = "generation" if has_answered else row.phase
            requests.append(msgspec.structs.replace(row, age_s=age_s, phase=phase))
            num_running += has_answered
            num_waiting += not has_answered
        return msgspec.structs.replace(
            stats,
            requests=tuple(requests),
            num_running=num_running,
            num_waiting=num_waiting,
        )

    def progressed(self, generation: Generation, row: int, output: RowOutput) -> None:
        """Note that an output of a row is here, so that it waits no longer."""
        row_id = generation.row_ids[row]
        self._admission.answered(row_id)
        self._records.progressed(generation.id, row_id, output)

    def cancel(self, request_id: str) -> str | None:
        """End an open request by its own id or that of one of its rows; return its own id.

        Its reader gets what was generated, with finish reason `abort`.
        """
        request_id = self._by_row.get(request_id, request_id)
        generation, _ = self._open.get(request_id, (None, 0.0))
        if generation is None:
            return None
        generation.is_cancelled = True
        for row_id in generation.row_ids:
            self._engine.abort(row_id)
        return request_id

    def count(self, generation: Generation, row: int, output: RowOutput) -> None:
        """Add the final output of one row, or the last one before it was left, to the totals."""
        self._records.ended(generation.id, generation.row_ids[row], output)
        self.totals.requests += 1
        self.totals.prompt_tokens += output.num_prompt_tokens
        self.totals.cached_tokens += output.num_cached_tokens
        self.totals.completion_tokens += output.num_completion_tokens

    def forget(self, generation: Generation) -> None:
        """Drop a request that has ended."""
        _, started = self._open.pop(generation.id, (None, None))
        if started is None:
            return
        for row_id in generation.row_ids:
            self._by_row.pop(row_id, None)
            self._accepted.pop(row_id, None)
            self._admission.answered(row_id)
        self._admission.record(self.clock() - started)


class _Ended:
    """Stand for a stream whose final output is known and has yet to be acted on."""

    def __init__(self, output: RowOutput) -> None:
        self._output = output

    async def __anext__(self) -> RowOutput:
        return self._output

    async def aclose(self) -> None:
        """Leave: the row has ended already."""


def _num_prompt_tokens(request: GenerationRequest) -> int:
    return len(request.prompt) // TOKEN_BYTES


def _accepted(request: GenerationRequest) -> RequestStats:
    return RequestStats(
        request_id=request.request_id,
        phase="queued",
        num_prompt_tokens=_num_prompt_tokens(request),
        num_prefilled_tokens=0,
        num_cached_tokens=0,
        num_completion_tokens=0,
        max_tokens=request.sampling.max_tokens,
        age_s=0.0,
    )


async def _next(stream: OutputStream) -> RowOutput:
    return await stream.__anext__()


def _error_of(output: RowOutput) -> Exception:
    if output.finish_reason == "abort":
        return RequestAbortedError(
            "the server is shutting down and has aborted this request", retry_after_s=5.0
        )
    if output.error is None:
        return RowFailedError("the engine ended this request without saying why")
    return output.error.to_error()
