"""Declare the engine kinds `embedding` and `rerank`: what their processes are told and answer."""

from __future__ import annotations

import msgspec

from vllm_mlx.engine.config import DtypeName
from vllm_mlx.engine.host.service import ServiceKind


class EncoderConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Say which encoder to load and how."""

    #: A local folder, or a hub repository.
    model: str
    #: `auto` is float32 on CPU, and elsewhere the checkpoint's own.
    dtype: DtypeName = "auto"
    trust_remote_code: bool = False
    #: Never reach for the network.
    offline: bool = False
    #: Longest text in tokens, special ones included; None takes what the model says.
    max_length: int | None = None


class EmbedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Ask for the vectors of some texts, or of some token lists."""

    texts: tuple[str, ...] = ()
    #: In place of texts: ids of the model's own vocabulary, special ones included, as
    #: little-endian int32 each.
    tokens: tuple[bytes, ...] = ()
    #: One of the model's prompts, put before each text; None takes the model's default.
    prompt_name: str | None = None
    #: Cut what is too long; otherwise it is an error.
    truncate: bool = False
    #: Cut every text to so many tokens, whatever `truncate` says; None leaves it to the model.
    max_tokens: int | None = None
    #: Keep so many numbers of each vector; None keeps all.
    dimensions: int | None = None


class EmbedPart(msgspec.Struct, frozen=True, kw_only=True):
    """Carry the vectors of some of the texts, each of length 1."""

    #: Which of the request's texts these are, in the order of `vectors`.
    indices: tuple[int, ...]
    #: Little-endian float32, one row a text.
    vectors: bytes
    num_tokens: int
    num_truncated: int = 0


class RerankRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Ask how well each document answers the query."""

    query: str
    documents: tuple[str, ...]
    #: Cut each document to so many tokens first; None cuts only what is too long for the model.
    max_tokens_per_document: int | None = None


class RerankPart(msgspec.Struct, frozen=True, kw_only=True):
    """Carry the scores of some of the documents."""

    indices: tuple[int, ...]
    #: The model's own scores, and the same between 0 and 1.
    logits: tuple[float, ...]
    relevance: tuple[float, ...]
    num_tokens: int
    num_truncated: int = 0


EMBEDDING: ServiceKind[EncoderConfig, EmbedRequest, EmbedPart] = ServiceKind(
    name="embedding",
    reference="vllm_mlx.engine.encoders.kinds:EMBEDDING",
    loader="vllm_mlx.engine.encoders.embedding_service:load_embedding",
    config_type=EncoderConfig,
    request_type=EmbedRequest,
    part_type=EmbedPart,
)

RERANK: ServiceKind[EncoderConfig, RerankRequest, RerankPart] = ServiceKind(
    name="rerank",
    reference="vllm_mlx.engine.encoders.kinds:RERANK",
    loader="vllm_mlx.engine.encoders.rerank_service:load_rerank",
    config_type=EncoderConfig,
    request_type=RerankRequest,
    part_type=RerankPart,
)
