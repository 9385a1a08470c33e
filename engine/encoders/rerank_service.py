"""The service behind `/v1/rerank`: a sequence classifier with one label, over pairs of texts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import mlx.core as mx
import numpy as np

from vllm_mlx.engine.config import ModelConfig
from vllm_mlx.engine.encoders.architecture import EncoderShape, encoder_shape, read_config
from vllm_mlx.engine.encoders.batches import batches
from vllm_mlx.engine.encoders.encoder import Classifier
from vllm_mlx.engine.encoders.kinds import EncoderConfig, RerankPart, RerankRequest
from vllm_mlx.engine.encoders.limits import length_limit
from vllm_mlx.engine.encoders.operations import limit_cache
from vllm_mlx.engine.encoders.sentence_folder import read_sentence_settings
from vllm_mlx.engine.encoders.token_batch import token_batch
from vllm_mlx.engine.encoders.tokenizing import (
    EncodedText,
    EncoderTokenizer,
    load_encoder_tokenizer,
)
from vllm_mlx.engine.encoders.weights import EncoderWeights, build_classifier
from vllm_mlx.engine.errors import UnsupportedModelError
from vllm_mlx.engine.host.messages import ServiceInfo
from vllm_mlx.engine.host.service import ProgressCallback
from vllm_mlx.engine.models.resolve import resolve_model
from vllm_mlx.engine.platform import device_name


class RerankService:
    """Answer with scores of documents; the MLX thread only. Made by `load_rerank`."""

    def __init__(
        self,
        classifier: Classifier,
        tokenizer: EncoderTokenizer,
        shape: EncoderShape,
        info: ServiceInfo,
        max_length: int,
    ) -> None:
        self.info = info
        self._classifier = classifier
        self._tokenizer = tokenizer
        self._shape = shape
        self._max_length = max_length

    def handle(self, request: RerankRequest) -> Iterator[RerankPart]:
        """Yield the scores of one batch of like lengths after another.

        A pair that is too long is cut, its longer text first, as the models were trained.
        """
        limit = request.max_tokens_per_document
        documents = request.documents
        shortened = [False] * len(documents)
        if limit is not None:
            short = [self._tokenizer.shorten(document, limit) for document in documents]
            shortened = [len(new) < len(old) for new, old in zip(short, documents, strict=True)]
            documents = tuple(short)
        pairs = [(request.query, document) for document in documents]
        encoded = self._tokenizer.encode_pairs(pairs, self._max_length)
        for indices in batches([len(pair.token_ids) for pair in encoded]):
            yield self._part(encoded, indices, shortened)

    def close(self) -> None:
        """Have nothing that must be freed in order."""

    def _part(
        self, encoded: Sequence[EncodedText], indices: Sequence[int], shortened: Sequence[bool]
    ) -> RerankPart:
        chosen = [encoded[index] for index in indices]
        batch = token_batch(
            chosen,
            pad_token_id=self._shape.pad_token_id,
            has_types=self._shape.num_token_types > 1,
        )
        scores = self._classifier(batch)[:, 0].astype(mx.float32)
        logits: list[float] = np.asarray(scores).tolist()
        return RerankPart(
            indices=tuple(indices),
            logits=tuple(logits),
            relevance=tuple(map(_sigmoid, logits)),
            num_tokens=sum(len(pair.token_ids) for pair in chosen),
            num_truncated=sum(encoded[index].is_cut or shortened[index] for index in indices),
        )


def load_rerank(config: EncoderConfig, on_progress: ProgressCallback) -> RerankService:
    """Load the model of a rerank service; raise `ModelLoadError`."""
    folder = resolve_model(
        ModelConfig(
            model=config.model, trust_remote_code=config.trust_remote_code, offline=config.offline
        ),
        on_progress,
    )
    shape = encoder_shape(read_config(folder))
    if shape.num_labels != 1:
        raise UnsupportedModelError(
            f"{config.model} tells {shape.num_labels} labels apart; a reranker scores one"
        )
    settings = read_sentence_settings(folder)
    on_progress("loading weights", None)
    tokenizer = load_encoder_tokenizer(folder, lowercases=settings.lowercases)
    weights = EncoderWeights(folder, shape, config.dtype)
    classifier = build_classifier(weights, shape)
    max_length = length_limit(shape.max_length, settings.max_length, config.max_length)
    info = ServiceInfo(
        model=config.model,
        path=str(folder),
        model_type=shape.model_type,
        dtype=weights.dtype,
        weights_bytes=weights.num_bytes,
        device=device_name(),
        details={"max_model_len": max_length},
    )
    limit_cache()
    service = RerankService(classifier, tokenizer, shape, info, max_length)
    on_progress("warming up", None)
    # MLX compiles its kernels now, not while the first client waits; two lengths need a mask.
    for _ in service.handle(RerankRequest(query="warm", documents=("up", "up the kernels"))):
        pass
    return service


def _sigmoid(score: float) -> float:
    """Return 1 / (1 + exp(-score)) without overflow."""
    if score >= 0:
        return 1.0 / (1.0 + math.exp(-score))
    power = math.exp(score)
    return power / (1.0 + power)
