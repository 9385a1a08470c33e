"""The service behind `/v1/embeddings`: an encoder, its tokenizer and its pooling."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import mlx.core as mx
import numpy as np

from vllm_mlx.engine.config import ModelConfig
from vllm_mlx.engine.core.outputs import unpack_tokens
from vllm_mlx.engine.encoders.architecture import (
    EncoderShape,
    encoder_shape,
    is_own_family,
    read_config,
)
from vllm_mlx.engine.encoders.batches import batches
from vllm_mlx.engine.encoders.encoder import Encoder
from vllm_mlx.engine.encoders.kinds import EmbedPart, EmbedRequest, EncoderConfig
from vllm_mlx.engine.encoders.limits import check_length, length_limit
from vllm_mlx.engine.encoders.operations import limit_cache
from vllm_mlx.engine.encoders.pooling import Pooler
from vllm_mlx.engine.encoders.sentence_folder import SentenceSettings, read_sentence_settings
from vllm_mlx.engine.encoders.token_batch import TokenBatch, token_batch
from vllm_mlx.engine.encoders.tokenizing import (
    EncodedText,
    EncoderTokenizer,
    load_encoder_tokenizer,
)
from vllm_mlx.engine.encoders.weights import EncoderWeights, build_encoder
from vllm_mlx.engine.errors import InvalidRequestError
from vllm_mlx.engine.host.messages import ServiceInfo
from vllm_mlx.engine.host.service import ProgressCallback
from vllm_mlx.engine.models.resolve import resolve_model
from vllm_mlx.engine.platform import device_name


class TextEncoder(Protocol):
    """Name what the service needs of a model; the MLX thread only."""

    vocab_size: int
    pad_token_id: int
    #: Whether it tells first and second texts apart.
    has_types: bool
    num_dimensions: int

    def vectors(self, batch: TokenBatch, skipped: int, dimensions: int | None) -> mx.array:
        """Return `[rows, dimensions]` in float32, of length 1; None for all dimensions.

        A row's first `skipped` tokens are not pooled over.
        """
        ...


class OwnEncoder:
    """Compute an encoder of our own, and pool as its folder says."""

    def __init__(self, encoder: Encoder, pooler: Pooler, shape: EncoderShape) -> None:
        self.vocab_size = shape.vocab_size
        self.pad_token_id = shape.pad_token_id
        self.has_types = shape.num_token_types > 1
        self.num_dimensions = pooler.num_dimensions(shape.hidden_size)
        self._encoder = encoder
        self._pooler = pooler

    def vectors(self, batch: TokenBatch, skipped: int, dimensions: int | None) -> mx.array:
        """Return `[rows, dimensions]`; see `TextEncoder`."""
        return self._pooler(self._encoder(batch), batch.mask, skipped, dimensions)


class EmbeddingService:
    """Answer with the vectors of texts; the MLX thread only. Made by `load_embedding`."""

    def __init__(
        self,
        encoder: TextEncoder,
        tokenizer: EncoderTokenizer,
        settings: SentenceSettings,
        info: ServiceInfo,
        max_length: int,
    ) -> None:
        self.info = info
        self._encoder = encoder
        self._tokenizer = tokenizer
        self._settings = settings
        self._max_length = max_length

    def handle(self, request: EmbedRequest) -> Iterator[EmbedPart]:
        """Yield the vectors of one batch of like lengths after another.

        Raises `InvalidRequestError` that names the input at fault.
        """
        self._check(request)
        prompt = self._prompt(request)
        texts = self._encoded(request, prompt)
        skipped = 0
        if prompt and not self._settings.pools_prompt:
            skipped = self._tokenizer.num_prompt_tokens(prompt)
        for indices in batches([len(text.token_ids) for text in texts]):
            yield self._part(texts, indices, skipped, request.dimensions)

    def close(self) -> None:
        """Have nothing that must be freed in order."""

    def _check(self, request: EmbedRequest) -> None:
        wanted, most = request.dimensions, self._encoder.num_dimensions
        if wanted is not None and wanted > most:
            raise InvalidRequestError(
                f"dimensions is {wanted}, but the model's vectors have {most}", param="dimensions"
            )

    def _prompt(self, request: EmbedRequest) -> str:
        name = request.prompt_name
        if name is None:
            name = self._settings.default_prompt
        if name is None or request.tokens:
            return ""
        if name not in self._settings.prompts:
            known = ", ".join(map(repr, self._settings.prompts)) or "none"
            raise InvalidRequestError(
                f"the model has no prompt {name!r}; it has {known}", param="prompt_name"
            )
        return self._settings.prompts[name]

    def _encoded(self, request: EmbedRequest, prompt: str) -> list[EncodedText]:
        limit = self._max_length
        if request.max_tokens is not None:
            limit = min(limit, request.max_tokens)
        is_cut = request.truncate or request.max_tokens is not None
        if request.tokens:
            texts = [self._given(packed, limit if is_cut else None) for packed in request.tokens]
        else:
            given = [prompt + text for text in request.texts]
            texts = self._tokenizer.encode(given, limit if is_cut else None)
        for index, text in enumerate(texts):
            check_length(len(text.token_ids), self._max_length, f"input[{index}]")
        return texts

    def _given(self, packed: bytes, limit: int | None) -> EncodedText:
        tokens = unpack_tokens(packed)
        highest = max(tokens)
        if highest >= self._encoder.vocab_size:
            raise InvalidRequestError(
                f"input has the token {highest}, but the vocabulary ends at "
                f"{self._encoder.vocab_size - 1}",
                param="input",
            )
        return EncodedText(tokens[:limit], [0] * len(tokens[:limit]), len(tokens))

    def _part(
        self,
        texts: Sequence[EncodedText],
        indices: Sequence[int],
        skipped: int,
        dimensions: int | None,
    ) -> EmbedPart:
        chosen = [texts[index] for index in indices]
        batch = token_batch(
            chosen,
            pad_token_id=self._encoder.pad_token_id,
            has_types=self._encoder.has_types,
        )
        vectors = self._encoder.vectors(batch, skipped, dimensions)
        return EmbedPart(
            indices=tuple(indices),
            vectors=np.asarray(vectors).astype("<f4", copy=False).tobytes(),
            num_tokens=sum(len(text.token_ids) for text in chosen),
            num_truncated=sum(text.is_cut for text in chosen),
        )


def load_embedding(config: EncoderConfig, on_progress: ProgressCallback) -> EmbeddingService:
    """Load the model of an embedding service; raise `ModelLoadError`.

    A model of another family than our encoder's is computed by mlx-embeddings.
    """
    folder = resolve_model(
        ModelConfig(
            model=config.model, trust_remote_code=config.trust_remote_code, offline=config.offline
        ),
        on_progress,
    )
    fields = read_config(folder)
    settings = read_sentence_settings(folder)
    on_progress("loading weights", None)
    if is_own_family(fields):
        service = _own_service(config, folder, encoder_shape(fields), settings)
    else:
        service = _library_service(config, folder, fields, settings)
    limit_cache()
    on_progress("warming up", None)
    # MLX compiles its kernels now, not while the first client waits; two lengths need a mask.
    for _ in service.handle(EmbedRequest(texts=("warm", "warm up the kernels"), truncate=True)):
        pass
    return service


def _own_service(
    config: EncoderConfig, folder: Path, shape: EncoderShape, settings: SentenceSettings
) -> EmbeddingService:
    tokenizer = load_encoder_tokenizer(folder, lowercases=settings.lowercases)
    weights = EncoderWeights(folder, shape, config.dtype)
    encoder = build_encoder(weights, shape)
    own = OwnEncoder(encoder, Pooler(settings, weights.dtype), shape)
    max_length = length_limit(shape.max_length, settings.max_length, config.max_length)
    info = ServiceInfo(
        model=config.model,
        path=str(folder),
        model_type=shape.model_type,
        dtype=weights.dtype,
        weights_bytes=weights.num_bytes,
        device=device_name(),
        details={
            "max_model_len": max_length,
            "dimensions": own.num_dimensions,
            "pooling": "+".join(settings.pooling),
            "prompts": list(settings.prompts),
        },
    )
    return EmbeddingService(own, tokenizer, settings, info, max_length)


def _library_service(
    config: EncoderConfig, folder: Path, fields: dict[str, Any], settings: SentenceSettings
) -> EmbeddingService:
    from vllm_mlx.engine.encoders.library_encoder import load_library_encoder

    tokenizer = load_encoder_tokenizer(folder, lowercases=settings.lowercases)
    encoder = load_library_encoder(folder, fields, config.dtype)
    max_length = length_limit(encoder.max_length, settings.max_length, config.max_length)
    info = ServiceInfo(
        model=config.model,
        path=str(folder),
        model_type=str(fields.get("model_type")),
        dtype=encoder.dtype,
        weights_bytes=encoder.num_bytes,
        device=device_name(),
        details={
            "max_model_len": max_length,
            "dimensions": encoder.num_dimensions,
            "prompts": list(settings.prompts),
        },
    )
    return EmbeddingService(encoder, tokenizer, settings, info, max_length)
