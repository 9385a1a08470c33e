"""Where every row of the Slots layout stands, and what that costs in bytes; pure bookkeeping.

Rows live in groups of like capacity. A group is one array per layer, `[num_rows, ..., capacity,
...]`; a row is an index in it, and a row that left is a hole until another takes it. This module
decides; `slots.py` carries the returned operations out on the arrays, in order.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm_mlx.engine.errors import InsufficientMemoryError

#: Smallest capacity of a group, in tokens.
MIN_CAPACITY = 64
#: A row may stand in a group of up to this many times the capacity that it needs.
MAX_SLACK = 4


@dataclass(frozen=True, slots=True)
class RowCost:
    """Say what one row costs: bytes by token, by windowed token, and fixed."""

    bytes_per_token: int
    #: (window in tokens, bytes per token) of layers that keep only a window.
    windows: tuple[tuple[int, int], ...] = ()
    #: Recurrent state, whatever the length.
    fixed_bytes: int = 0

    def row_bytes(self, capacity: int) -> int:
        """Return the bytes of one row of this capacity."""
        windowed = sum(min(window, capacity) * size for window, size in self.windows)
        return capacity * self.bytes_per_token + windowed + self.fixed_bytes


@dataclass(frozen=True, slots=True)
class Resize:
    """Build the group's arrays anew: new row i is old row `keep[i]`, or empty for None."""

    group: int
    capacity: int
    keep: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class Move:
    """Copy one row from a group to a (larger) other."""

    source: int
    source_index: int
    target: int
    target_index: int


@dataclass(frozen=True, slots=True)
class Drop:
    """Free the group's arrays."""

    group: int


PlanOp = Resize | Move | Drop


@dataclass(slots=True)
class Group:
    """Hold one group's capacity and its rows by index; None is a hole."""

    capacity: int
    rows: list[str | None] = field(default_factory=list)

    @property
    def num_live(self) -> int:
        """Count the rows that are not holes."""
        return sum(row is not None for row in self.rows)


@dataclass(frozen=True, slots=True)
class Placement:
    """Say into which group (None: a new one) a row would go, and the shape it would then have."""

    group: int | None
    capacity: int
    num_rows: int
    extra_bytes: int


class SlotPlan:
    """Own the placement of rows in groups, within a byte budget.

    `max_groups` 1 serves models whose attention cannot be split by group: then the one group's
    capacity grows instead. `max_capacity` is the longest row that may exist.
    """

    def __init__(
        self, cost: RowCost, *, budget_bytes: int, max_capacity: int, max_groups: int
    ) -> None:
        self._cost = cost
        self._budget = budget_bytes
        self._max_groups = max_groups
        self.max_capacity = fitting_capacity(cost, budget_bytes, max_capacity)
        self.groups: dict[int, Group] = {}
        self._places: dict[str, tuple[int, int]] = {}
        self._next_group = 0

    @property
    def allocated_bytes(self) -> int:
        """Bytes of all groups, holes included."""
        return sum(
            len(group.rows) * self._cost.row_bytes(group.capacity) for group in self.groups.values()
        )

    def place_of(self, row_id: str) -> tuple[int, int]:
        """Return (group, index) of a row."""
        return self._places[row_id]

    def __contains__(self, row_id: object) -> bool:
        return row_id in self._places

    def __len__(self) -> int:
        return len(self._places)

    def has_room(self, row_id: str, num_tokens: int) -> bool:
        """Say whether the row can hold so many tokens where it stands."""
        return num_tokens <= self.groups[self._places[row_id][0]].capacity

    def capacity_for(self, num_tokens: int) -> int:
        """Return the capacity class of a row: the next power of two, cut at the longest row."""
        power = 1 << max(num_tokens - 1, MIN_CAPACITY - 1).bit_length()
        return min(power, max(self.max_capacity, MIN_CAPACITY))

    def row_bytes(self, num_tokens: int) -> int:
        """Return what a row of its own group would cost."""
        return self._cost.row_bytes(self.capacity_for(num_tokens))

    def can_add(self, num_bytes: int, *, reserved_bytes: int = 0) -> bool:
        """Say whether bytes beside the groups fit, such as a prefilling row's own caches.

        Holes in the groups do not help: those bytes are allocated.
        """
        return self.allocated_bytes + reserved_bytes + num_bytes <= self._budget

    def can_place(self, num_tokens: int, *, reserved_bytes: int = 0) -> bool:
        """Say whether a new row fits; the very first always does."""
        if not self._places and not reserved_bytes:
            return True
        choice = self._choose(num_tokens, reserved=reserved_bytes)
        return self.can_add(choice.extra_bytes, reserved_bytes=reserved_bytes)

    def can_grow(self, row_id: str, num_tokens: int, *, reserved_bytes: int = 0) -> bool:
        """Say whether the row fits where it is or elsewhere; the only row always does."""
        group_id, _ = self._places[row_id]
        group = self.groups[group_id]
        if num_tokens <= group.capacity or (len(self._places) == 1 and not reserved_bytes):
            return True
        freed = 0
        if group.num_live == 1:
            freed = len(group.rows) * self._cost.row_bytes(group.capacity)
        choice = self._choose(num_tokens, leaving=group_id, reserved=reserved_bytes)
        return self.can_add(choice.extra_bytes - freed, reserved_bytes=reserved_bytes)

    def place(self, row_id: str, num_tokens: int, *, reserved_bytes: int = 0) -> list[PlanOp]:
        """Give a new row its place; mutates the plan, returns what to do to the arrays.

        `reserved_bytes` are those that the question before was asked with.
        """
        ops: list[PlanOp] = []
        self._settle(row_id, self._choose(num_tokens, reserved=reserved_bytes), ops)
        return ops

    def grow(self, row_id: str, num_tokens: int, *, reserved_bytes: int = 0) -> list[PlanOp]:
        """Move the row to where `num_tokens` fit; nothing to do if they fit already."""
        group_id, index = self._places[row_id]
        group = self.groups[group_id]
        if num_tokens <= group.capacity:
            return []
        choice = self._choose(num_tokens, leaving=group_id, reserved=reserved_bytes)
        ops: list[PlanOp] = []
        if choice.group == group_id:
            self._resize(group_id, choice.capacity, list(range(len(group.rows))), ops)
            return ops
        self._settle(row_id, choice, ops)
        target, target_index = self._places[row_id]
        ops.append(Move(group_id, index, target, target_index))
        self._vacate(group_id, index, ops)
        return ops

    def remove(self, row_id: str) -> list[PlanOp]:
        """Leave a hole where the row was, or free the group that this empties."""
        group_id, index = self._places.pop(row_id)
        ops: list[PlanOp] = []
        self._vacate(group_id, index, ops)
        return ops

    def tidy(self, *, wholly: bool = False) -> list[PlanOp]:
        """Close holes where a quarter of a group is holes, or all holes if `wholly`."""
        ops: list[PlanOp] = []
        for group_id, group in self.groups.items():
            live = [index for index, row in enumerate(group.rows) if row is not None]
            size = len(live) if wholly else row_bucket(len(live))
            holes = len(group.rows) - size
            if holes > 0 and (wholly or holes * 4 >= len(group.rows)):
                keep: list[int | None] = [*live, *[None] * (size - len(live))]
                self._resize(group_id, group.capacity, keep, ops)
        return ops

    def check_integrity(self) -> None:
        """Raise AssertionError if the two directions of the bookkeeping disagree."""
        seen = {
            row: (group_id, index)
            for group_id, group in self.groups.items()
            for index, row in enumerate(group.rows)
            if row is not None
        }
        assert seen == self._places, "rows and places disagree"
        assert all(group.num_live for group in self.groups.values()), "an empty group is held"
        assert len(self.groups) <= self._max_groups, "too many groups"

    def _choose(
        self, num_tokens: int, *, leaving: int | None = None, reserved: int = 0
    ) -> Placement:
        """Find the cheapest right place: a group of like capacity, a new one, or the largest."""
        capacity = self.capacity_for(num_tokens)
        by_capacity = sorted(self.groups.items(), key=lambda item: item[1].capacity)
        holding = [(g, group) for g, group in by_capacity if group.capacity >= num_tokens]
        if holding and holding[0][1].capacity <= MAX_SLACK * capacity:
            return self._in_group(*holding[0], reserved)
        num_groups = len(self.groups)
        if leaving is not None and self.groups[leaving].num_live == 1:
            num_groups -= 1
        if num_groups < self._max_groups:
            return Placement(None, capacity, 1, self._cost.row_bytes(capacity))
        if holding:
            return self._in_group(*holding[0], reserved)
        group_id, group = by_capacity[-1]
        num_rows = len(group.rows)
        if leaving != group_id and None not in group.rows:
            num_rows += 1
        grown = num_rows * self._cost.row_bytes(capacity)
        held = len(group.rows) * self._cost.row_bytes(group.capacity)
        return Placement(group_id, capacity, num_rows, grown - held)

    def _in_group(self, group_id: int, group: Group, reserved: int) -> Placement:
        if None in group.rows:
            return Placement(group_id, group.capacity, len(group.rows), 0)
        row_bytes = self._cost.row_bytes(group.capacity)
        free = self._budget - self.allocated_bytes - reserved
        spare = free // row_bytes if row_bytes else 1 << 30
        added = row_bucket(len(group.rows) + 1) - len(group.rows)
        added = max(1, min(added, spare))
        return Placement(group_id, group.capacity, len(group.rows) + added, added * row_bytes)

    def _settle(self, row_id: str, choice: Placement, ops: list[PlanOp]) -> None:
        group_id = choice.group
        if group_id is None:
            group_id = self._next_group
            self._next_group += 1
            self.groups[group_id] = Group(choice.capacity)
        group = self.groups[group_id]
        if choice.num_rows != len(group.rows) or choice.capacity != group.capacity:
            keep: list[int | None] = list(range(len(group.rows)))
            keep += [None] * (choice.num_rows - len(group.rows))
            self._resize(group_id, choice.capacity, keep, ops)
        index = group.rows.index(None)
        group.rows[index] = row_id
        self._places[row_id] = (group_id, index)

    def _resize(
        self, group_id: int, capacity: int, keep: list[int] | list[int | None], ops: list[PlanOp]
    ) -> None:
        group = self.groups[group_id]
        group.rows = [None if index is None else group.rows[index] for index in keep]
        group.capacity = capacity
        for index, row in enumerate(group.rows):
            if row is not None:
                self._places[row] = (group_id, index)
        ops.append(Resize(group_id, capacity, tuple(keep)))

    def _vacate(self, group_id: int, index: int, ops: list[PlanOp]) -> None:
        group = self.groups[group_id]
        group.rows[index] = None
        if group.num_live == 0:
            del self.groups[group_id]
            ops.append(Drop(group_id))


def row_bucket(num_rows: int) -> int:
    """Round a row count up so that joins copy the group seldom: at most a quarter is spare."""
    if num_rows <= 8:
        return num_rows
    step = 1 << (num_rows - 1).bit_length() - 3
    return -(-num_rows // step) * step


def fitting_capacity(cost: RowCost, budget_bytes: int, max_capacity: int) -> int:
    """Return the longest row within the budget, in tokens.

    Raises InsufficientMemoryError if not even the smallest row fits.
    """
    if cost.row_bytes(max_capacity) <= budget_bytes:
        return max_capacity
    low, high = 0, max_capacity
    while high - low > 1:
        middle = (low + high) // 2
        if cost.row_bytes(middle) <= budget_bytes:
            low = middle
        else:
            high = middle
    if low < MIN_CAPACITY:
        raise InsufficientMemoryError(
            f"the KV budget of {budget_bytes:,} bytes does not hold one row of {MIN_CAPACITY} "
            f"tokens, which takes {cost.row_bytes(MIN_CAPACITY):,}; raise --kv-memory-mb or use a "
            "smaller model"
        )
    return low
