"""Say from a config.json alone what one row's caches will take in mlx-lm's model of that type.

An estimate for before loading: what a loaded model's caches really take is measured there. The
widths follow the `make_cache` and `update_and_fetch` of mlx-lm 0.32.2's models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from vllm_mlx.engine.kv.resume import ResumeRule

LayerKind = Literal["full", "window", "state", "full+state", "none"]

#: Model types whose sliding layers get a cache bounded by the window; others keep every token.
BOUNDED_TYPES = frozenset(
    {
        *("afmoe", "baichuan_m1", "cohere2", "exaone4", "exaone_moe", "gear", "gemma3_text"),
        *("gemma3n", "gemma4_text", "gpt_oss", "iquestloopcoder", "laguna", "llama", "mellum"),
        *("mimo_v2_flash", "ministral3", "muse_glimmer", "muse_spark", "olmo3", "plamo3"),
        *("recurrent_gemma", "spark2_5", "step3p5"),
    }
)
#: Multi-head latent attention that stores the compressed latent, not the heads' keys and values.
LATENT_TYPES = frozenset(
    {
        *("bailing_hybrid", "bailing_moe_v3", "deepseek_v3", "deepseek_v32", "glm4_moe_lite"),
        *("glm_moe_dsa", "kimi_k3", "kimi_linear", "longcat_flash", "longcat_flash_ngram"),
        "mistral4",
    }
)
_ALIASES = {
    "mistral": "llama",
    "iquestcoder": "llama",
    "xverse": "llama",
    "kimi_k2": "deepseek_v3",
    "kimi_vl": "deepseek_v3",
    "joyai_llm_flash": "deepseek_v3",
    "gemma3": "gemma3_text",
    "gemma3n_text": "gemma3n",
    "gemma4": "gemma4_text",
    "gemma4_unified": "gemma4_text",
    "falcon_mamba": "mamba",
}
#: What a type's own code assumes where its config.json is silent.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma3_text": {
        "head_dim": 256,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
    },
    "gemma3n": {"head_dim": 256, "sliding_window": 512},
    "gemma4_text": {
        "head_dim": 256,
        "global_head_dim": 512,
        "num_key_value_heads": 1,
        "num_kv_shared_layers": 20,
        "sliding_window": 512,
        "sliding_window_pattern": 5,
    },
    "cohere2": {"sliding_window_pattern": 4},
    "gpt_oss": {"head_dim": 64, "sliding_window": 128, "sliding_window_pattern": 2},
    "qwen3_next": {"full_attention_interval": 4},
    "qwen3_5": {"full_attention_interval": 4},
    "qwen3_5_moe": {"full_attention_interval": 4},
}
_ALL_STATE_TYPES = frozenset({"mamba", "mamba2", "rwkv7"})
_FLOAT32_BYTES = 4


@dataclass(frozen=True)
class KvShape:
    """Give the bytes that one row's caches take."""

    #: Grows with every token of the row.
    bytes_per_token: int
    #: Does not grow: sliding windows (at their full length) and recurrent state.
    state_bytes_per_row: int


def kv_shape(config: Mapping[str, Any], itemsize: int) -> KvShape:
    """Return what one row's caches take when activations have `itemsize` bytes a number."""
    text = text_config(config)
    per_token = per_row = 0
    for index, kind in enumerate(_layer_kinds(text)):
        if kind in ("full", "full+state"):
            per_token += _token_width(text, index, is_window=False) * itemsize
        if kind == "window":
            window = _window(text)
            per_row += window * _token_width(text, index, is_window=True) * itemsize
        if kind in ("state", "full+state"):
            per_row += _state_bytes(text, itemsize)
    return KvShape(per_token, per_row)


def resume_rule(config: Mapping[str, Any], block_size: int) -> ResumeRule:
    """Return what the model of a config.json needs to go on from a stored prefix."""
    text = text_config(config)
    parts = {
        "full": {"kv"},
        "window": {"window"},
        "state": {"state"},
        "full+state": {"kv", "state"},
    }
    kinds = frozenset(part for kind in _layer_kinds(text) for part in parts.get(kind, ()))
    return ResumeRule(block_size, kinds, _window(text) if "window" in kinds else None)


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the language model's part of a config, its aliases and defaults applied."""
    nested: dict[str, Any] = {}
    for key in ("text_config", "llm_config", "language_config"):
        part = config.get(key)
        if isinstance(part, Mapping):
            nested.update({name: value for name, value in part.items() if value is not None})
    outer = {name: value for name, value in config.items() if value is not None}
    model_type = str(nested.get("model_type") or outer.get("model_type") or "")
    model_type = _ALIASES.get(model_type, model_type)
    defaults = _DEFAULTS.get(model_type, {})
    # A nested part is complete with its type's defaults; the outer level only fills gaps.
    text = {**outer, **defaults, **nested} if nested else {**defaults, **outer}
    return {**text, "model_type": model_type}


def first_of(config: Mapping[str, Any], *names: str, default: int = 0) -> int:
    """Return the first of several names of one number that the config has."""
    for name in names:
        value = config.get(name)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return default


def num_layers(config: Mapping[str, Any]) -> int:
    """Return the number of the language model's layers."""
    return first_of(config, "num_hidden_layers", "n_layers", "n_layer", "num_layers")


def head_dim(config: Mapping[str, Any]) -> int:
    """Return the width of one attention head's keys."""
    heads = first_of(config, "num_attention_heads", "n_heads", "n_head", default=1)
    hidden = first_of(config, "hidden_size", "n_embd", "d_model", "model_dim")
    return first_of(config, "head_dim", "attention_head_dim", default=hidden // max(1, heads))


def _layer_kinds(config: Mapping[str, Any]) -> list[LayerKind]:
    model_type = config["model_type"]
    count = num_layers(config)
    if model_type in _ALL_STATE_TYPES:
        return ["state"] * count
    if model_type == "falcon_h1":
        return ["full+state"] * count
    pattern = config.get("hybrid_override_pattern")
    if isinstance(pattern, str | list):
        by_letter: dict[str, LayerKind] = {"M": "state", "*": "full"}
        return [by_letter.get(letter, "none") for letter in pattern]
    shared = first_of(config, "num_kv_shared_layers")
    return [_layer_kind(config, model_type, index) for index in range(count - shared)]


def _layer_kind(config: Mapping[str, Any], model_type: str, index: int) -> LayerKind:
    """Return the kind of one layer, by whichever of the usual fields says it."""
    lists = ("layer_types", "layers_block_type", "block_types", "_block_types")
    names = next((config[name] for name in lists if config.get(name)), None)
    if isinstance(names, list) and names:
        return _named_kind(str(names[index % len(names)]), model_type)
    full = config.get("full_attn_idxs")
    if isinstance(full, list):
        return "full" if index in full else "state"
    linear = config.get("linear_attn_config")
    if isinstance(linear, Mapping) and linear.get("kda_layers"):
        return "state" if index + 1 in linear["kda_layers"] else "full"
    interval = first_of(config, "full_attention_interval")
    if model_type in ("bailing_hybrid", "bailing_moe_linear"):
        interval = first_of(config, "layer_group_size")
    if interval:
        return "full" if (index + 1) % interval == 0 else "state"
    period = first_of(config, "attn_layer_period")
    if period:
        return "full" if index % period == first_of(config, "attn_layer_offset") else "state"
    pattern = first_of(config, "sliding_window_pattern", "_sliding_window_pattern")
    if pattern and model_type in BOUNDED_TYPES:
        return "full" if index % pattern == pattern - 1 else "window"
    return "full"


def _named_kind(name: str, model_type: str) -> LayerKind:
    if "sliding" in name or "local" in name:
        return "window" if model_type in BOUNDED_TYPES else "full"
    if name in ("linear_attention", "mamba", "conv", "recurrent", "linear"):
        return "state"
    if name == "attention" and model_type == "recurrent_gemma":
        return "window"
    return "full" if "attention" in name or name == "full" else "none"


def _window(config: Mapping[str, Any]) -> int:
    names = ("sliding_window", "sliding_window_size", "window_size", "attention_window_size")
    return first_of(config, *names)


def _token_width(config: Mapping[str, Any], index: int, *, is_window: bool) -> int:
    """Return how many numbers one layer stores for one token."""
    model_type = config["model_type"]
    rank, rope = first_of(config, "kv_lora_rank"), first_of(config, "qk_rope_head_dim")
    if rank and model_type in LATENT_TYPES:
        per_layer = 2 if model_type.startswith("longcat") else 1
        # The sparse kinds keep their indexer's keys as both key and value of a second cache.
        return per_layer * (rank + rope) + 2 * first_of(config, "index_head_dim")
    heads = _kv_heads(config, index)
    if rank:
        nope, value = first_of(config, "qk_nope_head_dim"), first_of(config, "v_head_dim")
        return first_of(config, "num_attention_heads") * (nope + rope + value)
    width = head_dim(config)
    if not is_window:
        width = first_of(config, "global_head_dim", default=width)
        if config.get("attention_k_eq_v"):
            heads = first_of(config, "num_global_key_value_heads", default=heads)
    return heads * (width + first_of(config, "v_head_dim", default=width))


def _kv_heads(config: Mapping[str, Any], index: int) -> int:
    per_layer = config.get("num_kv_heads")
    if isinstance(per_layer, list) and per_layer:
        return int(per_layer[index % len(per_layer)])
    heads = first_of(config, "num_attention_heads", "n_heads", "n_head", default=1)
    return first_of(
        config, "num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_head_kv", default=heads
    )


def _state_bytes(config: Mapping[str, Any], itemsize: int) -> int:
    """Return one recurrent layer's bytes a row; 0 for a kind that is not known here."""
    hidden = first_of(config, "hidden_size", "d_model")
    linear = config.get("linear_attn_config")
    if isinstance(linear, Mapping):  # Kimi delta attention
        heads, dim = first_of(linear, "num_heads"), first_of(linear, "head_dim")
        kept = first_of(linear, "short_conv_kernel_size") - 1
        return 3 * kept * heads * dim * itemsize + heads * dim * dim * _FLOAT32_BYTES
    if first_of(config, "linear_num_value_heads"):  # gated delta net
        values = first_of(config, "linear_num_value_heads")
        key_dim, value_dim = (
            first_of(config, "linear_key_head_dim"),
            first_of(config, "linear_value_head_dim"),
        )
        width = 2 * first_of(config, "linear_num_key_heads") * key_dim + values * value_dim
        conv = (first_of(config, "linear_conv_kernel_dim") - 1) * width * itemsize
        return conv + values * value_dim * key_dim * _FLOAT32_BYTES
    if first_of(config, "conv_L_cache"):  # short convolutions
        return (first_of(config, "conv_L_cache") - 1) * hidden * itemsize
    if config["model_type"] == "rwkv7":
        return 2 * hidden * itemsize + hidden * head_dim(config) * _FLOAT32_BYTES
    if config["model_type"] == "recurrent_gemma":
        width = first_of(config, "lru_width", default=hidden)
        return first_of(config, "conv1d_width") * width * itemsize
    if config["model_type"] in ("bailing_hybrid", "bailing_moe_linear"):
        return first_of(config, "num_attention_heads") * head_dim(config) ** 2 * _FLOAT32_BYTES
    return _mamba_bytes(config, hidden, itemsize)


def _mamba_bytes(config: Mapping[str, Any], hidden: int, itemsize: int) -> int:
    kept = first_of(config, "conv_kernel", "mamba_d_conv", default=1) - 1
    state = first_of(config, "ssm_state_size", "state_size", "mamba_d_state")
    heads = first_of(config, "mamba_num_heads", "mamba_n_heads")
    dim = first_of(config, "mamba_head_dim", "mamba_d_head", "hidden_size_per_head")
    if config["model_type"] == "mamba2":
        heads, dim = first_of(config, "num_heads"), first_of(config, "head_dim")
    if heads and dim:
        groups = first_of(config, "n_groups", "mamba_n_groups", default=1)
        conv = kept * (heads * dim + 2 * groups * state)
        return conv * itemsize + heads * dim * state * _FLOAT32_BYTES
    inner = first_of(config, "mamba_expand") * hidden or first_of(config, "intermediate_size")
    return (kept * inner + inner * state) * itemsize
