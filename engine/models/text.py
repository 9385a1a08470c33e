"""Load a text model with mlx-lm, in the dtype that this machine's policy asks for."""

from __future__ import annotations

import gc
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten
from mlx_lm.utils import dequantize_model, load_adapters, load_model

from vllm_mlx.engine.errors import ModelLoadError, ModelNotFoundError, UnsupportedModelError
from vllm_mlx.engine.models.dummy_shapes import DummyShape
from vllm_mlx.engine.models.dummy_weights import dummy_model
from vllm_mlx.engine.models.flat_rows import flatten_rows
from vllm_mlx.engine.models.progress import ProgressCallback

logger = logging.getLogger(__name__)

#: Evaluating parameters in pieces of this size lets progress be shown.
_EVAL_BYTES = 256 * 2**20


def load_text_model(
    path: Path,
    *,
    shape: DummyShape | None = None,
    overrides: dict[str, Any] | None = None,
    dtype: str | None,
    dequantize: bool,
    adapter_path: str | None,
    trust_remote_code: bool,
    on_progress: ProgressCallback,
) -> Module:
    """Load weights from a local folder and evaluate them on the calling thread.

    With a `shape` they are random, and the folder needs to hold none. `overrides` replace fields
    of the model's config.json. `dtype` casts every floating
    parameter (None keeps the checkpoint's own); `dequantize` turns quantised layers into plain
    ones of that dtype. Raises ModelLoadError subclasses.
    """
    on_progress("loading weights", 0.0)
    if shape is None:
        model = _stored_model(path, overrides, trust_remote_code)
    else:
        model = dummy_model(replace(shape, config={**shape.config, **(overrides or {})}))
    if adapter_path is not None:
        model = _with_adapter(model, adapter_path)
    if dtype is not None:
        # Before dequantising, so that the products of scales and codes are exact in that dtype.
        model.set_dtype(getattr(mx, dtype))
    if dequantize:
        model = dequantize_model(model)
    flatten_rows(model)
    _evaluate(model, on_progress)
    return cast(Module, model)


def _stored_model(path: Path, overrides: dict[str, Any] | None, trust_remote_code: bool) -> Any:
    try:
        return load_model(
            path, lazy=True, model_config=overrides, trust_remote_code=trust_remote_code
        )[0]
    except FileNotFoundError as error:
        raise ModelNotFoundError(f"{path} holds no model weights: {error}") from error
    except ValueError as error:
        raise UnsupportedModelError(f"{path} cannot be loaded by mlx-lm: {error}") from error


def weights_bytes(model: Module) -> int:
    """Return the bytes of all parameters."""
    return sum(array.nbytes for array in _parameters(model))


def floating_dtype(model: Module) -> str:
    """Return the dtype that most floating parameters have, by bytes, such as `bfloat16`."""
    sizes: dict[str, int] = {}
    for array in _parameters(model):
        if mx.issubdtype(array.dtype, mx.floating):
            name = str(array.dtype).removeprefix("mlx.core.")
            sizes[name] = sizes.get(name, 0) + array.nbytes
    return max(sizes, key=lambda name: sizes[name], default="float32")


def _with_adapter(model: Any, adapter_path: str) -> Any:
    try:
        return load_adapters(model, adapter_path)
    except FileNotFoundError as error:
        raise ModelNotFoundError(
            f"no adapter at {adapter_path}: it must hold adapter_config.json and "
            f"adapters.safetensors ({error})"
        ) from error
    except (ValueError, KeyError) as error:
        raise ModelLoadError(f"the adapter at {adapter_path} does not fit: {error}") from error


def _evaluate(model: Module, on_progress: ProgressCallback) -> None:
    arrays = _parameters(model)
    total = sum(array.nbytes for array in arrays) or 1
    done = pending_bytes = 0
    pending: list[mx.array] = []
    for array in arrays:
        pending.append(array)
        pending_bytes += array.nbytes
        if pending_bytes >= _EVAL_BYTES:
            mx.eval(pending)
            done += pending_bytes
            pending, pending_bytes = [], 0
            on_progress("loading weights", done / total)
    mx.eval(pending)
    on_progress("loading weights", 1.0)
    gc.collect()
    mx.clear_cache()


def _parameters(model: Module) -> list[mx.array]:
    return [
        array for _, array in cast("list[tuple[str, mx.array]]", tree_flatten(model.parameters()))
    ]
