"""Say what a checkpoint will take, from its config.json and safetensors headers alone."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec

from vllm_mlx.engine.config import ModelConfig
from vllm_mlx.engine.errors import ModelLoadError
from vllm_mlx.engine.memory import AttentionShape, host_limits, usable_bytes
from vllm_mlx.engine.models.dummy_shapes import DUMMY_SHAPES
from vllm_mlx.engine.models.experts import with_fewer_experts
from vllm_mlx.engine.models.kv_shape import first_of, head_dim, kv_shape, text_config
from vllm_mlx.engine.models.resolve import weight_files
from vllm_mlx.engine.models.safetensors_file import StoredTensor, read_header
from vllm_mlx.engine.platform import Backend, installed_backend, load_dtype

_DTYPE_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_ITEMSIZES = {"float32": 4, "float16": 2, "bfloat16": 2}
#: Parts of multimodal checkpoints that a text model leaves unread.
_UNREAD_PARTS = ("vision_tower.", "vision_model.", "visual.", "audio_tower.", "multi_modal_pro")
#: Taken where the config names no context: recurrent models have none.
_UNDECLARED_CONTEXT = 32_768
#: Fused attention takes heads up to this width; wider ones store their scores.
_MAX_FUSED_HEAD_DIM = 128


class CheckpointSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Say what loading a checkpoint on this machine takes, and what each row takes then."""

    model_type: str
    #: As stored.
    weights_bytes: int
    #: In memory, after the dtype policy.
    load_bytes: int
    kv_bytes_per_token: int
    #: What a row takes whatever its length: full sliding windows, recurrent state.
    state_bytes_per_row: int
    #: Longest prompt plus completion, `max_model_len` applied.
    context_length: int
    #: What activations and floating-point weights are loaded in.
    dtype: str
    #: `4-bit affine, group 64`; None for plain weights.
    quantization: str | None
    #: True if quantised weights are to be loaded as plain float32: on CPU, where they fit.
    dequantizes: bool
    attention: AttentionShape


def read_config(path: Path) -> dict[str, Any]:
    """Read a model folder's config.json; raises ModelLoadError if it is not a JSON object."""
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path / 'config.json'} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise ModelLoadError(f"{path / 'config.json'} is not a JSON object")
    return config


def summarize_checkpoint(
    path: Path,
    config: ModelConfig,
    *,
    backend: Backend | None = None,
    available_bytes: int | None = None,
) -> CheckpointSummary:
    """Summarise the model folder `path` as `config` would load it here; MLX is not imported.

    `backend` and `available_bytes` (what dequantised weights may take) default to this machine's.
    Raises ModelLoadError if a header or config.json cannot be read, or for experts that the model
    does not have.
    """
    document = read_config(path)
    if config.moe_top_k is not None:
        document |= with_fewer_experts(document, config.moe_top_k)
    text = text_config(document)
    tensors: dict[str, StoredTensor] = {}
    if config.shape is not None:
        tensors = DUMMY_SHAPES[config.shape].tensors()
    else:
        for file in weight_files(path):
            tensors.update(read_header(file))
    backend = backend or installed_backend()
    dtype = load_dtype(config.dtype, _checkpoint_dtype(tensors, document), backend=backend)
    cast = None if config.dtype == "auto" and backend != "cpu" else dtype
    plain_bytes, quantized_bytes = _load_bytes(tensors, document, cast)
    dequantizes = False
    if backend == "cpu" and dtype == "float32" and _quantization(document) is not None:
        if available_bytes is None:
            available_bytes = usable_bytes(host_limits())
        # Half: rows need room beside the weights, and reading holds both forms for a while.
        dequantizes = plain_bytes <= available_bytes // 2
    itemsize = _ITEMSIZES.get(dtype, 2)
    shape = kv_shape(document, itemsize)
    return CheckpointSummary(
        model_type=str(document.get("model_type", "unknown")),
        weights_bytes=sum(tensor.num_bytes for tensor in tensors.values()),
        load_bytes=plain_bytes if dequantizes else quantized_bytes,
        kv_bytes_per_token=shape.bytes_per_token,
        state_bytes_per_row=shape.state_bytes_per_row,
        context_length=_context_length(text, config.max_model_len),
        dtype=dtype,
        quantization=_quantization_name(document),
        dequantizes=dequantizes,
        attention=_attention_shape(text, itemsize, backend),
    )


def _quantization(document: dict[str, Any]) -> dict[str, Any] | None:
    """Return the settings of MLX's own quantisation, None for other kinds and plain weights."""
    settings = document.get("quantization") or document.get("quantization_config")
    return settings if isinstance(settings, dict) and "group_size" in settings else None


def _quantization_name(document: dict[str, Any]) -> str | None:
    settings = _quantization(document)
    if settings is None:
        other = document.get("quantization_config")
        return str(other.get("quant_method")) if isinstance(other, dict) else None
    mode = settings.get("mode", "affine")
    return f"{settings.get('bits')}-bit {mode}, group {settings['group_size']}"


def _checkpoint_dtype(tensors: dict[str, StoredTensor], document: dict[str, Any]) -> str:
    """Return the floating-point dtype that most bytes have, else what the config says."""
    sizes: Counter[str] = Counter()
    for tensor in tensors.values():
        if tensor.dtype in _DTYPE_NAMES:
            sizes[_DTYPE_NAMES[tensor.dtype]] += tensor.num_bytes
    if sizes:
        return sizes.most_common(1)[0][0]
    declared = document.get("dtype") or document.get("torch_dtype")
    return declared if declared in _ITEMSIZES else "bfloat16"


def _load_bytes(
    tensors: dict[str, StoredTensor], document: dict[str, Any], cast: str | None
) -> tuple[int, int]:
    """Return the bytes in memory with quantised weights made plain, and with them kept.

    `cast` is the dtype that floating-point tensors are cast to, None if they stay as they are.
    """
    settings = _quantization(document)
    plain = kept = 0
    for name, tensor in tensors.items():
        if any(part in name for part in _UNREAD_PARTS):
            continue
        module, _, leaf = name.rpartition(".")
        scales = tensors.get(f"{module}.scales") if settings is not None else None
        size = _cast_bytes(tensor, cast)
        kept += size
        if scales is None or settings is None or leaf == "bias":
            plain += size
        elif leaf == "weight":
            override = settings.get(module)
            group = (override if isinstance(override, dict) else settings).get("group_size", 64)
            plain += scales.num_elements * int(group) * _ITEMSIZES["float32"]
    return plain, kept


def _cast_bytes(tensor: StoredTensor, cast: str | None) -> int:
    if tensor.dtype in _DTYPE_NAMES and cast is not None:
        return tensor.num_elements * _ITEMSIZES[cast]
    if tensor.dtype.startswith("F8"):
        # Read by way of 16-bit floats: MLX has no products of these.
        return tensor.num_elements * _ITEMSIZES[cast or "bfloat16"]
    return tensor.num_bytes


def _context_length(text: dict[str, Any], max_model_len: int | None) -> int:
    names = (
        "max_position_embeddings",
        "max_sequence_length",
        "max_seq_len",
        "seq_length",
        "n_positions",
        "n_ctx",
        "context_length",
        "model_max_length",
    )
    declared = first_of(text, *names, default=_UNDECLARED_CONTEXT)
    return declared if max_model_len is None else min(declared, max_model_len)


def _attention_shape(
    text: dict[str, Any], itemsize: int, backend: Backend | None
) -> AttentionShape:
    hidden = first_of(text, "hidden_size", "n_embd", "d_model", "model_dim")
    experts = first_of(text, "num_experts_per_tok", default=1)
    inner = first_of(text, "intermediate_size", "n_inner", "ffn_dim", default=4 * hidden)
    return AttentionShape(
        num_heads=first_of(text, "num_attention_heads", "n_heads", "n_head", default=1),
        hidden_size=hidden,
        intermediate_size=max(inner, experts * first_of(text, "moe_intermediate_size")),
        vocab_size=first_of(text, "vocab_size"),
        itemsize=itemsize,
        is_fused=backend in ("metal", "cuda") and head_dim(text) <= _MAX_FUSED_HEAD_DIM,
    )
