"""Let quantised layers see one token of many rows as a matrix, and read their weights once."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.quantized import QuantizedEmbedding, QuantizedLinear


class FlatLinear(QuantizedLinear):
    """Multiply `[R, 1, K]` as `[R, K]`."""

    def __call__(self, x: mx.array) -> mx.array:
        """Return `x` times the weights, `[..., N]`."""
        return _flat(super().__call__, x)


class FlatEmbedding(QuantizedEmbedding):
    """Multiply `[R, 1, K]` as `[R, K]` where the embedding is the output projection too."""

    def as_linear(self, x: mx.array) -> mx.array:
        """Return `x` times the transposed embedding, `[..., V]`."""
        return _flat(super().as_linear, x)


_FLAT: dict[type, type] = {QuantizedLinear: FlatLinear, QuantizedEmbedding: FlatEmbedding}


def flatten_rows(model: Module) -> None:
    """Make all quantised layers of `model` take rows as a matrix; changes it in place.

    MLX 0.32 computes a quantised product of `[R, 1, K]` as R products of a vector on CUDA, each
    of which reads all weights; as `[R, K]` it is one product of a matrix.
    """
    for layer in model.modules():
        if type(layer) in _FLAT:
            layer.__class__ = _FLAT[type(layer)]


class StockRows:
    """Give a model the library's own layers for as long as this context lasts."""

    def __init__(self, model: Module) -> None:
        flat = {ours: stock for stock, ours in _FLAT.items()}
        self._layers: list[tuple[Any, type, type]] = [
            (layer, type(layer), flat[type(layer)])
            for layer in model.modules()
            if type(layer) in flat
        ]

    def __enter__(self) -> None:
        for layer, _, stock in self._layers:
            layer.__class__ = stock

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for layer, ours, _ in self._layers:
            layer.__class__ = ours


def _flat(multiply: Callable[[mx.array], mx.array], x: mx.array) -> mx.array:
    if x.ndim != 3 or x.shape[1] != 1 or x.shape[0] == 1:
        return multiply(x)
    return mx.expand_dims(multiply(mx.squeeze(x, 1)), 1)
