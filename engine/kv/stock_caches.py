"""Look into the caches that mlx-lm makes for one row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.cache import ArraysCache, CacheList, RotatingKVCache


def flatten_caches(caches: Sequence[Any]) -> list[Any]:
    """Return the caches with those of composite layers in place of the composite."""
    leaves: list[Any] = []
    for cache in caches:
        leaves += flatten_caches(cache.caches) if isinstance(cache, CacheList) else [cache]
    return leaves


def cache_arrays(caches: Sequence[Any]) -> list[mx.array]:
    """Return every array in stock caches, for evaluation."""
    leaves = cast("list[tuple[str, Any]]", tree_flatten([cache.state for cache in caches]))
    return [value for _, value in leaves if isinstance(value, mx.array)]


def merge_rows(rows: Sequence[Sequence[Any]], fresh: Sequence[Any]) -> bool:
    """Fill `fresh` caches with several rows at the same position, to prefill them in one forward.

    Returns False, leaving `fresh` unusable, where rows cannot be padded on the right: recurrent
    state would take the padding in, and windows must stand alike.
    """
    columns = zip(*(flatten_caches(row) for row in rows), strict=True)
    for target, leaves in zip(flatten_caches(fresh), columns, strict=True):
        if isinstance(target, ArraysCache) or any(_has_wrapped(leaf) for leaf in leaves):
            return False
        if len({_standing(leaf) for leaf in leaves}) > 1:
            return False
        if leaves[0].keys is None:
            continue
        held = _num_held(leaves[0])
        target.keys = mx.concatenate([leaf.keys[:, :, :held] for leaf in leaves], axis=0)
        target.values = mx.concatenate([leaf.values[:, :, :held] for leaf in leaves], axis=0)
        target.offset = leaves[0].offset
        if isinstance(target, RotatingKVCache):
            target._idx = leaves[0]._idx
    return True


def split_rows(
    merged: Sequence[Any], rows: Sequence[Sequence[Any]], padding: Sequence[int]
) -> None:
    """Hand each row its part of what a forward of merged rows left, without its padding."""
    columns = zip(*(flatten_caches(row) for row in rows), strict=True)
    parts: list[tuple[Any, mx.array, mx.array, int, int]] = []
    for source, leaves in zip(flatten_caches(merged), columns, strict=True):
        held = _num_held(source)
        for index, (leaf, pad) in enumerate(zip(leaves, padding, strict=True)):
            keys = source.keys[index : index + 1, :, : held - pad]
            values = source.values[index : index + 1, :, : held - pad]
            parts.append((leaf, keys, values, source.offset - pad, held - pad))
    # Only now, when nothing can fail any more: a row in half its new state would be wrong.
    for leaf, keys, values, offset, width in parts:
        leaf.keys, leaf.values, leaf.offset = keys, values, offset
        if isinstance(leaf, RotatingKVCache):
            leaf._idx = width


def _num_held(leaf: Any) -> int:
    """Return how many of the tokens of a KV cache's arrays are filled."""
    if isinstance(leaf, RotatingKVCache):
        return int(leaf._idx)
    return int(leaf.offset)


def _has_wrapped(leaf: Any) -> bool:
    """Say whether a window is out of order, which only single-token writes bring about."""
    if not isinstance(leaf, RotatingKVCache) or leaf.keys is None:
        return False
    return bool(leaf._idx != leaf.keys.shape[2] and leaf._idx != leaf.offset)


def _standing(leaf: Any) -> tuple[int, ...]:
    """Return what must be equal for windows to be merged: position, and where it is kept."""
    width = 0 if leaf.keys is None else _num_held(leaf)
    return leaf.offset, width
