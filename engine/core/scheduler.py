"""Decide, between two forwards, which rows join, leave, decode and prefill; pure."""

from __future__ import annotations

from bisect import insort
from collections import Counter
from dataclasses import dataclass

from vllm_mlx.engine.core.prefixes import NoPrefixes, Prefixes
from vllm_mlx.engine.core.request import GenerationRequest
from vllm_mlx.engine.core.sequence import Sequence, SequenceStatus
from vllm_mlx.engine.kv.layout import KVSpace

#: Most rows of one client that prefill at once, and of all: each has caches of its own.
MAX_PREFILLING = 16
MAX_PREFILLING_OF_ALL = 32
#: Smallest share of a step's prefill budget that a longer prompt is given: each is a forward.
MIN_SHARE_TOKENS = 128


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Compute tokens `start` to `stop` of a sequence into its private caches."""

    sequence: Sequence
    start: int
    stop: int

    @property
    def size(self) -> int:
        """Count its tokens."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Say what one step computes: one token for each row, and these chunks."""

    decode: tuple[Sequence, ...] = ()
    prefill: tuple[PrefillChunk, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Say whether there is nothing to compute."""
        return not self.decode and not self.prefill

    @property
    def num_prefill_tokens(self) -> int:
        """Count the tokens of all chunks."""
        return sum(chunk.size for chunk in self.prefill)


class Scheduler:
    """Own the queues of waiting, prefilling and running sequences; used by the engine thread.

    Order is by priority, turn and arrival, everywhere: the front of the waiting queue starts
    first, and when bytes run out the last in that order is preempted. The first can never be
    preempted, so something always advances. All methods must be called in the drained window.

    Clients take turns: each sequence that a client has waiting already sets its next one back by
    one turn, and nobody comes before what has started.

    `max_prefill_area` bounds a chunk's tokens times its context, where attention stores scores.
    `prefixes` is asked before a sequence starts and told before it joins, leaves or is preempted.
    """

    def __init__(
        self,
        kv: KVSpace,
        *,
        max_num_seqs: int,
        prefill_tokens_per_step: int,
        admission_headroom_tokens: int,
        max_prefill_area: int | None = None,
        prefixes: Prefixes | None = None,
    ) -> None:
        self._kv = kv
        self._prefixes: Prefixes = prefixes or NoPrefixes()
        self._headroom = admission_headroom_tokens
        self._max_area = max_prefill_area
        self._max_num_seqs = max_num_seqs
        self._prefill_budget = prefill_tokens_per_step
        #: Most prompt tokens of a step in which rows decode.
        self.prefill_budget_beside_rows = prefill_tokens_per_step
        self._waiting: list[Sequence] = []
        self._prefilling: list[Sequence] = []
        self._running: list[Sequence] = []
        self.num_preemptions = 0
        #: Nothing new starts beside what has started.
        self.is_short_of_memory = False

    @property
    def num_waiting(self) -> int:
        """Count sequences that have no KV yet, or not all of it."""
        return len(self._waiting) + len(self._prefilling)

    @property
    def num_running(self) -> int:
        """Count sequences that decode."""
        return len(self._running)

    @property
    def has_work(self) -> bool:
        """Say whether a step would do anything."""
        return bool(self._waiting or self._prefilling or self._running)

    def sequences(self) -> list[Sequence]:
        """Return every unfinished sequence, running ones first."""
        return [*self._running, *self._prefilling, *self._waiting]

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence by priority, turn and arrival."""
        sequence.turn = self._next_turn(sequence.request)
        insort(self._waiting, sequence, key=_order)

    def remove(self, sequence: Sequence, *, is_sound: bool = True) -> None:
        """Take a sequence out and free its row; one that is not here is ignored.

        Its KV is stored for others, unless it failed or the device is not `is_sound`.
        """
        queue = self._queue_of(sequence)
        if sequence not in queue:
            return
        queue.remove(sequence)
        if sequence.status is not SequenceStatus.WAITING:
            has_failed = sequence.finish is not None and sequence.finish.reason == "error"
            if is_sound and not has_failed:
                self._prefixes.save(sequence)
            self._kv.remove(sequence.id)
        self._prefixes.forget(sequence)
        sequence.status = SequenceStatus.FINISHED

    def preempt_last(self) -> bool:
        """Send the row that started last back to waiting, unless it is the only one."""
        if len(self._running) + len(self._prefilling) < 2:
            return False
        self._preempt(self._last_started())
        self._kv.tidy()
        return True

    def schedule(self) -> StepPlan:
        """Make room, admit, join, and divide the prefill budget; mutates queues and KV rows."""
        self._make_room()
        self._admit()
        self._join()
        if not self._waiting and not self._prefilling:
            self._kv.tidy()
        return StepPlan(decode=tuple(self._running), prefill=self._share_prefill())

    def _queue_of(self, sequence: Sequence) -> list[Sequence]:
        if sequence.status is SequenceStatus.WAITING:
            return self._waiting
        if sequence.status is SequenceStatus.PREFILLING:
            return self._prefilling
        return self._running

    def _make_room(self) -> None:
        """Give every running row room for its next token, preempting from the back."""
        for sequence in sorted(self._running, key=_order):
            while sequence.status is SequenceStatus.RUNNING:
                if self._kv.can_grow(sequence.id, sequence.num_tokens):
                    self._kv.grow(sequence.id, sequence.num_tokens)
                    break
                self._preempt(self._last_started())

    def _join(self) -> None:
        """Move prefilled rows into the batch, oldest first, as far as bytes allow."""
        for sequence in list(self._prefilling):
            # One further back may have been preempted for one before it in this very loop.
            is_here = sequence.status is SequenceStatus.PREFILLING
            if not is_here or sequence.num_computed < sequence.prefill_target or sequence.is_held:
                continue
            self._prefixes.save(sequence)
            while not self._kv.can_join(sequence.id, sequence.num_tokens):
                victim = self._last_started()
                if _order(victim) <= _order(sequence):
                    break
                self._preempt(victim)
            if not self._kv.can_join(sequence.id, sequence.num_tokens):
                break
            self._kv.join(sequence.id, sequence.num_tokens)
            self._prefilling.remove(sequence)
            sequence.status = SequenceStatus.RUNNING
            self._running.append(sequence)

    def _admit(self) -> None:
        """Start waiting sequences in order; the first that does not fit holds back the rest.

        One whose prefix another sequence is computing lets others pass until that is stored, and
        one whose client has its places taken lets other clients' pass.
        """
        if self.is_short_of_memory and (self._running or self._prefilling):
            return
        places = Counter(s.request.client for s in self._prefilling)
        for sequence in list(self._waiting):
            if (
                len(self._prefilling) >= MAX_PREFILLING_OF_ALL
                or len(self._running) + len(self._prefilling) >= self._max_num_seqs
            ):
                break
            if places[sequence.request.client] >= MAX_PREFILLING:
                continue
            if not sequence.wants_prompt_logprobs and self._prefixes.must_wait(sequence):
                continue
            num_tokens = sequence.num_tokens + min(
                self._headroom, sequence.max_new_tokens - len(sequence.output)
            )
            if not self._kv.can_start(num_tokens):
                break
            self._start(sequence, num_tokens)
            places[sequence.request.client] += 1

    def _start(self, sequence: Sequence, num_tokens: int) -> None:
        # In one of the queues at every moment: whatever raises here must find it to end it.
        self._kv.start(sequence.id, num_tokens)
        self._waiting.remove(sequence)
        sequence.status = SequenceStatus.PREFILLING
        insort(self._prefilling, sequence, key=_order)
        if not sequence.wants_prompt_logprobs:
            sequence.num_computed = self._prefixes.restore(sequence)
        if sequence.num_preemptions == 0:
            sequence.num_cached = sequence.num_computed

    def _share_prefill(self) -> tuple[PrefillChunk, ...]:
        """Divide the step's prefill budget: equal shares, and what short prompts leave goes on."""
        needs = [(s, s.prefill_target - s.num_computed) for s in _in_turns(self._prefilling)]
        needs = [(s, need) for s, need in needs if need > 0]
        budget = self._prefill_budget
        if self._running:
            budget = min(budget, self.prefill_budget_beside_rows)
        chosen: list[tuple[Sequence, int]] = []
        least = 0
        for sequence, need in needs:
            least += min(need, MIN_SHARE_TOKENS)
            if chosen and least > budget:
                break
            chosen.append((sequence, need))
        chosen.sort(key=lambda item: item[1])
        sizes: dict[str, int] = {}
        for taken, (sequence, need) in enumerate(chosen):
            size = min(need, budget // (len(chosen) - taken))
            sizes[sequence.id] = self._within_area(sequence.num_computed, size)
            budget -= sizes[sequence.id]
        return tuple(
            PrefillChunk(s, s.num_computed, self._chunk_stop(s, s.num_computed + sizes[s.id]))
            for s in self._prefilling
            if sizes.get(s.id)
        )

    def _chunk_stop(self, sequence: Sequence, stop: int) -> int:
        """Cut a chunk where state is to be captured: on the grid, and at the last whole block."""
        grid, block_size = self._prefixes.checkpoint_grid, self._prefixes.block_size
        if grid is None:
            return stop
        start = sequence.num_computed
        last_edge = sequence.prefill_target // block_size * block_size
        edges = [(start // grid + 1) * grid, last_edge]
        return min([stop, *(edge for edge in edges if edge > start)])

    def _within_area(self, start: int, size: int) -> int:
        if self._max_area is None:
            return size
        return min(size, max(1, self._max_area // (start + size)))

    def _last_started(self) -> Sequence:
        return max([*self._running, *self._prefilling], key=_order)

    def _preempt(self, sequence: Sequence) -> None:
        self._queue_of(sequence).remove(sequence)
        self._prefixes.save(sequence)
        self._kv.remove(sequence.id)
        sequence.restart()
        self.num_preemptions += 1
        insort(self._waiting, sequence, key=_order)

    def _next_turn(self, request: GenerationRequest) -> int:
        """Return the turn of a new sequence, among those of its priority."""
        peers = [s for s in self._waiting if s.request.priority == request.priority]
        started = [
            s.turn
            for s in (*self._running, *self._prefilling)
            if s.request.priority == request.priority
        ]
        turn = max(started) if started else min((s.turn for s in peers), default=0)
        own = [s.turn for s in peers if s.request.client == request.client]
        return max(turn, max(own) + 1) if own else turn


def _in_turns(sequences: list[Sequence]) -> list[Sequence]:
    """Return sequences, which are in order, by turns: the first of each client, then the second."""
    taken: Counter[tuple[int, str]] = Counter()
    ranks: dict[str, tuple[int, int]] = {}
    for sequence in sequences:
        priority, client = sequence.request.priority, sequence.request.client
        ranks[sequence.id] = (-priority, taken[priority, client])
        taken[priority, client] += 1
    return sorted(sequences, key=lambda sequence: ranks[sequence.id])


def _order(sequence: Sequence) -> tuple[int, int, int]:
    return (-sequence.request.priority, sequence.turn, sequence.arrival)
