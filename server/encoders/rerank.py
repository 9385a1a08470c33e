"""`POST /v1/rerank`: documents in the order in which they answer a query.

The body and the answer are what clients of Cohere's and Jina's APIs send and read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quart import Response

from vllm_mlx.engine.encoders.kinds import RERANK, RerankPart, RerankRequest
from vllm_mlx.engine.errors import InvalidRequestError
from vllm_mlx.server.encoders.fields import POLICIES
from vllm_mlx.server.encoders.schemas import RerankBody
from vllm_mlx.server.openai.intake import read_body
from vllm_mlx.server.replies import json_response
from vllm_mlx.server.request_context import current_context
from vllm_mlx.server.runtime import ServerRuntime

Document = str | dict[str, Any]


class RerankRoute:
    """Score documents against a query."""

    def __init__(self, runtime: ServerRuntime) -> None:
        self._runtime = runtime

    async def create(self) -> Response:
        """Put documents in the order in which they answer a query."""
        body = await read_body(self._runtime, RerankBody, POLICIES)
        service = self._runtime.services.find(RERANK.name, body.model)
        request = RerankRequest(
            query=body.query,
            documents=tuple(
                _text(document, index, body.rank_fields)
                for index, document in enumerate(body.documents)
            ),
            max_tokens_per_document=body.max_tokens_per_doc,
        )
        context = current_context()
        call = await service.start_call(context, request)
        parts: list[RerankPart] = await call.collect()
        service.count_tokens(
            sum(part.num_tokens for part in parts), sum(part.num_truncated for part in parts)
        )
        return json_response(
            {
                "id": context.id,
                "object": "list",
                "model": body.model or service.names.primary,
                "results": _results(body, parts),
                "usage": _usage(parts),
            }
        )


def _text(document: Document, index: int, fields: Sequence[str] | None) -> str:
    """Return what is scored of a document; raise `InvalidRequestError` where there is none."""
    if isinstance(document, str):
        return document
    texts = []
    for name in fields or ("text",):
        text = document.get(name)
        if not isinstance(text, str):
            where = f"documents[{index}].{name}"
            raise InvalidRequestError(f"{where} must be a text", param=where)
        texts.append(text)
    return "\n".join(texts)


def _results(body: RerankBody, parts: Sequence[RerankPart]) -> list[dict[str, Any]]:
    """Return the best documents first; equals stay in the order in which they came."""
    scored = [
        (index, logit, relevance)
        for part in parts
        for index, logit, relevance in zip(part.indices, part.logits, part.relevance, strict=True)
    ]
    scored.sort(key=lambda entry: (-entry[1], entry[0]))
    results = []
    for index, _, relevance in scored[: body.top_n]:
        result: dict[str, Any] = {"index": index, "relevance_score": relevance}
        if body.return_documents is not False:
            document = body.documents[index]
            result["document"] = {"text": document} if isinstance(document, str) else document
        results.append(result)
    return results


def _usage(parts: Sequence[RerankPart]) -> dict[str, int]:
    num_tokens = sum(part.num_tokens for part in parts)
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    num_truncated = sum(part.num_truncated for part in parts)
    if num_truncated:
        usage["truncated_documents"] = num_truncated
    return usage
