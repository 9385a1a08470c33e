"""Cache sizes read from a config equal those of mlx-lm's real caches."""

from __future__ import annotations

import re
from importlib.resources import files
from typing import Any

import pytest

from vllm_mlx.engine.models.kv_shape import BOUNDED_TYPES, LATENT_TYPES, kv_shape
from vllm_mlx.engine.platform import require_backend

require_backend()

import mlx.core as mx  # noqa: E402
from mlx.utils import tree_flatten  # noqa: E402
from mlx_lm.models.cache import KVCache, make_prompt_cache  # noqa: E402
from mlx_lm.utils import _get_classes  # noqa: E402

BASE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": 50,
    "rope_theta": 10_000.0,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}
MAMBA2 = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_ssm": 64,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_d_conv": 4,
    "mamba_chunk_size": 16,
}
MLA = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
LINEAR = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 3},
    "llama-sliding": {
        "model_type": "llama",
        "num_hidden_layers": 3,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "mistral": {"num_hidden_layers": 2, "head_dim": 16, "sliding_window": 16},
    "qwen3": {
        "num_hidden_layers": 2,
        "head_dim": 16,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "gemma3_text": {
        "num_hidden_layers": 7,
        "head_dim": 8,
        "sliding_window": 16,
        "sliding_window_pattern": 3,
    },
    "gemma3": {
        "vocab_size": 50,
        "text_config": {
            "model_type": "gemma3_text",
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 7,
            "sliding_window": 16,
        },
    },
    "gpt_oss": {
        "num_hidden_layers": 4,
        "head_dim": 8,
        "sliding_window": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "qwen3_next": {
        "num_hidden_layers": 4,
        "head_dim": 8,
        **LINEAR,
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "decoder_sparse_step": 1,
        "shared_expert_intermediate_size": 16,
        "mlp_only_layers": [],
        "moe_intermediate_size": 16,
        "partial_rotary_factor": 0.5,
    },
    "lfm2": {
        "num_hidden_layers": 4,
        "norm_eps": 1e-5,
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_dim": 32,
        "block_ff_dim": 64,
        "block_multiple_of": 8,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "full_attn_idxs": [1, 3],
    },
    "deepseek_v3": {"num_hidden_layers": 2, **MLA},
    "deepseek_v2": {
        "num_hidden_layers": 2,
        **MLA,
        "rope_scaling": {"type": "yarn", "factor": 1.0, "mscale_all_dim": 0},
    },
    "falcon_h1": {"num_hidden_layers": 2, "head_dim": 8, **MAMBA2},
    "jamba": {
        "num_hidden_layers": 4,
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
        "mamba_d_conv": 4,
        "mamba_d_state": 8,
        "mamba_expand": 2,
        "num_experts": 2,
        "num_experts_per_tok": 1,
    },
    "mamba2": {
        "num_hidden_layers": 2,
        "num_heads": 4,
        "head_dim": 16,
        "state_size": 8,
        "conv_kernel": 4,
        "n_groups": 1,
        "use_bias": False,
        "use_conv_bias": True,
        "layer_norm_epsilon": 1e-5,
        "time_step_limit": [0.0, 1.0],
        "time_step_rank": "auto",
    },
    "rwkv7": {
        "num_hidden_layers": 2,
        "norm_eps": 1e-5,
        "head_dim": 8,
        "a_low_rank_dim": 8,
        "v_low_rank_dim": 8,
        "gate_low_rank_dim": 8,
        "decay_low_rank_dim": 8,
    },
}


def config_of(name: str) -> dict[str, Any]:
    """Return the whole config of one case."""
    return {**BASE, "model_type": name, **CONFIGS[name]}


def cache_bytes(config: dict[str, Any], num_tokens: int) -> int:
    """Return the bytes that mlx-lm's caches hold after a prompt and one more token."""
    model_class, args_class = _get_classes(config)
    mx.random.seed(0)
    model = model_class(args_class.from_dict(config))
    cache = make_prompt_cache(model)
    logits = model(mx.zeros((1, num_tokens), mx.int32), cache=cache)
    # The one more, because a rotating cache trims itself when decoding begins.
    mx.eval(logits, model(mx.zeros((1, 1), mx.int32), cache=cache))
    states = [array for _, array in tree_flatten([layer.state for layer in cache])]
    return sum(array.nbytes for array in states if isinstance(array, mx.array))


@pytest.mark.parametrize("name", CONFIGS)
def test_sizes_are_those_of_the_real_caches(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes a token and bytes a row are what mlx-lm's caches take, for every kind of layer."""
    config = config_of(name)
    shape = kv_shape(config, itemsize=4)
    monkeypatch.setattr(KVCache, "step", 8)  # then lengths of whole steps leave no slack
    short, long = cache_bytes(config, 31), cache_bytes(config, 47)
    assert shape.bytes_per_token == (long - short) / 16
    assert shape.state_bytes_per_row == short - 32 * shape.bytes_per_token


def test_types_with_bounded_windows_are_those_of_the_library() -> None:
    """A model type is listed exactly if its mlx-lm module makes rotating caches."""
    found = set()
    for module in files("mlx_lm.models").iterdir():
        is_model = module.name.endswith(".py") and module.name != "cache.py"
        if is_model and "RotatingKVCache(" in module.read_text(encoding="utf-8"):
            found.add(module.name.removesuffix(".py"))
    assert found == BOUNDED_TYPES


def test_types_with_latent_caches_are_those_of_the_library() -> None:
    """A model type is listed exactly if its module, or that module's base, stores latents."""
    built_on = {"glm_moe_dsa": "deepseek_v32", "longcat_flash_ngram": "longcat_flash"}
    for name in sorted(LATENT_TYPES):
        source = files("mlx_lm.models").joinpath(f"{built_on.get(name, name)}.py").read_text()
        assert re.search(r"update_and_fetch\(kv_latent", source), name
    for module in files("mlx_lm.models").iterdir():
        if module.name.endswith(".py") and "update_and_fetch(kv_latent" in module.read_text():
            assert module.name.removesuffix(".py") in LATENT_TYPES
