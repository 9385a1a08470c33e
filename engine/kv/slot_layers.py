"""The per-layer state of the Slots layout, one class for each kind of cache in mlx-lm's models.

Each object is what a model receives as its layer's `cache` in a batch forward, and carries out
the plan's operations on its own arrays. All arrays hold rows from position 0 (no left padding).
Mutating methods other than `update_and_fetch` run in the drained window only, and never keep a
view of a row: a held slice would make MLX copy the whole array at the next write.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, RotatingKVCache

from vllm_mlx.engine.errors import UnsupportedModelError
from vllm_mlx.engine.kv.slot_plan import RowCost
from vllm_mlx.engine.kv.step_view import GroupedKeys, GroupedMask, StepView


class LayerSlots(Protocol):
    """Hold one layer's state for all rows."""

    #: Bytes by token, windows as (tokens, bytes per token), and fixed bytes of one row.
    cost: RowCost

    def resize(self, group: int, capacity: int, keep: Sequence[int | None]) -> None:
        """Build the group's arrays anew, keeping rows by old index."""
        ...

    def adopt(self, group: int, index: int, cache: Any, length: int) -> None:
        """Copy a prefilled stock cache of `length` tokens into a row, overwriting all of it."""
        ...

    def move(self, source: int, source_index: int, target: int, target_index: int) -> None:
        """Copy a row into a group of larger capacity."""
        ...

    def extract(self, group: int, index: int, length: int) -> Any:
        """Return a stock cache that views a row of `length` tokens."""
        ...

    def drop(self, group: int) -> None:
        """Free the group's arrays."""
        ...

    def bind(self, view: StepView) -> None:
        """Take the view of the next forward."""
        ...

    def arrays(self) -> list[mx.array]:
        """Return the arrays held, for evaluation."""
        ...


class KVSlots:
    """Hold keys and values of a full-attention layer, or of a window as a ring of slots.

    Arrays are `[rows, kv_heads, min(capacity, window), head_dim]`; with a window, position p is
    kept in slot p % window.
    """

    def __init__(self, keys: mx.array, values: mx.array, *, window: int | None = None) -> None:
        self._key_shape = (keys.shape[1], keys.shape[3])
        self._value_shape = (values.shape[1], values.shape[3])
        self._dtypes = (keys.dtype, values.dtype)
        self._window = window
        self._groups: dict[int, tuple[mx.array, mx.array]] = {}
        self._view = StepView((), mx.array([], dtype=mx.int32))
        token_bytes = sum(
            heads * dim * dtype.size
            for (heads, dim), dtype in zip(
                (self._key_shape, self._value_shape), self._dtypes, strict=True
            )
        )
        if window is None:
            self.cost = RowCost(token_bytes)
        else:
            self.cost = RowCost(0, windows=((window, token_bytes),))

    @property
    def offset(self) -> mx.array:
        """Return each row's position, int32 `[rows]`, as RoPE takes it."""
        return self._view.offset

    def size(self) -> int:
        """Return the longest row's length, as some models ask for it."""
        return max((group.max_length for group in self._view.groups), default=0)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Write one token a row, `[rows, kv_heads, 1, head_dim]`, and return what to attend to."""
        groups = self._view.groups
        for step in groups:
            held_keys, held_values = self._groups[step.group]
            size = held_keys.shape[2]
            index = step.write_index(size)
            new_keys, new_values = keys, values
            if len(groups) > 1:
                new_keys, new_values = keys[step.start : step.stop], values[step.start : step.stop]
            held_keys = mx.put_along_axis(held_keys, index, new_keys, axis=2)
            held_values = mx.put_along_axis(held_values, index, new_values, axis=2)
            self._groups[step.group] = (held_keys, held_values)
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[Any, Any]:
        """Return what this forward attends to, also for layers that share another layer's KV.

        The views are made anew at each call and never kept: see the module's docstring.
        """
        groups = self._view.groups
        parts: list[tuple[mx.array, mx.array]] = []
        for step in groups:
            held_keys, held_values = self._groups[step.group]
            num_keys = step.num_keys(held_keys.shape[2])
            parts.append((held_keys[:, :, :num_keys], held_values[:, :, :num_keys]))
        if len(parts) == 1:
            return parts[0]
        bounds = (*(step.start for step in groups), groups[-1].stop)
        return (
            GroupedKeys(tuple(part[0] for part in parts), bounds),
            GroupedKeys(tuple(part[1] for part in parts), bounds),
        )

    def make_mask(
        self, num_tokens: int, window_size: int | None = None, return_array: bool = False
    ) -> Any:
        """Return the mask of this forward: boolean, grouped, or None where nothing is hidden."""
        if num_tokens != 1:
            raise RuntimeError(f"a batch forward reads one token a row, not {num_tokens}")
        masks = tuple(
            step.mask(self._size_of(step.group), window_size, always=return_array)
            for step in self._view.groups
        )
        if len(masks) == 1:
            return masks[0]
        return None if all(mask is None for mask in masks) else GroupedMask(masks)

    def resize(self, group: int, capacity: int, keep: Sequence[int | None]) -> None:
        """Build the group's arrays anew, keeping rows by old index."""
        size = capacity if self._window is None else min(self._window, capacity)
        old = self._groups.pop(group, None)
        shapes = (self._key_shape, self._value_shape)
        built = []
        for which, ((heads, dim), dtype) in enumerate(zip(shapes, self._dtypes, strict=True)):
            kept = [index for index in keep if index is not None]
            if old is None or not kept:
                built.append(mx.zeros((len(keep), heads, size, dim), dtype))
                continue
            rows = old[which]
            if kept != list(range(rows.shape[0])):
                rows = rows[mx.array(kept)]
            pad = [(0, len(keep) - len(kept)), (0, 0), (0, size - rows.shape[2]), (0, 0)]
            built.append(mx.pad(rows, pad))
        self._groups[group] = (built[0], built[1])

    def adopt(self, group: int, index: int, cache: Any, length: int) -> None:
        """Copy a prefilled stock cache into a row; the rest of the row becomes zeros."""
        row_keys, row_values = self._temporal(cache, length)
        held_keys, held_values = self._groups[group]
        size = held_keys.shape[2]
        kept = 0 if row_keys is None else row_keys.shape[2]
        pad = [(0, 0), (0, 0), (0, size - kept), (0, 0)]
        for held, row in ((held_keys, row_keys), (held_values, row_values)):
            if row is None:
                held[index : index + 1] = mx.zeros_like(held[index : index + 1])
            else:
                rolled = mx.roll(row, length % size, 2) if length > size else row
                held[index : index + 1] = mx.pad(rolled, pad)

    def move(self, source: int, source_index: int, target: int, target_index: int) -> None:
        """Copy a row into a group of larger capacity: out, evaluated, then in."""
        for held, target_held in zip(self._groups[source], self._groups[target], strict=True):
            row = mx.contiguous(held[source_index : source_index + 1])
            pad = [(0, 0), (0, 0), (0, target_held.shape[2] - row.shape[2]), (0, 0)]
            row = mx.pad(row, pad)
            mx.eval(row)
            target_held[target_index : target_index + 1] = row

    def extract(self, group: int, index: int, length: int) -> Any:
        """Return a stock cache that views a row; let go of it before the next write."""
        held_keys, held_values = self._groups[group]
        size = held_keys.shape[2]
        cache = KVCache() if self._window is None else RotatingKVCache(max_size=self._window)
        views = []
        for held in (held_keys, held_values):
            row = held[index : index + 1, :, : min(length, size)]
            views.append(mx.roll(row, -(length % size), 2) if length > size else row)
        cache.keys, cache.values = views
        cache.offset = length
        if self._window is not None:
            cache._idx = min(length, size)
        return cache

    def drop(self, group: int) -> None:
        """Free the group's arrays."""
        self._groups.pop(group, None)

    def bind(self, view: StepView) -> None:
        """Take the view of the next forward."""
        self._view = view

    def arrays(self) -> list[mx.array]:
        """Return the arrays held, for evaluation."""
        return [array for pair in self._groups.values() for array in pair]

    def _size_of(self, group: int) -> int:
        return int(self._groups[group][0].shape[2])

    def _temporal(self, cache: Any, length: int) -> tuple[mx.array | None, mx.array | None]:
        """Return the last `min(length, window)` keys and values in order of position."""
        if cache.keys is None or length == 0:
            return None, None
        if self._window is None:
            return cache.keys[:, :, :length], cache.values[:, :, :length]
        kept = min(length, self._window)
        keys, values = cache._temporal_order(cache.keys), cache._temporal_order(cache.values)
        return keys[:, :, -kept:], values[:, :, -kept:]


class StateSlots(ArraysCache):
    """Hold the recurrent state of a layer: arrays of `[rows, ...]`, rewritten whole each forward.

    Between forwards `parts` holds one list of arrays per group; for a forward they are joined in
    batch order. With one group the two are the same arrays.
    """

    def __init__(self, template: ArraysCache) -> None:
        super().__init__(len(template.cache))
        self._shapes = [None if a is None else (a.shape[1:], a.dtype) for a in template.cache]
        self._parts: dict[int, list[mx.array | None]] = {}
        self._view: StepView | None = None
        self.cost = RowCost(0, fixed_bytes=template.nbytes)

    def resize(self, group: int, capacity: int, keep: Sequence[int | None]) -> None:
        """Build the group's arrays anew, keeping rows by old index; new rows are zeros."""
        del capacity  # a state has no length
        self._split()
        old = self._parts.get(group)
        kept = [index for index in keep if index is not None]
        built: list[mx.array | None] = []
        for slot, known in enumerate(self._shapes):
            if known is None:
                built.append(None)
                continue
            shape, dtype = known
            fresh = mx.zeros((len(keep) - len(kept), *shape), dtype)
            held = None if old is None else old[slot]
            if held is None or not kept:
                built.append(mx.zeros((len(keep), *shape), dtype))
            else:
                built.append(mx.concatenate([held[mx.array(kept)], fresh], axis=0))
        self._parts[group] = built

    def adopt(self, group: int, index: int, cache: Any, length: int) -> None:
        """Copy a stock cache's state into a row; a state never computed is zeros."""
        del length  # a state has none
        self._split()
        for held, row in zip(self._parts[group], cache.cache, strict=True):
            if held is not None:
                held[index : index + 1] = mx.zeros_like(held[:1]) if row is None else row

    def move(self, source: int, source_index: int, target: int, target_index: int) -> None:
        """Copy a row's state into another group."""
        self._split()
        for held, other in zip(self._parts[source], self._parts[target], strict=True):
            if held is not None and other is not None:
                row = mx.contiguous(held[source_index : source_index + 1])
                mx.eval(row)
                other[target_index : target_index + 1] = row

    def extract(self, group: int, index: int, length: int) -> Any:
        """Return a stock cache with copies of a row's state."""
        del length  # a state has none
        self._split()
        row = mx.array([index])
        cache = ArraysCache(len(self._shapes))
        # Taken, not sliced: a slice would keep the whole batch's state in memory.
        cache.cache = [None if a is None else mx.take(a, row, axis=0) for a in self._parts[group]]
        return cache

    def drop(self, group: int) -> None:
        """Free the group's arrays."""
        self._split()
        self._parts.pop(group, None)

    def bind(self, view: StepView) -> None:
        """Join the groups' states in batch order for the next forward."""
        self._split()
        self._view = view
        lists = [self._parts[step.group] for step in view.groups]
        if len(lists) == 1:
            self.cache = list(lists[0])
        else:
            self.cache = [
                None if column[0] is None else mx.concatenate(list(column), axis=0)
                for column in zip(*lists, strict=True)
            ]
        self._parts = {}

    def arrays(self) -> list[mx.array]:
        """Return the arrays held, for evaluation."""
        held = [self.cache, *self._parts.values()]
        return [array for arrays in held for array in arrays if array is not None]

    def _split(self) -> None:
        """Hand the last forward's states back to their groups."""
        view, self._view = self._view, None
        if view is None:
            return
        for step in view.groups:
            if len(view.groups) == 1:
                self._parts[step.group] = list(self.cache)
            else:
                self._parts[step.group] = [
                    None if array is None else mx.contiguous(array[step.start : step.stop])
                    for array in self.cache
                ]
        self.cache = [None] * len(self.cache)


class ListSlots(CacheList):
    """Hold a layer that keeps several caches; hands every operation on to each."""

    def __init__(self, members: Sequence[Any]) -> None:
        super().__init__(*members)
        costs = [member.cost for member in members]
        self.cost = sum_costs(costs)

    def resize(self, group: int, capacity: int, keep: Sequence[int | None]) -> None:
        """Resize every member."""
        for member in self.caches:
            member.resize(group, capacity, keep)

    def adopt(self, group: int, index: int, cache: Any, length: int) -> None:
        """Adopt every member."""
        for member, stock in zip(self.caches, cache.caches, strict=True):
            member.adopt(group, index, stock, length)

    def move(self, source: int, source_index: int, target: int, target_index: int) -> None:
        """Move the row in every member."""
        for member in self.caches:
            member.move(source, source_index, target, target_index)

    def extract(self, group: int, index: int, length: int) -> Any:
        """Return a stock cache of what every member extracts."""
        return CacheList(*(member.extract(group, index, length) for member in self.caches))

    def drop(self, group: int) -> None:
        """Drop the group in every member."""
        for member in self.caches:
            member.drop(group)

    def bind(self, view: StepView) -> None:
        """Bind every member."""
        for member in self.caches:
            member.bind(view)

    def arrays(self) -> list[mx.array]:
        """Return the arrays of every member."""
        return [array for member in self.caches for array in member.arrays()]


def make_layer_slots(cache: Any, model_type: str) -> Any:
    """Make the slots for a layer from its stock cache after one token.

    Raises UnsupportedModelError for a kind of cache that cannot be laid out by row.
    """
    if type(cache) is KVCache:
        return KVSlots(*_seen(cache, model_type))
    if type(cache) is RotatingKVCache and cache.keep == 0:
        return KVSlots(*_seen(cache, model_type), window=cache.max_size)
    if type(cache) is ArraysCache:
        return StateSlots(cache)
    if type(cache) is CacheList:
        return ListSlots([make_layer_slots(member, model_type) for member in cache.caches])
    raise UnsupportedModelError(
        f"model type {model_type!r} keeps its state in a {type(cache).__name__}, which cannot be "
        "batched by row; run it with mlx-lm itself"
    )


def sum_costs(costs: Sequence[RowCost]) -> RowCost:
    """Add up what one row costs over several layers; like windows are merged."""
    windows: dict[int, int] = {}
    for cost in costs:
        for window, size in cost.windows:
            windows[window] = windows.get(window, 0) + size
    return RowCost(
        sum(cost.bytes_per_token for cost in costs),
        tuple(sorted(windows.items())),
        sum(cost.fixed_bytes for cost in costs),
    )


def _seen(cache: Any, model_type: str) -> tuple[mx.array, mx.array]:
    if cache.keys is None:
        raise UnsupportedModelError(
            f"model type {model_type!r} has a KV cache that a forward does not fill; "
            "run it with mlx-lm itself"
        )
    return cache.keys, cache.values
