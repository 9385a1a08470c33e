"""Tiny random models, one for each kind of cache that mlx-lm's models keep."""

from __future__ import annotations

import importlib
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_map

VOCAB_SIZE = 97

_COMMON = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCAB_SIZE,
    "head_dim": 8,
    "max_position_embeddings": 8192,
}

#: Model arguments by the kind of cache that they bring; the module is mlx-lm's own.
KINDS: dict[str, dict[str, Any]] = {
    "full": {"model_type": "llama", **_COMMON},
    "rotating": {
        "model_type": "gemma3_text",
        **_COMMON,
        "num_hidden_layers": 4,
        "sliding_window": 48,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 8,
    },
    "sinks": {
        "model_type": "gpt_oss",
        **_COMMON,
        "num_hidden_layers": 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 40,
        "rope_scaling": None,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "recurrent": {
        "model_type": "qwen3_next",
        **_COMMON,
        "num_hidden_layers": 4,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_conv_kernel_dim": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "shared_expert_intermediate_size": 32,
        "mlp_only_layers": [],
        "moe_intermediate_size": 32,
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "norm_topk_prob": True,
    },
    "convolution": {
        "model_type": "lfm2",
        **{k: v for k, v in _COMMON.items() if k not in ("rms_norm_eps", "head_dim")},
        "norm_eps": 1e-5,
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_dim": 32,
        "block_ff_dim": 48,
        "block_multiple_of": 8,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "layer_types": ["conv", "full_attention"],
    },
    "latent": {
        "model_type": "deepseek_v3",
        **{k: v for k, v in _COMMON.items() if k != "head_dim"},
        "num_key_value_heads": 4,
        "moe_intermediate_size": 32,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
        "qk_nope_head_dim": 8,
        "first_k_dense_replace": 1,
    },
    "composite": {
        "model_type": "falcon_h1",
        **_COMMON,
        "mamba_d_ssm": 32,
        "mamba_n_heads": 4,
        "mamba_d_head": 8,
        "mamba_d_state": 16,
        "mamba_n_groups": 1,
        "mamba_d_conv": 4,
    },
}

#: All kinds; the default run has those that keep their state in ways of their own.
KINDS_BY_TIER = [
    kind
    if kind in ("full", "rotating", "recurrent")
    else pytest.param(kind, marks=pytest.mark.thorough)
    for kind in sorted(KINDS)
]


def make_tiny_model(kind: str, *, seed: int = 0, scale: float = 4.0) -> Any:
    """Return mlx-lm's model of this kind with random float32 weights.

    Matrices are scaled up so that the logits of random weights are far enough apart for greedy
    tokens to vary.
    """
    config = KINDS[kind]
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    mx.random.seed(seed)
    model = module.Model(module.ModelArgs.from_dict(config))
    model.set_dtype(mx.float32)
    model.update(tree_map(lambda p: p * scale if p.ndim > 1 else p, model.parameters()))
    mx.eval(model.parameters())
    model.eval()
    return model
