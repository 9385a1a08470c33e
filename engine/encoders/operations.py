"""The two operations that MLX computes slowly on CPU, there in ways of our own.

MLX has no vector code for exponentials on x86: GELU alone would take longer than the products
around it. On CPU the error function and the hyperbolic tangent are rational functions of a few
multiplications, in float32 as exact as the library's, and softmax takes NumPy's exponential.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from vllm_mlx.engine.encoders.architecture import ACTIVATIONS

Function = Callable[[mx.array], mx.array]

#: Takes queries, keys and values `[rows, heads, length, size]` and a mask that is True where a key
#: may be attended to, or None.
Attention = Callable[[mx.array, mx.array, mx.array, "mx.array | None"], mx.array]

_SQRT_HALF = math.sqrt(0.5)
_SQRT_2_BY_PI = math.sqrt(2.0 / math.pi)

#: Elements of scores that NumPy works on at once: they stay in a core's cache.
_BLOCK_ELEMENTS = 65_536
_MASKED = -1e30

#: x * P(x^2) / Q(x^2), fitted for this module by least squares on relative errors, which were then
#: weighted until they were even; highest power first. Beyond the limit the functions are +-1.
_ERF_LIMIT = 3.9
_ERF_P = (
    *(2.01482666e-08, -1.96319388e-06, 1.40596416e-04, 3.63217703e-03),
    *(5.03446025e-02, 1.98179664e-01, 1.12837911e00),
)
_ERF_Q = (9.40554311e-04, 1.42076543e-02, 1.14279838e-01, 5.08963901e-01, 1.0)
_TANH_LIMIT = 8.5
_TANH_P = (
    *(-1.33563043e-11, 3.20941369e-08, 2.86228048e-05, 3.89852595e-03),
    *(1.37039451e-01, 9.99999999e-01),
)
_TANH_Q = (1.33072834e-06, 3.99207763e-04, 2.73561300e-02, 4.70372778e-01, 1.0)


#: Freed buffers that MLX keeps for reuse; the rest is the machine's, which has a chat model too.
_CACHE_BYTES = 1 << 28


def limit_cache() -> None:
    """Give back what loading has freed, and keep little of what batches free."""
    mx.clear_cache()
    mx.set_cache_limit(_CACHE_BYTES)


@dataclass(frozen=True)
class Operations:
    """Hold how one device computes what depends on it."""

    activation: Function
    attend: Attention


@cache
def operations_for(hidden_act: str) -> Operations:
    """Return the operations for MLX's device and a `hidden_act`, compiled to one pass."""
    is_cpu = mx.default_device() == mx.Device(mx.cpu)
    functions = _ON_CPU if is_cpu else _ON_DEVICE
    return Operations(
        activation=mx.compile(functions[ACTIVATIONS[hidden_act]]),
        attend=_attend_on_cpu if is_cpu else _attend_on_device,
    )


def _attend_on_device(
    queries: mx.array, keys: mx.array, values: mx.array, mask: mx.array | None
) -> mx.array:
    scale = queries.shape[-1] ** -0.5
    return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask)


def _attend_on_cpu(
    queries: mx.array, keys: mx.array, values: mx.array, mask: mx.array | None
) -> mx.array:
    scores = (queries * queries.shape[-1] ** -0.5) @ keys.swapaxes(-1, -2)
    scores = scores.astype(mx.float32)
    if mask is not None:
        scores = mx.where(mask, scores, _MASKED)
    mx.eval(scores)
    # The array's own memory: it was just computed, and nobody else holds it.
    _softmax_in_place(np.array(scores, copy=False))
    attended: mx.array = scores.astype(values.dtype) @ values
    return attended


def _softmax_in_place(scores: npt.NDArray[np.float32]) -> None:
    """Replace the scores along the last axis by their softmax."""
    rows = scores.reshape(-1, scores.shape[-1])
    step = max(1, _BLOCK_ELEMENTS // rows.shape[1])
    for start in range(0, len(rows), step):
        block = rows[start : start + step]
        block -= block.max(axis=-1, keepdims=True)
        np.exp(block, out=block)
        block /= block.sum(axis=-1, keepdims=True)


def _rational(
    x: mx.array, limit: float, upper: Sequence[float], lower: Sequence[float]
) -> mx.array:
    x = mx.clip(x, -limit, limit)
    square = x * x
    p, q = mx.array(upper[0], x.dtype), mx.array(lower[0], x.dtype)
    for factor in upper[1:]:
        p = p * square + factor
    for factor in lower[1:]:
        q = q * square + factor
    return x * p / q


def _erf_on_cpu(x: mx.array) -> mx.array:
    return _rational(x, _ERF_LIMIT, _ERF_P, _ERF_Q)


def _tanh_on_cpu(x: mx.array) -> mx.array:
    return _rational(x, _TANH_LIMIT, _TANH_P, _TANH_Q)


def _gelu(x: mx.array, erf: Function) -> mx.array:
    return x * (0.5 + 0.5 * erf(x * _SQRT_HALF))


def _gelu_tanh(x: mx.array, tanh: Function) -> mx.array:
    return 0.5 * x * (1.0 + tanh(_SQRT_2_BY_PI * x * (1.0 + 0.044715 * x * x)))


def _relu(x: mx.array) -> mx.array:
    return mx.maximum(x, 0)


def _silu(x: mx.array) -> mx.array:
    return x * mx.sigmoid(x)


def _silu_on_cpu(x: mx.array) -> mx.array:
    return x * (0.5 + 0.5 * _tanh_on_cpu(0.5 * x))


_ON_DEVICE: Mapping[str, Function] = {
    "gelu": lambda x: _gelu(x, mx.erf),
    "gelu_tanh": lambda x: _gelu_tanh(x, mx.tanh),
    "relu": _relu,
    "silu": _silu,
}
_ON_CPU: Mapping[str, Function] = {
    "gelu": lambda x: _gelu(x, _erf_on_cpu),
    "gelu_tanh": lambda x: _gelu_tanh(x, _tanh_on_cpu),
    "relu": _relu,
    "silu": _silu_on_cpu,
}
