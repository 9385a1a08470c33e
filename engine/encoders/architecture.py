"""Read the shape of a BERT-like encoder off its config.json, and refuse what is not computed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_mlx.engine.errors import ModelLoadError, UnsupportedModelError

#: By `hidden_act`: which function of `encoder.py` computes it.
ACTIVATIONS: Mapping[str, str] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}

#: Families of one shape: positions of the second kind count from behind the padding id.
BERT_TYPES = frozenset({"bert"})
ROBERTA_TYPES = frozenset({"roberta", "xlm-roberta", "camembert"})


@dataclass(frozen=True)
class EncoderShape:
    """Hold what decides the computation of one encoder."""

    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    #: A key of `ACTIVATIONS`.
    hidden_act: str
    num_positions: int
    num_token_types: int
    layer_norm_eps: float
    pad_token_id: int
    num_labels: int
    #: Bits and group size of quantised weights; None for plain ones.
    quantization: tuple[int, int] | None
    checkpoint_dtype: str

    @property
    def is_roberta(self) -> bool:
        """Say whether positions count from behind the padding id, and the head is RoBERTa's."""
        return self.model_type in ROBERTA_TYPES

    @property
    def max_length(self) -> int:
        """Return the longest text in tokens that has positions."""
        return self.num_positions - (self.pad_token_id + 1 if self.is_roberta else 0)

    @property
    def head_size(self) -> int:
        """Return the numbers of one attention head."""
        return self.hidden_size // self.num_heads


def read_config(folder: Path) -> dict[str, Any]:
    """Return the object in config.json; raise `ModelLoadError`."""
    file = folder / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{file} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise ModelLoadError(f"{file} is no JSON object")
    return config


def is_own_family(config: Mapping[str, Any]) -> bool:
    """Say whether this encoder computes models of the config's family."""
    return config.get("model_type") in BERT_TYPES | ROBERTA_TYPES


def encoder_shape(config: Mapping[str, Any]) -> EncoderShape:
    """Return the shape; raise `UnsupportedModelError` for what would be computed wrongly."""
    model_type = config.get("model_type")
    if not is_own_family(config):
        known = ", ".join(sorted(BERT_TYPES | ROBERTA_TYPES))
        raise UnsupportedModelError(
            f"model_type {model_type!r} is no encoder that is computed here ({known})"
        )
    activation = config.get("hidden_act", "gelu")
    if activation not in ACTIVATIONS:
        raise UnsupportedModelError(
            f"hidden_act {activation!r} is not computed here: the model needs an adapter of its "
            f"own; known are {', '.join(ACTIVATIONS)}"
        )
    positions = config.get("position_embedding_type") or "absolute"
    if positions != "absolute":
        raise UnsupportedModelError(f"position_embedding_type {positions!r} is not computed here")
    for name in ("is_decoder", "add_cross_attention"):
        if config.get(name):
            raise UnsupportedModelError(f"{name} makes it another model than an encoder")
    try:
        return _shape(config, str(model_type), activation)
    except (KeyError, TypeError, ValueError) as error:
        raise ModelLoadError(f"config.json lacks what an encoder needs: {error!r}") from error


def _shape(config: Mapping[str, Any], model_type: str, activation: str) -> EncoderShape:
    labels = config.get("id2label")
    quantization = config.get("quantization")
    shape = EncoderShape(
        model_type=model_type,
        vocab_size=int(config["vocab_size"]),
        hidden_size=int(config["hidden_size"]),
        num_layers=int(config["num_hidden_layers"]),
        num_heads=int(config["num_attention_heads"]),
        intermediate_size=int(config["intermediate_size"]),
        hidden_act=activation,
        num_positions=int(config["max_position_embeddings"]),
        num_token_types=int(config.get("type_vocab_size", 2)),
        layer_norm_eps=float(config.get("layer_norm_eps", 1e-12)),
        pad_token_id=int(config.get("pad_token_id") or (model_type in ROBERTA_TYPES)),
        num_labels=len(labels) if labels is not None else int(config.get("num_labels", 2)),
        quantization=(
            (int(quantization["bits"]), int(quantization["group_size"])) if quantization else None
        ),
        checkpoint_dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
    )
    if shape.hidden_size % shape.num_heads:
        raise ValueError(f"{shape.hidden_size} numbers do not divide into {shape.num_heads} heads")
    return shape
