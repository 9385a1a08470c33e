"""Load an encoder from the weights of a folder, by the names that transformers gives them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import cast

import mlx.core as mx

from vllm_mlx.engine.config import DtypeName
from vllm_mlx.engine.encoders.architecture import EncoderShape
from vllm_mlx.engine.encoders.encoder import (
    Block,
    Classifier,
    Embeddings,
    Encoder,
    Norm,
    Product,
)
from vllm_mlx.engine.encoders.operations import Operations, operations_for
from vllm_mlx.engine.errors import ModelLoadError
from vllm_mlx.engine.models.resolve import weight_files
from vllm_mlx.engine.platform import load_dtype

#: What the names of an encoder's weights may begin with, by who saved them.
_PREFIX = re.compile(r"^(?:model\.)?(?:(?:bert|roberta)\.)?(?=embeddings\.|encoder\.|pooler\.)")

#: Of the head's two products: BERT's and RoBERTa's names.
_DENSE = ("pooler.dense", "classifier.dense")
_OUT = ("classifier", "classifier.out_proj")


class EncoderWeights:
    """Hand out the weights of one folder in one dtype; each is asked for by its name.

    Quantised weights are expanded: encoders are small, and on CPU their products are much faster
    so. Raises `ModelLoadError` for what is missing or of another shape.
    """

    def __init__(self, folder: Path, shape: EncoderShape, dtype: DtypeName) -> None:
        self._folder = folder
        self._shape = shape
        self.dtype = load_dtype(dtype, shape.checkpoint_dtype)
        self.num_bytes = 0
        self._stored: dict[str, mx.array] = {}
        for file in weight_files(folder):
            loaded = cast("dict[str, mx.array]", mx.load(str(file)))
            # Old files have the names of TensorFlow's layer norms.
            self._stored |= {
                re.sub(r"gamma$", "weight", re.sub(r"beta$", "bias", _PREFIX.sub("", name))): array
                for name, array in loaded.items()
            }

    def has(self, name: str) -> bool:
        """Say whether there is a weight of this name."""
        return name in self._stored

    def array(self, name: str, *shape: int) -> mx.array:
        """Return one weight, evaluated."""
        stored = self._stored.get(name)
        if stored is None:
            raise ModelLoadError(f"{self._folder} lacks the weight {name} of such a model")
        path = name.removesuffix(".weight")
        if f"{path}.scales" in self._stored and self._shape.quantization is not None:
            bits, group_size = self._shape.quantization
            stored = mx.dequantize(
                stored,
                self._stored[f"{path}.scales"],
                self._stored[f"{path}.biases"],
                group_size=group_size,
                bits=bits,
            )
        if stored.shape != shape:
            raise ModelLoadError(
                f"{self._folder}: the weight {name} has the shape {stored.shape}, not {shape}"
            )
        array = stored.astype(getattr(mx, self.dtype))
        mx.eval(array)
        self.num_bytes += array.nbytes
        return array

    def product(self, path: str, num_out: int, num_in: int) -> Product:
        """Return a linear layer."""
        weight = self.array(f"{path}.weight", num_out, num_in)
        return Product(weight, self.array(f"{path}.bias", num_out))

    def norm(self, path: str) -> Norm:
        """Return a layer norm over hidden states."""
        size = self._shape.hidden_size
        weight, bias = self.array(f"{path}.weight", size), self.array(f"{path}.bias", size)
        return Norm(weight, bias, self._shape.layer_norm_eps)


def build_encoder(weights: EncoderWeights, shape: EncoderShape) -> Encoder:
    """Return the encoder of a folder; raise `ModelLoadError`."""
    size = shape.hidden_size
    embeddings = Embeddings(
        words=weights.array("embeddings.word_embeddings.weight", shape.vocab_size, size),
        positions=weights.array("embeddings.position_embeddings.weight", shape.num_positions, size),
        types=weights.array("embeddings.token_type_embeddings.weight", shape.num_token_types, size),
        norm=weights.norm("embeddings.LayerNorm"),
        first_position=shape.pad_token_id + 1 if shape.is_roberta else 0,
    )
    operations = operations_for(shape.hidden_act)
    blocks = [_block(weights, shape, number, operations) for number in range(shape.num_layers)]
    return Encoder(embeddings, tuple(blocks))


def build_classifier(weights: EncoderWeights, shape: EncoderShape) -> Classifier:
    """Return the sequence classifier of a folder; raise `ModelLoadError`."""
    size, is_roberta = shape.hidden_size, shape.is_roberta
    return Classifier(
        encoder=build_encoder(weights, shape),
        dense=weights.product(_DENSE[is_roberta], size, size),
        out=weights.product(_OUT[is_roberta], shape.num_labels, size),
    )


def _block(
    weights: EncoderWeights,
    shape: EncoderShape,
    number: int,
    operations: Operations,
) -> Block:
    path, size = f"encoder.layer.{number}", shape.hidden_size
    parts = [
        weights.product(f"{path}.attention.self.{name}", size, size)
        for name in ("query", "key", "value")
    ]
    qkv = Product(
        mx.concatenate([part.weight for part in parts]),
        mx.concatenate([part.bias for part in parts]),
    )
    mx.eval(qkv.weight, qkv.bias)
    return Block(
        qkv=qkv,
        out=weights.product(f"{path}.attention.output.dense", size, size),
        attention_norm=weights.norm(f"{path}.attention.output.LayerNorm"),
        up=weights.product(f"{path}.intermediate.dense", shape.intermediate_size, size),
        down=weights.product(f"{path}.output.dense", size, shape.intermediate_size),
        norm=weights.norm(f"{path}.output.LayerNorm"),
        num_heads=shape.num_heads,
        operations=operations,
    )


def read_arrays(file: Path) -> Mapping[str, mx.array]:
    """Return the arrays of one safetensors file."""
    return cast("dict[str, mx.array]", mx.load(str(file)))
