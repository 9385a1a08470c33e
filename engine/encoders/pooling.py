"""Make one vector of a text's token vectors, in the ways of sentence-transformers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

from vllm_mlx.engine.encoders.encoder import Product
from vllm_mlx.engine.encoders.sentence_folder import SentenceSettings
from vllm_mlx.engine.encoders.weights import read_arrays
from vllm_mlx.engine.errors import ModelLoadError

#: Takes hidden states `[rows, length, hidden]` and weights `[rows, length, 1]`, 1 for tokens that
#: count and 0 for others; returns `[rows, hidden]`.
Pool = Callable[[mx.array, mx.array], mx.array]


def _cls(hidden: mx.array, mask: mx.array) -> mx.array:
    return _at(hidden, mx.argmax(mask, axis=1, keepdims=True))


def _last(hidden: mx.array, mask: mx.array) -> mx.array:
    length = hidden.shape[1]
    return _at(hidden, length - 1 - mx.argmax(mask[:, ::-1], axis=1, keepdims=True))


def _at(hidden: mx.array, positions: mx.array) -> mx.array:
    """Return each row's vector at its position, of `[rows, 1, 1]`."""
    return mx.take_along_axis(hidden, positions, axis=1)[:, 0]


def _max(hidden: mx.array, mask: mx.array) -> mx.array:
    return mx.where(mask > 0, hidden, -mx.inf).max(axis=1)


def _mean(hidden: mx.array, mask: mx.array) -> mx.array:
    return (hidden * mask).sum(axis=1) / mx.maximum(mask.sum(axis=1), 1e-9)


def _mean_sqrt_len(hidden: mx.array, mask: mx.array) -> mx.array:
    return (hidden * mask).sum(axis=1) / mx.sqrt(mx.maximum(mask.sum(axis=1), 1e-9))


def _weighted_mean(hidden: mx.array, mask: mx.array) -> mx.array:
    positions = mx.arange(1, hidden.shape[1] + 1, dtype=hidden.dtype)[None, :, None]
    return _mean(hidden, mask * positions)


POOLS: Mapping[str, Pool] = {
    "cls": _cls,
    "max": _max,
    "mean": _mean,
    "mean_sqrt_len_tokens": _mean_sqrt_len,
    "weightedmean": _weighted_mean,
    "lasttoken": _last,
}


@dataclass(frozen=True)
class _Dense:
    product: Product
    function: Callable[[mx.array], mx.array]


class Pooler:
    """Turn hidden states into vectors of length 1; the MLX thread only."""

    def __init__(self, settings: SentenceSettings, dtype: str) -> None:
        """Load the dense layers; raise `ModelLoadError`."""
        self._pools = [POOLS[mode] for mode in settings.pooling]
        self._dense = [_dense(layer.folder, layer.activation, dtype) for layer in settings.dense]

    def num_dimensions(self, hidden_size: int) -> int:
        """Return the length of the vectors, given that of hidden states."""
        if self._dense:
            return self._dense[-1].product.weight.shape[0]
        return hidden_size * len(self._pools)

    def __call__(
        self, hidden: mx.array, mask: mx.array, skipped: int, dimensions: int | None
    ) -> mx.array:
        """Return `[rows, dimensions]` in float32, None for all dimensions.

        `mask`, `[rows, length]`, is True for tokens that are not padding; of these a row's first
        `skipped` ones do not count.
        """
        if skipped:
            mask = mask & (mx.arange(hidden.shape[1]) >= skipped)[None, :]
        weights = mask[:, :, None].astype(hidden.dtype)
        vectors = mx.concatenate([pool(hidden, weights) for pool in self._pools], axis=-1)
        for layer in self._dense:
            vectors = layer.function(layer.product(vectors))
        vectors = vectors.astype(mx.float32)
        if dimensions is not None:
            vectors = vectors[:, :dimensions]
        return vectors / mx.maximum(mx.linalg.norm(vectors, axis=-1, keepdims=True), 1e-12)


def _dense(folder: Path, activation: str, dtype: str) -> _Dense:
    arrays = read_arrays(folder / "model.safetensors")
    weight = arrays.get("linear.weight")
    if weight is None:
        raise ModelLoadError(f"{folder}/model.safetensors lacks linear.weight")
    weight = weight.astype(getattr(mx, dtype))
    bias = arrays.get("linear.bias", mx.zeros(weight.shape[0])).astype(weight.dtype)
    return _Dense(Product(weight, bias), _DENSE_FUNCTIONS[activation])


def _identity(x: mx.array) -> mx.array:
    return x


_DENSE_FUNCTIONS: Mapping[str, Callable[[mx.array], mx.array]] = {
    "Tanh": mx.tanh,
    "Identity": _identity,
}
