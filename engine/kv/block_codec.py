"""Cut mlx-lm's stock caches into blocks of KV, and put blocks together into stock caches again.

A block is stacked: one buffer for all layers of the same shape, `[layers, heads, tokens, dim]`,
because Metal limits how many buffers a process may hold, and separate arrays per layer would
reach that at a few hundred thousand tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, RotatingKVCache

from vllm_mlx.engine.kv.stock_caches import flatten_caches


@dataclass(frozen=True, slots=True)
class Block:
    """Hold what one block needs to be put back; arrays are evaluated copies, never views."""

    #: The block's token ids, as `pack_tokens` packs them.
    tokens: bytes
    #: Keys, values of each group of full-attention layers: `[layers, heads, block, dim]`.
    kv: tuple[mx.array, ...]
    #: The same for each group of windowed layers; None where it was not there any more.
    window: tuple[mx.array, ...] | None = None
    #: State of the recurrent layers right after the block; None where it was not captured.
    state: tuple[mx.array | None, ...] | None = None

    @property
    def kinds(self) -> frozenset[str]:
        """Return which parts it has, as stored blocks name them."""
        parts = {"kv": self.kv, "window": self.window, "state": self.state}
        return frozenset(kind for kind, part in parts.items() if part)

    def arrays(self) -> list[mx.array]:
        """Return every array held."""
        state = [array for array in self.state or () if array is not None]
        return [*self.kv, *(self.window or ()), *state]

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all arrays."""
        return sum(array.nbytes for array in self.arrays())


@dataclass(frozen=True, slots=True)
class _Group:
    """Name the layers whose keys and values are stacked together, by index among the leaves."""

    leaves: tuple[int, ...]
    window: int | None


class BlockCodec:
    """Know how one model's caches are cut; holds no arrays of any row.

    `seen_caches` are the model's stock caches after one token, whose shapes it learns.
    """

    def __init__(self, seen_caches: Sequence[Any], block_size: int) -> None:
        self.block_size = block_size
        leaves = flatten_caches(seen_caches)
        shapes: dict[tuple[Any, ...], list[int]] = {}
        for index, leaf in enumerate(leaves):
            if not isinstance(leaf, ArraysCache):
                window = leaf.max_size if isinstance(leaf, RotatingKVCache) else None
                signature = (
                    window,
                    leaf.keys.shape[1],
                    leaf.keys.shape[3],
                    leaf.values.shape[3],
                    leaf.keys.dtype,
                )
                shapes.setdefault(signature, []).append(index)
        groups = [_Group(tuple(found), signature[0]) for signature, found in shapes.items()]
        self._full = [group for group in groups if group.window is None]
        self._windowed = [group for group in groups if group.window is not None]
        self._state = [i for i, leaf in enumerate(leaves) if isinstance(leaf, ArraysCache)]
        #: Parts that a block of this model can have.
        self.kinds = frozenset(
            kind
            for kind, part in (
                ("kv", self._full),
                ("window", self._windowed),
                ("state", self._state),
            )
            if part
        )
        #: Bytes of a block's keys and values.
        self.block_bytes = block_size * sum(
            leaf.nbytes // leaf.keys.shape[2]
            for leaf in leaves
            if not isinstance(leaf, ArraysCache)
        )
        #: Longest window, None without one.
        self.window = max((group.window or 0 for group in self._windowed), default=None)

    @property
    def has_state(self) -> bool:
        """Say whether some layers can only be resumed where their state was captured."""
        return bool(self._state)

    def cut_kv(self, caches: Sequence[Any], start: int) -> tuple[mx.array, ...]:
        """Stack the block of full-attention KV that begins at token `start`; lazy."""
        leaves = flatten_caches(caches)
        return tuple(
            array for group in self._full for array in _stack(leaves, group, start, self.block_size)
        )

    def cut_window(self, caches: Sequence[Any], start: int) -> tuple[mx.array, ...] | None:
        """Stack the block of windowed KV that begins at token `start`; lazy.

        Returns None if a layer no longer holds all of it.
        """
        leaves = flatten_caches(caches)
        stacked: list[mx.array] = []
        for group in self._windowed:
            leaf = leaves[group.leaves[0]]
            held = _temporal(leaf.keys, leaf).shape[2]
            first = leaf.offset - held
            if start < first or start + self.block_size > leaf.offset:
                return None
            stacked += _stack(leaves, group, start - first, self.block_size)
        return tuple(stacked)

    def cut_state(self, caches: Sequence[Any]) -> tuple[mx.array | None, ...]:
        """Return the recurrent state as it is now; a later forward binds new arrays, not these."""
        leaves = flatten_caches(caches)
        return tuple(array for index in self._state for array in leaves[index].cache)

    def restore(self, blocks: Sequence[Block], caches: Sequence[Any]) -> None:
        """Put `blocks`, a prefix from its first token, into empty stock caches; lazy.

        The last blocks must hold the window, and the very last one the state, if the model has
        such layers.
        """
        leaves = flatten_caches(caches)
        length = len(blocks) * self.block_size
        for number, group in enumerate(self._full):
            parts = [block.kv[2 * number : 2 * number + 2] for block in blocks]
            _fill(leaves, group, parts, length, length)
        for number, group in enumerate(self._windowed):
            kept = min(length, group.window or 0)
            needed = blocks[-num_blocks(kept, self.block_size) :]
            parts = [(b.window or ())[2 * number : 2 * number + 2] for b in needed]
            _fill(leaves, group, parts, length, kept)
        if self._state:
            state = blocks[-1].state
            assert state is not None, "a restore ends at a block with state"
            arrays = iter(state)
            for index in self._state:
                leaves[index].cache = [next(arrays) for _ in leaves[index].cache]


def num_blocks(num_tokens: int, block_size: int) -> int:
    """Return how many blocks hold `num_tokens`, the last perhaps in part."""
    return (num_tokens + block_size - 1) // block_size


def _temporal(array: mx.array, leaf: Any) -> mx.array:
    if isinstance(leaf, RotatingKVCache):
        ordered: mx.array = leaf._temporal_order(array)
        return ordered
    return array


def _stack(leaves: Sequence[Any], group: _Group, start: int, count: int) -> list[mx.array]:
    """Stack keys and values of a group's layers; `start` counts from what the layers hold."""
    stop = start + count
    return [
        mx.stack(
            [_temporal(getattr(leaves[i], name), leaves[i])[0, :, start:stop] for i in group.leaves]
        )
        for name in ("keys", "values")
    ]


def _fill(
    leaves: Sequence[Any],
    group: _Group,
    parts: Sequence[Sequence[mx.array]],
    length: int,
    kept: int,
) -> None:
    """Give each layer of a group its last `kept` of `length` tokens."""
    keys = mx.concatenate([part[0] for part in parts], axis=2)[:, :, -kept:]
    values = mx.concatenate([part[1] for part in parts], axis=2)[:, :, -kept:]
    for row, index in enumerate(group.leaves):
        leaf = leaves[index]
        leaf.keys, leaf.values = keys[row : row + 1], values[row : row + 1]
        leaf.offset = length
        if isinstance(leaf, RotatingKVCache):
            leaf._idx = kept
