"""Look into the caches that mlx-lm makes for one row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.cache import CacheList


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
