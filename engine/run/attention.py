"""Attention over several groups of rows, hooked into mlx-lm's models by the type of the keys."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import mlx.core as mx

from vllm_mlx.engine.kv.step_view import GroupedKeys, GroupedMask

_NAME = "scaled_dot_product_attention"
_BASE_MODULE = "mlx_lm.models.base"


def install_attention_hook() -> None:
    """Rebind the attention function that mlx-lm's loaded model modules call.

    Idempotent; call it after the model's module was imported, because each binds the name at
    import. Calls whose keys are plain arrays go to the library's own function unchanged. The
    dispatch is on the keys: models pass no cache, or another layer's, often enough.
    """
    base = sys.modules[_BASE_MODULE]
    stock = getattr(base, _NAME)
    hook = stock if getattr(stock, "is_group_hook", False) else _make_hook(stock)
    for name, module in list(sys.modules.items()):
        if name.startswith("mlx_lm.models.") and hasattr(module, _NAME):
            setattr(module, _NAME, hook)


def _make_hook(stock: Callable[..., mx.array]) -> Callable[..., mx.array]:
    def scaled_dot_product_attention(
        queries: mx.array,
        keys: Any,
        values: Any,
        cache: Any = None,
        scale: float = 1.0,
        mask: Any = None,
        sinks: mx.array | None = None,
        **options: Any,
    ) -> mx.array:
        if not isinstance(keys, GroupedKeys):
            return stock(
                queries, keys, values, cache, scale=scale, mask=mask, sinks=sinks, **options
            )
        return grouped_attention(queries, keys, values, scale=scale, mask=mask, sinks=sinks)

    scaled_dot_product_attention.is_group_hook = True  # type: ignore[attr-defined]
    return scaled_dot_product_attention


def grouped_attention(
    queries: mx.array,
    keys: GroupedKeys,
    values: GroupedKeys,
    *,
    scale: float,
    mask: GroupedMask | None,
    sinks: mx.array | None = None,
) -> mx.array:
    """Attend group by group: one stock call each, so that a short row never pays for a long one.

    `queries` is `[rows, heads, 1, head_dim]` in batch order, and so is the result.
    """
    masks = (None,) * len(keys.parts) if mask is None else mask.parts
    outputs = [
        mx.fast.scaled_dot_product_attention(
            queries[start:stop], part_keys, part_values, scale=scale, mask=part_mask, sinks=sinks
        )
        for start, stop, part_keys, part_values, part_mask in zip(
            keys.bounds[:-1], keys.bounds[1:], keys.parts, values.parts, masks, strict=True
        )
    ]
    return mx.concatenate(outputs, axis=0)
