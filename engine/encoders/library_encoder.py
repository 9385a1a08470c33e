"""Embedding models of other families, computed by mlx-embeddings where that is installed.

The library is GPL-3.0 and so no part of the base install: the extra `embeddings` brings it, and it
is imported here only, in the engine process, when such a model is loaded.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from vllm_mlx.engine.config import DtypeName
from vllm_mlx.engine.encoders.token_batch import TokenBatch
from vllm_mlx.engine.errors import InvalidRequestError, ModelLoadError, UnsupportedModelError
from vllm_mlx.engine.platform import load_dtype

_LIBRARY = "mlx_embeddings"


class LibraryEncoder:
    """Compute a model of mlx-embeddings, which pools as the family does; the MLX thread only."""

    has_types = False

    def __init__(self, model: Any, fields: Mapping[str, Any], dtype: str) -> None:
        # Models of text and pictures keep what is of texts one level down.
        text = {**fields, **(fields.get("text_config") or {})}
        self.dtype = dtype
        self.vocab_size = int(text["vocab_size"])
        self.pad_token_id = int(text.get("pad_token_id") or 0)
        self.max_length = int(text["max_position_embeddings"])
        self._model = model
        self.num_bytes = sum(array.nbytes for array in _arrays(model))
        probe = TokenBatch(
            token_ids=mx.array([[1, 2]]),
            type_ids=mx.zeros((1, 2), mx.int32),
            mask=mx.ones((1, 2), mx.bool_),
            is_even=True,
        )
        self.num_dimensions = int(self.vectors(probe, 0, None).shape[1])

    def vectors(self, batch: TokenBatch, skipped: int, dimensions: int | None) -> mx.array:
        """Return `[rows, dimensions]`; see `TextEncoder`. A prompt cannot be left out here."""
        if skipped:
            raise InvalidRequestError(
                "this model's prompts are not pooled over, which its library cannot do",
                param="prompt_name",
            )
        output = self._model(batch.token_ids, attention_mask=batch.mask.astype(mx.int32))
        vectors: mx.array = output.text_embeds.astype(mx.float32)
        if dimensions is not None:
            vectors = vectors[:, :dimensions]
        return vectors / mx.maximum(mx.linalg.norm(vectors, axis=-1, keepdims=True), 1e-12)


def load_library_encoder(
    folder: Path, fields: Mapping[str, Any], dtype: DtypeName
) -> LibraryEncoder:
    """Load a model folder with mlx-embeddings; raise `ModelLoadError`, also where it is missing."""
    family = fields.get("model_type")
    if importlib.util.find_spec(_LIBRARY) is None:
        raise UnsupportedModelError(
            f"embedding models of the family {family!r} are computed by mlx-embeddings, which is "
            "GPL-3.0 and not installed: pip install 'vllm-mlx[embeddings]'. BERT, RoBERTa and "
            "XLM-RoBERTa need nothing more"
        )
    library = importlib.import_module(_LIBRARY)
    try:
        model, _ = library.load(str(folder), model_config=_rope_fields(fields))
    except Exception as error:  # the library raises whatever its parts do
        raise ModelLoadError(f"mlx-embeddings cannot load {folder}: {error}") from error
    stored = str(fields.get("dtype") or fields.get("torch_dtype") or "float32")
    wanted = load_dtype(dtype, stored)
    if not fields.get("quantization"):
        model.set_dtype(getattr(mx, wanted))
    mx.eval(_arrays(model))
    return LibraryEncoder(model, fields, wanted)


def _rope_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the base of rotary positions from where newer configs have it, unseen by the library.

    It would take its own default, and compute other vectors.
    """
    parameters = fields.get("rope_parameters")
    if "rope_theta" in fields or not isinstance(parameters, Mapping):
        return {}
    return {"rope_theta": parameters["rope_theta"]} if "rope_theta" in parameters else {}


def _arrays(model: Any) -> list[mx.array]:
    pairs: Any = tree_flatten(model.parameters())
    return [array for _, array in pairs]
