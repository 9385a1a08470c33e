"""The request bodies of embeddings and reranking, every field that clients are known to send."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from vllm_mlx.server.openai.schemas import MAX_TOKEN_ID, Body

#: Most texts of one request, as in OpenAI's API.
MAX_INPUTS = 2048


class EmbeddingsBody(Body):
    """Hold the body of `POST /v1/embeddings`; `input` is told apart in `embeddings.py`."""

    input: Any
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(None, ge=1)
    prompt_name: str | None = None
    #: -1 is the longest text of the model.
    truncate_prompt_tokens: int | None = Field(None, ge=-1, le=MAX_TOKEN_ID)
    # Refused until a build supports them.
    add_special_tokens: bool | None = None
    normalize: bool | None = None
    priority: int | None = None
    # Without effect here.
    user: str | None = None


class RerankBody(Body):
    """Hold the body of `POST /v1/rerank`, in the forms of Cohere's and Jina's APIs."""

    query: str
    documents: Annotated[list[str | dict[str, Any]], Field(fail_fast=True)] = Field(
        min_length=1, max_length=MAX_INPUTS
    )
    model: str | None = None
    top_n: int | None = Field(None, ge=1)
    return_documents: bool | None = None
    max_tokens_per_doc: int | None = Field(None, ge=1)
    rank_fields: list[str] | None = Field(None, min_length=1)
    # Refused until a build supports them.
    max_chunks_per_doc: int | None = None
    return_embeddings: bool | None = None
    priority: int | None = None
    # Without effect here.
    user: str | None = None
