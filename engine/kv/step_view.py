"""What one batch forward shares between layers: row order, positions, write indices and masks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import mlx.core as mx


class GroupStep:
    """Describe one group's part of a forward; arrays are built once and shared by all layers.

    `positions[i]` is the position of the token that row i of the group reads, so after the write
    the row holds `positions[i] + 1` tokens; None for a dead row, which writes to position 0.
    """

    def __init__(self, group: int, start: int, positions: Sequence[int | None]) -> None:
        self.group = group
        #: Index of the group's first row in the batch.
        self.start = start
        self.num_rows = len(positions)
        self._positions = positions
        live = [position for position in positions if position is not None] or [0]
        #: Longest row after the write.
        self.max_length = max(live) + 1
        self._min_length = min(live) + 1
        self._writes: dict[int, mx.array] = {}
        self._masks: dict[tuple[int, int | None, bool], mx.array | None] = {}

    @property
    def stop(self) -> int:
        """Return the index after the group's last row in the batch."""
        return self.start + self.num_rows

    @cached_property
    def _position_array(self) -> mx.array:
        positions = [position or 0 for position in self._positions]
        return mx.array(positions, dtype=mx.int32).reshape(-1, 1, 1, 1)

    def write_index(self, size: int) -> mx.array:
        """Return where each row writes in a ring of `size` slots: `[num_rows, 1, 1, 1]` int32."""
        if size not in self._writes:
            wraps = self.max_length > size
            positions = self._position_array
            self._writes[size] = mx.remainder(positions, size) if wraps else positions
        return self._writes[size]

    def num_keys(self, size: int) -> int:
        """Return how many slots of a ring of `size` any row has filled after the write."""
        return min(self.max_length, size)

    def mask(self, size: int, window: int | None, *, always: bool = False) -> mx.array | None:
        """Return which of the first `num_keys(size)` slots each row attends to.

        Boolean `[num_rows, 1, 1, num_keys]`; None when every row attends to all of them, unless
        `always`. Slot j of a ring holds the latest position p with p % size == j.
        """
        window = None if window is None or window >= self.max_length else window
        key = (size, window, always)
        if key not in self._masks:
            self._masks[key] = self._build_mask(size, window, always)
        return self._masks[key]

    def _build_mask(self, size: int, window: int | None, always: bool) -> mx.array | None:
        is_full = self._min_length >= self.num_keys(size)
        if window is not None and window >= self.num_keys(size):
            window = None
        if is_full and window is None and not always:
            return None
        slots = mx.arange(self.num_keys(size), dtype=mx.int32)
        positions = self._position_array
        mask = slots <= positions
        if window is not None:
            age = mx.remainder(positions - slots, size)
            mask = mask & (age < window)
        return mask


@dataclass(frozen=True, slots=True)
class StepView:
    """Describe one batch forward: its groups in batch order, and `offset`, int32 `[num_rows]`."""

    groups: tuple[GroupStep, ...]
    offset: mx.array

    @property
    def num_rows(self) -> int:
        """Count the rows of the batch, dead ones included."""
        return self.groups[-1].stop if self.groups else 0


@dataclass(frozen=True, slots=True)
class GroupedMask:
    """Stand for the masks of several groups on the way through a model's code."""

    parts: tuple[mx.array | None, ...]


@dataclass(frozen=True, slots=True)
class GroupedKeys:
    """Stand for the keys (or values) of several groups on the way through a model's code.

    `parts[g]` is `[rows of g, kv_heads, keys of g, head_dim]`; rows are in batch order.
    """

    parts: tuple[mx.array, ...]
    #: Rows of the batch where each part starts, and the total.
    bounds: tuple[int, ...]
