"""The Slots layout: rows in groups of like capacity, in stock MLX arrays, on every platform."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from vllm_mlx.engine.kv.layout import BatchRow, BatchView, Evictable
from vllm_mlx.engine.kv.slot_layers import make_layer_slots, sum_costs
from vllm_mlx.engine.kv.slot_plan import Drop, Move, PlanOp, Resize, SlotPlan
from vllm_mlx.engine.kv.step_view import GroupStep, StepView

#: Groups cost graph nodes; beyond this many, rows share the next larger one.
MAX_GROUPS = 3


class SlotLayout:
    """Own the state of all rows: private caches while they prefill, slots while they decode.

    Implements `KVLayout`. Used by the engine thread only; mutating calls in the drained window.
    """

    def __init__(
        self,
        make_caches: Callable[[], list[Any]],
        layers: list[Any],
        *,
        budget_bytes: int,
        max_capacity: int,
        max_groups: int = MAX_GROUPS,
    ) -> None:
        self._make_caches = make_caches
        self._layers = layers
        self.row_cost = sum_costs([layer.cost for layer in layers])
        self._plan = SlotPlan(
            self.row_cost,
            budget_bytes=budget_bytes,
            max_capacity=max_capacity,
            max_groups=max_groups,
        )
        self._shared: Evictable | None = None
        self._private: dict[str, list[Any]] = {}
        self._reserved: dict[str, int] = {}

    @property
    def max_capacity(self) -> int:
        """Return the longest row that can exist, in tokens."""
        return self._plan.max_capacity

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the batch's slots, holes included, and of what prefilling rows reserve."""
        return self._plan.allocated_bytes + self._reserved_bytes

    @property
    def layer_caches(self) -> list[Any]:
        """Return the objects to pass to the model as `cache` for the batch forward."""
        return self._layers

    @property
    def num_groups(self) -> int:
        """Count the groups of the batch."""
        return len(self._plan.groups)

    @property
    def _reserved_bytes(self) -> int:
        return sum(self._reserved.values())

    @property
    def _shared_bytes(self) -> int:
        return self._shared.num_bytes if self._shared is not None else 0

    def share_budget(self, evictable: Evictable) -> None:
        """Count what `evictable` holds in the budget, and take it back when rows need it."""
        self._shared = evictable

    def can_start(self, num_tokens: int) -> bool:
        """Say whether a new row's own caches fit, making room if that is what it takes.

        A row that would be the only one always may: nothing that it waits for could end.
        """
        cost = self._plan.row_bytes(num_tokens)
        reserved = self._reserved_bytes
        return self._fits(
            lambda shared: self._plan.can_add(cost, reserved_bytes=reserved + shared),
            is_alone=not self._plan and not reserved,
        )

    def start(self, row_id: str, num_tokens: int) -> None:
        """Reserve bytes for a new row and give it private prefill caches."""
        self._private[row_id] = self._make_caches()
        self._reserved[row_id] = self._plan.row_bytes(num_tokens)

    def new_caches(self) -> list[Any]:
        """Return new stock caches, one per layer, that belong to no row."""
        return self._make_caches()

    def private_caches(self, row_id: str) -> list[Any]:
        """Return the row's own stock caches, one per layer."""
        return self._private[row_id]

    def can_join(self, row_id: str, num_tokens: int) -> bool:
        """Say whether the prefilled row fits into the batch."""
        others = self._reserved_bytes - self._reserved[row_id]
        return self._fits(
            lambda shared: self._plan.can_place(num_tokens, reserved_bytes=others + shared),
            is_alone=not self._plan and not others,
        )

    def join(self, row_id: str, num_tokens: int) -> None:
        """Adopt the prefilled row, layer by layer, freeing its private caches as it goes."""
        caches = self._private.pop(row_id)
        del self._reserved[row_id]
        beside = self._reserved_bytes + self._shared_bytes
        self._carry_out(self._plan.place(row_id, num_tokens, reserved_bytes=beside))
        group, index = self._plan.place_of(row_id)
        for number, layer in enumerate(self._layers):
            layer.adopt(group, index, caches[number], num_tokens - 1)
            mx.eval(layer.arrays())
            caches[number] = None

    def can_grow(self, row_id: str, num_tokens: int) -> bool:
        """Say whether the row can hold `num_tokens`, moving it if it must."""
        if self._plan.has_room(row_id, num_tokens):
            return True
        reserved = self._reserved_bytes
        return self._fits(
            lambda shared: self._plan.can_grow(
                row_id, num_tokens, reserved_bytes=reserved + shared
            ),
            is_alone=len(self._plan) == 1 and not reserved,
        )

    def grow(self, row_id: str, num_tokens: int) -> None:
        """Make sure that the row has room for `num_tokens`."""
        if self._plan.has_room(row_id, num_tokens):
            return
        beside = self._reserved_bytes + self._shared_bytes
        self._carry_out(self._plan.grow(row_id, num_tokens, reserved_bytes=beside))

    def extract(self, row_id: str, num_tokens: int) -> list[Any]:
        """Return stock caches that view a row of the batch; valid in the drained window only."""
        group, index = self._plan.place_of(row_id)
        return [layer.extract(group, index, num_tokens) for layer in self._layers]

    def remove(self, row_id: str) -> None:
        """Free the row, wherever in its life it is."""
        self._private.pop(row_id, None)
        self._reserved.pop(row_id, None)
        if row_id in self._plan:
            self._carry_out(self._plan.remove(row_id))

    def tidy(self) -> None:
        """Close holes where they are a quarter of a group."""
        self._carry_out(self._plan.tidy())

    def roll_back(self, row_id: str, num_tokens: int) -> None:
        """Keep only the row's first `num_tokens` tokens.

        KV of later positions is masked by the row's position and overwritten, so that nothing is
        to be done for full attention; recurrent state and rings cannot be rolled back.
        """
        if any(layer.cost.fixed_bytes or layer.cost.windows for layer in self._layers):
            raise NotImplementedError(
                f"row {row_id} cannot be rolled back to {num_tokens} tokens: "
                "this model has layers that cannot be sliced by position"
            )

    def begin_step(self, positions: Sequence[tuple[str, int]]) -> BatchView:
        """Fix the batch of the next forward from (row id, position of its input token)."""
        position_of = dict(positions)
        assert len(position_of) == len(self._plan), "a row of the batch would not step"
        steps: list[GroupStep] = []
        rows: list[BatchRow] = []
        offsets: list[int] = []
        for group_id, group in sorted(self._plan.groups.items()):
            start = len(offsets)
            # A hole has no position.
            found = [None if row_id is None else position_of.get(row_id) for row_id in group.rows]
            rows += [
                BatchRow(row_id, start + index, position)
                for index, (row_id, position) in enumerate(zip(group.rows, found, strict=True))
                if row_id is not None and position is not None
            ]
            offsets += [position or 0 for position in found]
            steps.append(GroupStep(group_id, start, found))
        view = StepView(tuple(steps), mx.array(offsets, dtype=mx.int32))
        for layer in self._layers:
            layer.bind(view)
        return BatchView(tuple(rows), len(offsets))

    def check_integrity(self) -> None:
        """Raise AssertionError if the bookkeeping contradicts itself."""
        self._plan.check_integrity()
        assert self._private.keys() == self._reserved.keys(), "private rows and reservations differ"
        assert not any(row in self._plan for row in self._private), "a row is in two places"

    def _fits(self, test: Callable[[int], bool], *, is_alone: bool) -> bool:
        """Try as it is, then with holes closed, then with ever less of what is evictable.

        The last resort is what is held for rows that wait: they can find it again or compute it.
        """
        if test(self._shared_bytes):
            return True
        self._carry_out(self._plan.tidy(wholly=True))
        while not test(self._shared_bytes):
            shared = self._shared
            if shared is None or not (
                shared.evict_to(shared.num_bytes * 7 // 8) or shared.release_held()
            ):
                return is_alone
        return True

    def _carry_out(self, ops: Sequence[PlanOp]) -> None:
        """Do the plan's operations, one layer at a time so that the transient is one layer."""
        for op in ops:
            for layer in self._layers:
                match op:
                    case Resize(group, capacity, keep):
                        layer.resize(group, capacity, keep)
                    case Move(source, source_index, target, target_index):
                        layer.move(source, source_index, target, target_index)
                    case Drop(group):
                        layer.drop(group)
                mx.eval(layer.arrays())


def make_slot_layout(
    make_caches: Callable[[], list[Any]],
    seen_caches: Sequence[Any],
    model_type: str,
    *,
    budget_bytes: int,
    max_capacity: int,
    max_groups: int = MAX_GROUPS,
) -> SlotLayout:
    """Make the layout of a model from its stock caches after one token (`seen_caches`).

    Raises UnsupportedModelError for cache kinds that cannot be laid out by row, and
    InsufficientMemoryError if the budget does not hold one small row.
    """
    layers = [make_layer_slots(cache, model_type) for cache in seen_caches]
    return SlotLayout(
        make_caches,
        layers,
        budget_bytes=budget_bytes,
        max_capacity=max_capacity,
        max_groups=max_groups,
    )
