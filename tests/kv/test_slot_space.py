"""The real scheduler over the real layout, without arrays: its budget, and that loads finish."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq
from typing import Any

import mlx.core as mx
import pytest
from support.fakes import make_sequence

from vllm_mlx.engine.core.scheduler import Scheduler
from vllm_mlx.engine.core.sequence import Sequence
from vllm_mlx.engine.kv.slot_plan import RowCost
from vllm_mlx.engine.kv.slots import SlotLayout

NO_EOS: frozenset[int] = frozenset()
TOKEN_BYTES = 10


class NoArrays:
    """Cost what a layer costs, and hold nothing."""

    cost = RowCost(TOKEN_BYTES)

    def resize(self, group: int, capacity: int, keep: Seq[int | None]) -> None:
        """Build nothing."""

    def adopt(self, group: int, index: int, cache: Any, length: int) -> None:
        """Copy nothing."""

    def move(self, source: int, source_index: int, target: int, target_index: int) -> None:
        """Move nothing."""

    def drop(self, group: int) -> None:
        """Drop nothing."""

    def arrays(self) -> list[mx.array]:
        """Hold nothing."""
        return []


class Blocks:
    """Hold bytes of which some cannot be evicted until they are let go of."""

    def __init__(self, evictable: int, held: int) -> None:
        self.evictable = evictable
        self.held = held

    @property
    def num_bytes(self) -> int:
        """Return all bytes."""
        return self.evictable + self.held

    def evict_to(self, num_bytes: int) -> int:
        """Evict what is not held."""
        freed = max(0, min(self.evictable, self.num_bytes - num_bytes))
        self.evictable -= freed
        return freed

    def release_held(self) -> bool:
        """Let go."""
        had, self.held, self.evictable = self.held, 0, self.evictable + self.held
        return had > 0


def make_layout(budget_tokens: int, max_groups: int = 3, max_capacity: int = 512) -> SlotLayout:
    """Return a layout whose budget is given in tokens."""
    return SlotLayout(
        lambda: [None],
        [NoArrays()],
        budget_bytes=budget_tokens * TOKEN_BYTES,
        max_capacity=max_capacity,
        max_groups=max_groups,
    )


def make_scheduler(layout: SlotLayout, *, headroom: int = 4, budget: int = 64) -> Scheduler:
    """Return the real scheduler over a layout."""
    return Scheduler(
        layout,
        max_num_seqs=16,
        prefill_tokens_per_step=budget,
        admission_headroom_tokens=headroom,
    )


def step(scheduler: Scheduler) -> list[Sequence]:
    """Schedule once and do what a runner would; return what finished."""
    plan = scheduler.schedule()
    for sequence in plan.decode:
        sequence.num_computed += 1
        sequence.append(7, NO_EOS)
    for chunk in plan.prefill:
        chunk.sequence.num_computed = chunk.stop
    finished = [sequence for sequence in plan.decode if sequence.is_finished]
    for sequence in finished:
        scheduler.remove(sequence)
    return finished


def test_a_row_that_waits_behind_blocks_held_for_it_starts() -> None:
    """Held blocks and the row together over the budget: the blocks are let go of, none waits."""
    layout = make_layout(budget_tokens=1000, max_capacity=1000)
    layout.share_budget(Blocks(evictable=0, held=500 * TOKEN_BYTES))
    scheduler = make_scheduler(layout)
    scheduler.add(make_sequence("long", 600, max_tokens=2, max_model_len=1000))
    scheduler.add(make_sequence("short", 3, arrival=1, max_tokens=2))
    finished = [s.id for _ in range(40) for s in step(scheduler)]
    assert sorted(finished) == ["long", "short"]


def test_the_only_row_grows_whatever_is_held() -> None:
    """A lone row is never preempted for bytes that nobody uses."""
    layout = make_layout(budget_tokens=256, max_capacity=256)
    blocks = Blocks(evictable=0, held=0)
    layout.share_budget(blocks)
    scheduler = make_scheduler(layout)
    row = make_sequence("row", 60, max_tokens=100, max_model_len=256)
    scheduler.add(row)
    for _ in range(3):
        step(scheduler)
    blocks.held = 250 * TOKEN_BYTES
    while not row.is_finished:
        step(scheduler)
    assert row.num_preemptions == 0


def test_a_hole_does_not_pay_for_a_new_rows_own_caches() -> None:
    """A row that prefills holds bytes beside the batch, however many holes that has."""
    layout = make_layout(budget_tokens=64 * 8)
    scheduler = make_scheduler(layout, budget=512)
    rows = [make_sequence(str(n), 10, arrival=n, max_tokens=200) for n in range(8)]
    for row in rows:
        scheduler.add(row)
    for _ in range(4):
        step(scheduler)
        assert layout.allocated_bytes <= 64 * 8 * TOKEN_BYTES


def test_a_row_preempted_while_others_join_is_left_alone() -> None:
    """Joining an older row may preempt a younger one of one token, which then has no caches."""
    layout = make_layout(budget_tokens=128, max_groups=1, max_capacity=128)
    scheduler = make_scheduler(layout, budget=512)
    scheduler.add(make_sequence("old", 40, max_tokens=2, max_model_len=128))
    step(scheduler)
    scheduler.add(make_sequence("tiny", 1, arrival=1, max_tokens=2, max_model_len=128))
    finished = [s.id for _ in range(30) for s in step(scheduler)]
    assert sorted(finished) == ["old", "tiny"]


@pytest.mark.parametrize("max_groups", [1, 2, 3])
def test_random_loads_finish_within_the_budget(max_groups: int) -> None:
    """Any load finishes, and more than one row never holds more than the budget."""
    for trial in range(150):
        rng = random.Random(1000 * max_groups + trial)
        budget = rng.choice([64, 200, 512, 2048])
        layout = make_layout(budget, max_groups, max_capacity=min(512, budget))
        if rng.random() < 0.5:
            layout.share_budget(Blocks(rng.randrange(5000), rng.randrange(2000)))
        scheduler = make_scheduler(layout, budget=rng.choice([1, 7, 64, 512]))
        pending = [
            make_sequence(
                str(n),
                rng.choice([1, 1, 2, rng.randint(1, max(1, layout.max_capacity - 60))]),
                arrival=n,
                max_tokens=rng.randint(1, 60),
                max_model_len=layout.max_capacity,
            )
            for n in range(rng.randint(1, 14))
        ]
        pending = [s for s in pending if len(s.prompt) < layout.max_capacity]
        number, finished = len(pending), 0
        for _ in range(6000):
            if pending and rng.random() < 0.4:
                scheduler.add(pending.pop())
            finished += len(step(scheduler))
            layout.check_integrity()
            rows = scheduler.num_running + len(scheduler._prefilling)
            assert rows <= 1 or layout.allocated_bytes <= budget * TOKEN_BYTES
            if finished == number:
                break
        assert finished == number, f"trial {trial} does not finish"
        assert layout.allocated_bytes == 0
