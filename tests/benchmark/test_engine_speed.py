"""Gates on this engine's rate beside mlx-lm's `BatchGenerator`, in one process and taking turns."""

from __future__ import annotations

import pytest

from vllm_mlx.engine.benchmark.cells import Cell
from vllm_mlx.engine.benchmark.matrix import measure_cells
from vllm_mlx.engine.benchmark.measures import Effort
from vllm_mlx.engine.config import ModelConfig

pytestmark = pytest.mark.performance


def ratio(model: ModelConfig, cell: str, measure: str, effort: Effort) -> float:
    """Return this engine's value over `BatchGenerator`'s."""
    (result,), _ = measure_cells(model, [Cell.parse(cell)], None, effort)
    return result.found["this engine"][measure] / result.found["BatchGenerator"][measure]


def dummy(shape: str) -> ModelConfig:
    """Return the configuration of random weights."""
    return ModelConfig(model=shape, load_format="dummy", shape=shape)


def test_the_demo_model_decodes_as_fast(demo_model_path: object) -> None:
    """Where arithmetic is the limit, 16 rows decode at the library's rate."""
    assert ratio(ModelConfig(), "decode:16x64", "decode, tokens/s", Effort()) > 0.9


@pytest.mark.parametrize(("shape", "least"), [("tiny", 0.75), ("tiny-wide", 1.3)])
def test_a_tiny_model_decodes_as_fast(shape: str, least: float) -> None:
    """Where operations and Python are the limit, text and bookkeeping take little of it."""
    assert ratio(dummy(shape), "decode:16x64", "decode, tokens/s", Effort(20, 8)) > least
