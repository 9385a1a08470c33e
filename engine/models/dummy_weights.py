"""Fill a model of a well-known shape with random weights: as fast as the real one, and as large."""

from __future__ import annotations

import importlib
import math
from typing import Any

import mlx.core as mx
from mlx.nn.layers.quantized import quantize

from vllm_mlx.engine.models.dummy_shapes import GROUP_SIZE, DummyShape
from vllm_mlx.engine.models.safetensors_file import StoredTensor


def dummy_model(shape: DummyShape) -> Any:
    """Return mlx-lm's model of a shape with random weights, the same at every call; lazy.

    Activations keep the size that they have in real models, so that routers and softmaxes see
    values of the usual range; what is drawn means nothing.
    """
    weights = dummy_weights(shape)
    module = importlib.import_module(f"mlx_lm.models.{shape.config['model_type']}")
    model = module.Model(module.ModelArgs.from_dict(shape.document()))
    if shape.bits is not None:
        quantize(
            model,
            group_size=GROUP_SIZE,
            bits=shape.bits,
            class_predicate=lambda path, _: f"{path}.scales" in weights,
        )
    model.eval()
    model.load_weights(list(weights.items()), strict=True)
    return model


def dummy_weights(shape: DummyShape) -> dict[str, mx.array]:
    """Return lazy random arrays for all tensors of a shape, by mlx-lm's names."""
    tensors = shape.tensors()
    keys = mx.random.split(mx.random.key(0), len(tensors))
    weights: dict[str, mx.array] = {}
    for key, (name, tensor) in zip(keys, tensors.items(), strict=True):
        if name.endswith(".biases"):
            # Centres the values: codes are 0 to 2**bits - 1.
            assert shape.bits is not None
            scales = weights[f"{name.removesuffix('biases')}scales"]
            weights[name] = scales * (-(2**shape.bits - 1) / 2)
        else:
            weights[name] = _random(tensor, key, name, shape.bits)
    return weights


def _random(tensor: StoredTensor, key: mx.array, name: str, bits: int | None) -> mx.array:
    if len(tensor.shape) == 1:
        return mx.ones(tensor.shape, mx.bfloat16)
    if tensor.dtype == "U32":
        # In halves: the library draws integers by way of floats, whose 24 bits are not enough.
        high, low = (
            mx.random.randint(0, 1 << 16, tensor.shape, mx.uint32, part)
            for part in mx.random.split(key)
        )
        return (high << 16) | low
    if name.endswith(".scales"):
        assert bits is not None
        # Uniform codes spread by 2**bits / sqrt(12).
        deviation = math.sqrt(12) / 2**bits / math.sqrt(tensor.shape[-1] * GROUP_SIZE)
        spread = mx.random.uniform(0.5, 1.5, tensor.shape, key=key)
        scales: mx.array = (deviation * spread).astype(mx.bfloat16)
        return scales
    drawn = mx.random.normal(tensor.shape, key=key) / math.sqrt(tensor.shape[-1])
    return drawn.astype(mx.bfloat16)
