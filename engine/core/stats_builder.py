"""Count what the engine did, and describe its open requests; pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from vllm_mlx.engine.core.histogram import TOKEN_GAP_BOUNDS_S, Histogram
from vllm_mlx.engine.core.scheduler import StepPlan
from vllm_mlx.engine.core.sequence import Sequence, SequenceStatus
from vllm_mlx.engine.core.stats import (
    DeviceMemory,
    EngineStats,
    MemoryPressure,
    Phase,
    PrefixStats,
    RequestStats,
)
from vllm_mlx.engine.core.step_log import StepLog

_PHASES: dict[SequenceStatus, Phase] = {
    SequenceStatus.WAITING: "queued",
    SequenceStatus.PREFILLING: "prefill",
    SequenceStatus.RUNNING: "generation",
    SequenceStatus.FINISHED: "generation",
}


class QueueCounts(Protocol):
    """Count the sequences of a scheduler."""

    num_preemptions: int

    @property
    def num_running(self) -> int:
        """Count sequences that decode."""
        ...

    @property
    def num_waiting(self) -> int:
        """Count sequences that wait or prefill."""
        ...


class StatsBuilder:
    """Own the engine's counters; used by the engine thread."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._steps = 0
        self._finished = 0
        self._prompt_tokens = 0
        self._completion_tokens = 0
        self._prefilled_tokens = 0
        self._token_gaps = Histogram(TOKEN_GAP_BOUNDS_S)
        self._step_log = StepLog(clock)

    def begin_step(self) -> None:
        """Count a step."""
        self._steps += 1
        self._step_log.begin()

    def planned(self, plan: StepPlan) -> None:
        """Note which sequences start now, and what the step computes."""
        now = self._clock()
        prefilling = [chunk.sequence for chunk in plan.prefill]
        started = [s for s in (*plan.decode, *prefilling) if s.started_s is None]
        for sequence in started:
            sequence.started_s = now
        self._step_log.planned(
            num_decoded=len(plan.decode),
            num_prefilled=plan.num_prefill_tokens,
            num_hits=sum(sequence.num_cached for sequence in started),
        )

    def end_step(self, queues: QueueCounts) -> None:
        """Log the step, where that is wanted."""
        self._step_log.end(
            self._steps, num_waiting=queues.num_waiting, num_running=queues.num_running
        )

    def token(self, sequence: Sequence) -> None:
        """Count a token that a row was given, and the time since its last one."""
        now = self._clock()
        self._completion_tokens += 1
        if sequence.first_token_s is None or sequence.last_token_s is None:
            sequence.first_token_s = now
        else:
            self._token_gaps.observe(now - sequence.last_token_s)
        sequence.last_token_s = now

    def prefilled(self, num_tokens: int) -> None:
        """Count prompt tokens that a forward computes."""
        self._prefilled_tokens += num_tokens

    def finished(self, sequence: Sequence) -> None:
        """Count a request that got its final output."""
        self._finished += 1
        self._prompt_tokens += len(sequence.prompt)

    def snapshot(
        self,
        sequences: Iterable[Sequence],
        queues: QueueCounts,
        *,
        kv_bytes: int,
        kv_budget_bytes: int,
        memory: DeviceMemory | None,
        memory_pressure: MemoryPressure,
        prefixes: PrefixStats | None,
    ) -> EngineStats:
        """Return everything as one frozen message."""
        now = self._clock()
        return EngineStats(
            steps_executed=self._steps,
            num_running=queues.num_running,
            num_waiting=queues.num_waiting,
            requests_finished=self._finished,
            prompt_tokens=self._prompt_tokens,
            completion_tokens=self._completion_tokens,
            prefilled_tokens=self._prefilled_tokens,
            num_preemptions=queues.num_preemptions,
            token_gaps=self._token_gaps.snapshot(),
            kv_bytes=kv_bytes,
            kv_budget_bytes=kv_budget_bytes,
            memory=memory,
            memory_pressure=memory_pressure,
            prefixes=prefixes,
            requests=tuple(_describe(sequence, now) for sequence in sequences),
        )


def _describe(sequence: Sequence, now_s: float) -> RequestStats:
    first = sequence.first_token_s
    return RequestStats(
        request_id=sequence.id,
        phase=_PHASES[sequence.status],
        num_prompt_tokens=len(sequence.prompt),
        num_prefilled_tokens=min(sequence.num_computed, len(sequence.prompt)),
        num_cached_tokens=sequence.num_cached,
        cache_hit_type=sequence.cache_hit_type,
        num_completion_tokens=len(sequence.output),
        max_tokens=sequence.max_new_tokens,
        age_s=now_s - sequence.added_s,
        ttft_s=None if first is None else first - sequence.added_s,
        generation_s=None if first is None else now_s - first,
        num_preemptions=sequence.num_preemptions,
    )
