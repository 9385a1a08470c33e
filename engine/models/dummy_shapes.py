"""Describe models of well-known shapes by name, so that random weights can stand for real ones."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from vllm_mlx.engine.models.safetensors_file import StoredTensor

#: Consecutive weights that share a scale; mlx-lm's default.
GROUP_SIZE = 64

#: Raise it whenever the same shape gets other random weights.
_DRAWING_VERSION = 1

_LLAMA = {
    "model_type": "llama",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
}
_QWEN3 = {"model_type": "qwen3", "rms_norm_eps": 1e-6, "rope_theta": 1000000.0}
_QWEN3_MOE = {
    **_QWEN3,
    "model_type": "qwen3_moe",
    "tie_word_embeddings": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}


@dataclass(frozen=True)
class DummyShape:
    """Hold what config.json says of a model, and how its weights are quantised."""

    config: dict[str, Any] = field(repr=False)
    #: None for plain bfloat16 weights.
    bits: int | None = None

    @property
    def vocab_size(self) -> int:
        """Return the size of the vocabulary."""
        return int(self.config["vocab_size"])

    @property
    def fingerprint(self) -> str:
        """Return what tells these weights from others: they are the same at every load."""
        drawn = {"version": _DRAWING_VERSION, **self.document()}
        return hashlib.sha256(json.dumps(drawn, sort_keys=True).encode()).hexdigest()

    def document(self) -> dict[str, Any]:
        """Return a config.json, without the ids of special tokens."""
        document = {**self.config, "torch_dtype": "bfloat16"}
        if self.bits is not None:
            document["quantization"] = {"group_size": GROUP_SIZE, "bits": self.bits}
        return document

    def tensors(self) -> dict[str, StoredTensor]:
        """Return every tensor of a checkpoint of this shape, by mlx-lm's names."""
        found: dict[str, StoredTensor] = {}
        for name, shape in _matrices(self.config):
            found.update(self._matrix(name, shape))
        for name, width in _norms(self.config):
            found[f"{name}.weight"] = StoredTensor("BF16", (width,))
        return found

    def _matrix(self, name: str, shape: tuple[int, ...]) -> Iterator[tuple[str, StoredTensor]]:
        if self.bits is None:
            yield f"{name}.weight", StoredTensor("BF16", shape)
            return
        *outer, columns = shape
        yield f"{name}.weight", StoredTensor("U32", (*outer, columns * self.bits // 32))
        for part in ("scales", "biases"):
            yield f"{name}.{part}", StoredTensor("BF16", (*outer, columns // GROUP_SIZE))


def _matrices(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the names and plain shapes of all linear layers and the embedding."""
    hidden, vocab, head_dim = config["hidden_size"], config["vocab_size"], config["head_dim"]
    queries = config["num_attention_heads"] * head_dim
    keys = config["num_key_value_heads"] * head_dim
    experts = config.get("num_experts")
    inner = config["moe_intermediate_size"] if experts else config["intermediate_size"]
    outer = (experts,) if experts else ()
    yield "model.embed_tokens", (vocab, hidden)
    if not config["tie_word_embeddings"]:
        yield "lm_head", (vocab, hidden)
    for number in range(config["num_hidden_layers"]):
        layer = f"model.layers.{number}"
        yield f"{layer}.self_attn.q_proj", (queries, hidden)
        yield f"{layer}.self_attn.k_proj", (keys, hidden)
        yield f"{layer}.self_attn.v_proj", (keys, hidden)
        yield f"{layer}.self_attn.o_proj", (hidden, queries)
        mlp = f"{layer}.mlp"
        if experts:
            yield f"{mlp}.gate", (experts, hidden)
            mlp = f"{mlp}.switch_mlp"
        yield f"{mlp}.gate_proj", (*outer, inner, hidden)
        yield f"{mlp}.up_proj", (*outer, inner, hidden)
        yield f"{mlp}.down_proj", (*outer, hidden, inner)


def _norms(config: dict[str, Any]) -> Iterator[tuple[str, int]]:
    """Yield the names and widths of all norms."""
    yield "model.norm", config["hidden_size"]
    for number in range(config["num_hidden_layers"]):
        layer = f"model.layers.{number}"
        yield f"{layer}.input_layernorm", config["hidden_size"]
        yield f"{layer}.post_attention_layernorm", config["hidden_size"]
        if config["model_type"] != "llama":
            yield f"{layer}.self_attn.q_norm", config["head_dim"]
            yield f"{layer}.self_attn.k_norm", config["head_dim"]


def _shape(
    base: dict[str, Any],
    *,
    hidden: int,
    layers: int,
    inner: int,
    heads: tuple[int, int, int],
    vocab: int,
    context: int,
    bits: int | None = None,
    **more: Any,
) -> DummyShape:
    """Name the fields of a config; `heads` are those of queries, of keys, and their width."""
    num_heads, num_kv_heads, head_dim = heads
    sizes = {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": inner,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocab,
        "max_position_embeddings": context,
    }
    return DummyShape({**base, **sizes, **more}, bits)


#: Each as its publishers describe it, but for the tiny ones, which are for tests.
DUMMY_SHAPES: dict[str, DummyShape] = {
    "tiny": _shape(
        _LLAMA, hidden=64, layers=2, inner=128, heads=(4, 2, 16), vocab=1024, context=8192
    ),
    "tiny-wide": _shape(
        _LLAMA, hidden=64, layers=2, inner=128, heads=(4, 2, 16), vocab=49_152, context=8192
    ),
    "tiny-moe": _shape(
        _QWEN3_MOE,
        hidden=64,
        layers=2,
        inner=128,
        heads=(4, 2, 16),
        vocab=1024,
        context=8192,
        num_experts=8,
        num_experts_per_tok=4,
        moe_intermediate_size=64,
    ),
    "qwen3-0.6b-8bit": _shape(
        {**_QWEN3, "tie_word_embeddings": True},
        hidden=1024,
        layers=28,
        inner=3072,
        heads=(16, 8, 128),
        vocab=151_936,
        context=40_960,
        bits=8,
    ),
    "llama-3.2-3b-4bit": _shape(
        _LLAMA,
        hidden=3072,
        layers=28,
        inner=8192,
        heads=(24, 8, 128),
        vocab=128_256,
        context=131_072,
        bits=4,
    ),
    "qwen3-30b-a3b-4bit": _shape(
        _QWEN3_MOE,
        hidden=2048,
        layers=48,
        inner=6144,
        heads=(32, 4, 128),
        vocab=151_936,
        context=40_960,
        bits=4,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
    ),
}
