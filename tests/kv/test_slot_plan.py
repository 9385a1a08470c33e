"""The placement of rows in groups: bytes, holes, growth, and random operations."""

from __future__ import annotations

import random

import pytest

from vllm_mlx.engine.errors import InsufficientMemoryError
from vllm_mlx.engine.kv.slot_plan import (
    MAX_SLACK,
    Drop,
    Move,
    PlanOp,
    Resize,
    RowCost,
    SlotPlan,
    fitting_capacity,
    row_bucket,
)

COST = RowCost(bytes_per_token=10)


def make_plan(*, budget: int = 1 << 40, max_capacity: int = 4096, max_groups: int = 3) -> SlotPlan:
    """Return an empty plan where a token costs ten bytes."""
    return SlotPlan(COST, budget_bytes=budget, max_capacity=max_capacity, max_groups=max_groups)


class FakeArrays:
    """Carry out a plan's operations on lists of row names instead of arrays."""

    def __init__(self) -> None:
        self.groups: dict[int, tuple[int, list[str | None]]] = {}

    def carry_out(self, ops: list[PlanOp]) -> None:
        """Do the operations in order."""
        for op in ops:
            match op:
                case Resize(group, capacity, keep):
                    old = self.groups.get(group, (0, []))[1]
                    rows = [None if index is None else old[index] for index in keep]
                    self.groups[group] = (capacity, rows)
                case Move(source, source_index, target, target_index):
                    row = self.groups[source][1][source_index]
                    self.groups[target][1][target_index] = row
                case Drop(group):
                    del self.groups[group]


def test_a_row_costs_its_window_and_state_but_once() -> None:
    """A windowed layer costs at most its window, a state the same at every length."""
    cost = RowCost(10, windows=((100, 3),), fixed_bytes=7)
    assert cost.row_bytes(64) == 64 * 10 + 64 * 3 + 7
    assert cost.row_bytes(512) == 512 * 10 + 100 * 3 + 7


def test_capacities_are_powers_of_two_cut_at_the_longest_row() -> None:
    """A class is the next power of two, never beyond what a row may reach."""
    plan = make_plan(max_capacity=3000)
    assert [plan.capacity_for(n) for n in (1, 64, 65, 1025, 2049)] == [64, 64, 128, 2048, 3000]


def test_short_rows_never_share_a_group_with_a_much_longer_one() -> None:
    """A row takes a group of at most a few times its own need while groups are left."""
    plan = make_plan()
    plan.place("long", 4096)
    plan.place("short", 64)
    plan.place("middle", 256)
    capacity = {row: plan.groups[plan.place_of(row)[0]].capacity for row in ("long", "short")}
    assert capacity == {"long": 4096, "short": 64}
    assert plan.groups[plan.place_of("middle")[0]].capacity <= MAX_SLACK * 256


def test_one_group_grows_for_the_longest_row_when_groups_cannot_be_split() -> None:
    """With a single group its capacity follows the longest row, and every row stays."""
    plan = make_plan(max_groups=1)
    plan.place("a", 64)
    plan.place("b", 1000)
    assert len(plan.groups) == 1
    assert next(iter(plan.groups.values())).capacity == 1024
    plan.check_integrity()


def test_a_left_row_leaves_a_hole_that_the_next_row_takes() -> None:
    """Leaving and joining cost no operation on the arrays while there is a hole."""
    plan = make_plan()
    for row in "abc":
        plan.place(row, 64)
    held = plan.allocated_bytes
    assert plan.remove("b") == []
    assert held == plan.allocated_bytes
    assert plan.place("d", 64) == []
    assert plan.place_of("d") == (plan.place_of("a")[0], 1)


def test_the_last_row_of_a_group_frees_it() -> None:
    """An empty group holds no bytes."""
    plan = make_plan()
    plan.place("a", 64)
    assert [Drop(0)] == plan.remove("a")
    assert plan.allocated_bytes == 0


def test_growth_moves_a_row_to_a_larger_group_and_frees_its_old_one() -> None:
    """A lone row that outgrows its group ends in one group of the next class."""
    plan = make_plan()
    plan.place("a", 64)
    assert plan.grow("a", 64) == []
    ops = plan.grow("a", 65)
    assert [Resize(1, 128, (None,)), Move(0, 0, 1, 0), Drop(0)] == ops
    plan.check_integrity()


def test_the_first_row_always_fits_and_the_next_only_within_the_budget() -> None:
    """A lone row can never deadlock on its own budget; a second one is counted."""
    plan = make_plan(budget=64 * 10 * 2)
    assert plan.can_place(64)
    plan.place("a", 64)
    assert plan.can_place(64)
    assert not plan.can_place(64, reserved_bytes=1)
    plan.place("b", 64)
    assert not plan.can_place(64)
    assert not plan.can_grow("a", 65)
    plan.remove("b")
    assert plan.can_grow("a", 65)


def test_tidying_closes_holes_when_a_quarter_of_a_group_is_holes() -> None:
    """Dead rows compute in every forward, so a group shrinks once they are many."""
    plan = make_plan()
    for index in range(8):
        plan.place(str(index), 64)
    plan.remove("0")
    assert plan.tidy() == []
    plan.remove("5")
    assert [Resize(0, 64, (1, 2, 3, 4, 6, 7))] == plan.tidy()
    plan.check_integrity()


def test_a_budget_below_one_small_row_is_refused_with_the_sizes() -> None:
    """The message says what the budget is and what a row takes."""
    with pytest.raises(InsufficientMemoryError, match=r"100 bytes .* 64 tokens, which takes 640"):
        fitting_capacity(COST, 100, 4096)


def test_the_longest_row_is_what_the_budget_holds() -> None:
    """A budget of 1,000 tokens holds a row of 1,000 tokens and not one more."""
    assert fitting_capacity(COST, 10_009, 4096) == 1000
    assert fitting_capacity(COST, 1 << 40, 4096) == 4096


def test_row_buckets_waste_at_most_a_quarter() -> None:
    """Rounding up is monotonic, never down, and at most a quarter too many."""
    buckets = [row_bucket(n) for n in range(1, 300)]
    assert buckets == sorted(buckets)
    assert all(n <= bucket <= n * 1.25 for n, bucket in enumerate(buckets, start=1))


@pytest.mark.parametrize("max_groups", [1, 3])
def test_random_operations_keep_plan_and_arrays_in_step(max_groups: int) -> None:
    """After any joins, leaves, growth and tidying, every row is where the plan says it is."""
    rng = random.Random(max_groups)
    budget = 64 * 10 * 60
    plan = make_plan(budget=budget, max_capacity=1024, max_groups=max_groups)
    arrays = FakeArrays()
    lengths: dict[str, int] = {}
    for number in range(3000):
        action = rng.random()
        if action < 0.35:
            length = rng.choice([1, 60, 64, 65, 200, 1000])
            if plan.can_place(length):
                row = f"row{number}"
                arrays.carry_out(plan.place(row, length))
                group, index = plan.place_of(row)
                arrays.groups[group][1][index] = row
                lengths[row] = length
        elif action < 0.6 and lengths:
            row = rng.choice(sorted(lengths))
            arrays.carry_out(plan.remove(row))
            del lengths[row]
        elif action < 0.95 and lengths:
            row = rng.choice(sorted(lengths))
            longer = min(1024, lengths[row] + rng.choice([1, 64, 300]))
            if plan.can_grow(row, longer):
                arrays.carry_out(plan.grow(row, longer))
                lengths[row] = longer
        else:
            arrays.carry_out(plan.tidy(wholly=rng.random() < 0.5))
        plan.check_integrity()
        assert plan.allocated_bytes <= budget or len(plan) == 1
        for row, length in lengths.items():
            group, index = plan.place_of(row)
            capacity, rows = arrays.groups[group]
            assert (row, True) == (rows[index], capacity >= length)
        assert arrays.groups.keys() == plan.groups.keys()
