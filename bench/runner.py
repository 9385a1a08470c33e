"""Run one repetition of one configuration: prime, warm up, load the server, record."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import itertools
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from vllm_mlx.bench.arrivals import closed_loop, open_loop, schedule
from vllm_mlx.bench.configuration import Configuration
from vllm_mlx.bench.endpoints import Ask, Message
from vllm_mlx.bench.http_client import HttpRequest
from vllm_mlx.bench.http_connection import ExchangeError
from vllm_mlx.bench.measuring_loop import MeasuringLoop
from vllm_mlx.bench.plan import body_fields
from vllm_mlx.bench.prompt import Prompt
from vllm_mlx.bench.requester import Requester
from vllm_mlx.bench.timeline import Place, RequestRecord, RequestRecorder


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClientCost:
    """Hold what measuring took on the measuring side."""

    cpu_s: float
    wall_s: float
    longest_turn_s: float | None

    def columns(self, records: Sequence[RequestRecord]) -> dict[str, Any]:
        """Return the client's columns of a repetition."""
        num_events = sum(len(record.event_times) for record in records)
        late = max((r.started_at - r.scheduled_at for r in records), default=None)
        return {
            "client_cpu": self.cpu_s / self.wall_s if self.wall_s > 0 else None,
            "client_us_per_event": self.cpu_s * 1e6 / num_events if num_events else None,
            "client_lag_max": self.longest_turn_s * 1e3
            if self.longest_turn_s is not None
            else None,
            "dispatch_lag_max": late * 1e3 if late is not None else None,
        }


class Runner:
    """Send the requests of one configuration; shares the requester with the rest of the run.

    `records` grows while requests end, and holds what was measured whenever the run is stopped.
    `before_each` is awaited before each conversation, outside its time.
    """

    def __init__(
        self,
        requester: Requester,
        configuration: Configuration,
        model: str,
        *,
        is_held: bool,
        seed: int,
        before_each: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._requester = requester
        self._configuration = configuration
        self._model = model
        self._is_held = is_held and configuration.output_tokens_target is not None
        self._seed = seed
        self._before_each = before_each
        self._indices = itertools.count()
        self.records: list[RequestRecord] = []
        self.num_planned = 0

    async def send_unmeasured(self, prompts: Sequence[Prompt], max_tokens: int) -> None:
        """Send prompts whose answers do not count, as many at once as the load has.

        One after the other where the load is an open loop.
        """

        async def perform(index: int, scheduled_at: float) -> None:
            prompt = prompts[index]
            ask = self._ask(prompt, prompt.messages, max_tokens)
            await self._send(self._requester.encode(ask), ask, Place(-1, "-"), scheduled_at)

        await closed_loop(range(len(prompts)), self._num_at_once, perform, None)

    async def measure(self, prompts: Sequence[Prompt], repetition: int) -> ClientCost:
        """Load the server with `prompts`, one conversation each, and return the client's cost."""
        turns = self._configuration.turns
        self.num_planned = len(prompts) * turns
        asks = [self._ask(prompt, prompt.messages, self._max_tokens(prompt)) for prompt in prompts]
        encoded = [self._requester.encode(ask) for ask in asks]
        loop = asyncio.get_running_loop()

        async def perform(index: int, scheduled_at: float) -> None:
            if self._before_each is not None:
                await self._before_each()
                scheduled_at = loop.time()
            await self._converse(index, prompts[index], asks[index], encoded[index], scheduled_at)

        with contextlib.suppress(ExchangeError):
            # What cannot be opened now is tried, and reported, by the request that needs it.
            await self._requester.client.open(self._configuration.concurrency or 0)
        meter = _Meter(loop)
        try:
            if self._configuration.concurrency is not None:
                await closed_loop(
                    range(len(prompts)), self._configuration.concurrency, perform, None
                )
            else:
                await self._open_loop(len(prompts), perform, repetition)
        finally:
            cost = meter.stop()
        return cost

    async def _open_loop(self, num: int, perform: Any, repetition: int) -> None:
        configuration = self._configuration
        assert configuration.request_rate_target is not None
        rng = random.Random(f"{self._seed} arrivals {repetition}")
        offsets = schedule(
            configuration.request_rate_target,
            configuration.arrival,
            configuration.burstiness or 1.0,
            rng,
        )
        await open_loop(range(num), offsets, perform, None)

    async def _converse(
        self, index: int, prompt: Prompt, ask: Ask, request: HttpRequest, scheduled_at: float
    ) -> None:
        """Run one conversation; it ends early when a turn fails."""
        messages: list[Message] = list(prompt.messages)
        for turn in range(self._configuration.turns):
            if turn:
                messages.append({"role": "user", "content": prompt.follow_up(turn)})
                ask = self._ask(prompt, messages, self._max_tokens(prompt))
                request = self._requester.encode(ask)
                scheduled_at = asyncio.get_running_loop().time()
            place = Place(next(self._indices), prompt.id, index, turn)
            record = await self._send(request, ask, place, scheduled_at)
            self.records.append(record)
            if not record.is_ok:
                return
            messages.append({"role": "assistant", "content": record.answer.content})

    async def _send(
        self, request: HttpRequest, ask: Ask, place: Place, scheduled_at: float
    ) -> RequestRecord:
        recorder = RequestRecorder(
            self._requester.endpoint,
            place,
            scheduled_at=scheduled_at,
            is_streamed=ask.is_streamed,
            max_tokens=ask.max_tokens,
        )
        return await self._requester.send(request, recorder)

    def _ask(self, prompt: Prompt, messages: Sequence[Message], max_tokens: int) -> Ask:
        return Ask(
            model=self._model,
            messages=tuple(messages),
            max_tokens=max_tokens,
            is_streamed=self._configuration.stream,
            temperature=self._configuration.temperature,
            tools=prompt.tools,
            is_held=self._is_held,
            extra=body_fields(prompt, self._configuration),
        )

    def _max_tokens(self, prompt: Prompt) -> int:
        if self._configuration.output_tokens_target is not None:
            return self._configuration.output_tokens_target
        return prompt.max_tokens or self._configuration.max_tokens

    @property
    def _num_at_once(self) -> int:
        return self._configuration.concurrency or 1


class _Meter:
    """Measure what the client itself takes, with the collector of garbage held off."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._was_collecting = gc.isenabled()
        # A collection in between would stop the clock for every stream.
        gc.disable()
        if isinstance(loop, MeasuringLoop):
            loop.take_longest_turn_s()
        self._cpu_began = time.process_time()
        self._wall_began = loop.time()

    def stop(self) -> ClientCost:
        """Return the cost so far, and let the collector work again."""
        longest = None
        if isinstance(self._loop, MeasuringLoop):
            longest = self._loop.take_longest_turn_s()
        cost = ClientCost(
            cpu_s=time.process_time() - self._cpu_began,
            wall_s=self._loop.time() - self._wall_began,
            longest_turn_s=longest,
        )
        if self._was_collecting:
            gc.enable()
        return cost
