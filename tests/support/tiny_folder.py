"""A model folder as a hub would have it: a tiny random Llama with a real tokenizer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

_HIDDEN, _INNER, _LAYERS, _HEADS, _KV_HEADS = 32, 64, 2, 4, 2


def write_tiny_folder(folder: Path, tokenizer_from: Path, *, context: int = 8192) -> Path:
    """Write the folder, with the tokenizer and chat template of another one, and return it.

    It computes hundreds of tokens a second, of no meaning.
    """
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer_from / name, folder / name)
    base = json.loads((tokenizer_from / "config.json").read_text())
    config: dict[str, Any] = {
        "model_type": "llama",
        "hidden_size": _HIDDEN,
        "intermediate_size": _INNER,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": context,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        **{name: base[name] for name in ("vocab_size", "bos_token_id", "eos_token_id")},
    }
    (folder / "config.json").write_text(json.dumps(config))
    weights = _weights(config["vocab_size"])
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "mlx"})
    return folder


def _weights(vocab_size: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)

    def matrix(rows: int, columns: int) -> np.ndarray:
        return random.normal(0, columns**-0.5, (rows, columns)).astype(np.float32)

    norm = np.ones(_HIDDEN, np.float32)
    kv = _HIDDEN // _HEADS * _KV_HEADS
    weights = {"model.embed_tokens.weight": matrix(vocab_size, _HIDDEN), "model.norm.weight": norm}
    for layer in range(_LAYERS):
        place = f"model.layers.{layer}"
        weights |= {
            f"{place}.self_attn.q_proj.weight": matrix(_HIDDEN, _HIDDEN),
            f"{place}.self_attn.k_proj.weight": matrix(kv, _HIDDEN),
            f"{place}.self_attn.v_proj.weight": matrix(kv, _HIDDEN),
            f"{place}.self_attn.o_proj.weight": matrix(_HIDDEN, _HIDDEN),
            f"{place}.mlp.gate_proj.weight": matrix(_INNER, _HIDDEN),
            f"{place}.mlp.up_proj.weight": matrix(_INNER, _HIDDEN),
            f"{place}.mlp.down_proj.weight": matrix(_HIDDEN, _INNER),
            f"{place}.input_layernorm.weight": norm,
            f"{place}.post_attention_layernorm.weight": norm,
        }
    return weights
