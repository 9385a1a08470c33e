"""Quantised layers that take rows as a matrix give what the library's own give."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import QuantizedEmbedding, QuantizedLinear

from vllm_mlx.engine.models.dummy_shapes import DUMMY_SHAPES
from vllm_mlx.engine.models.dummy_weights import dummy_model
from vllm_mlx.engine.models.flat_rows import FlatEmbedding, FlatLinear, StockRows, flatten_rows


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Return the shapes that MLX is asked to multiply from here on."""
    shapes: list[tuple[int, ...]] = []
    stock = mx.quantized_matmul

    def spy(x: mx.array, *args: Any, **settings: Any) -> mx.array:
        shapes.append(x.shape)
        return stock(x, *args, **settings)

    monkeypatch.setattr(mx, "quantized_matmul", spy)
    return shapes


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(
    ("shape", "multiplied"),
    [((5, 1, 64), (5, 64)), ((1, 1, 64), (1, 1, 64)), ((2, 3, 64), (2, 3, 64)), ((5, 64), (5, 64))],
)
def test_products_are_the_librarys_own(
    shape: tuple[int, ...], multiplied: tuple[int, ...], bits: int, seen: list[tuple[int, ...]]
) -> None:
    """In the shape that came, with a bias too; only one token of many rows becomes a matrix."""
    mx.random.seed(bits)
    x = mx.random.normal(shape)
    layers = (
        QuantizedLinear.from_linear(Linear(64, 96), bits=bits),
        QuantizedEmbedding.from_embedding(Embedding(96, 64), bits=bits),
    )
    linear, embedding = layers
    expected = (linear(x), embedding.as_linear(x))
    for layer in layers:
        flatten_rows(layer)
    assert (type(linear), type(embedding)) == (FlatLinear, FlatEmbedding)
    seen.clear()
    for want, got in zip(expected, (linear(x), embedding.as_linear(x)), strict=True):
        assert got.shape == want.shape
        assert mx.allclose(got, want, rtol=1e-5, atol=1e-5)
    assert seen == [multiplied] * 2


def test_a_whole_model_is_changed_and_can_be_as_it_was(seen: list[tuple[int, ...]]) -> None:
    """Every quantised product of a decode step has two dimensions, until it is stock again."""
    model = dummy_model(replace(DUMMY_SHAPES["tiny"], bits=4))
    flatten_rows(model)
    tokens = mx.array([[1], [2], [3]])
    flat = model(tokens)
    assert seen
    assert {len(shape) for shape in seen} == {2}
    seen.clear()
    with StockRows(model):
        stock = model(tokens)
    assert {len(shape) for shape in seen} == {3}
    assert mx.allclose(flat, stock, rtol=1e-2, atol=1e-2)
    seen.clear()
    model(tokens)
    assert {len(shape) for shape in seen} == {2}
