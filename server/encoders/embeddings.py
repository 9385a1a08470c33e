"""`POST /v1/embeddings`: vectors of texts, in OpenAI's form."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from quart import Response

from vllm_mlx.engine.core.outputs import pack_tokens
from vllm_mlx.engine.encoders.kinds import EMBEDDING, EmbedPart, EmbedRequest
from vllm_mlx.engine.errors import InvalidRequestError
from vllm_mlx.server.encoders.fields import POLICIES
from vllm_mlx.server.encoders.schemas import MAX_INPUTS, EmbeddingsBody
from vllm_mlx.server.openai.intake import read_body
from vllm_mlx.server.openai.schemas import MAX_TOKEN_ID
from vllm_mlx.server.request_context import current_context
from vllm_mlx.server.runtime import ServerRuntime


class EmbeddingRoute:
    """Answer with the vectors of one text or many."""

    def __init__(self, runtime: ServerRuntime) -> None:
        self._runtime = runtime

    async def create(self) -> Response:
        """Turn texts into vectors of length 1."""
        runtime = self._runtime
        body = await read_body(runtime, EmbeddingsBody, POLICIES)
        service = runtime.services.find(EMBEDDING.name, body.model)
        request = await runtime.run_aside(
            lambda: embed_request(body, truncates=runtime.config.truncates_embeddings)
        )
        call = await service.start_call(current_context(), request)
        parts: list[EmbedPart] = await call.collect()
        service.count_tokens(
            sum(part.num_tokens for part in parts), sum(part.num_truncated for part in parts)
        )
        name = body.model or service.names.primary
        as_base64 = body.encoding_format == "base64"
        # A million numbers take the time of several tokens to write.
        text = await runtime.run_aside(lambda: answer(parts, name, as_base64=as_base64))
        return Response(text, content_type="application/json")


def embed_request(body: EmbeddingsBody, *, truncates: bool) -> EmbedRequest:
    """Return what the body asks; raise `InvalidRequestError` for an input that is none."""
    texts, tokens = _inputs(body.input)
    asked = body.truncate_prompt_tokens
    if asked == 0:
        raise InvalidRequestError(
            "truncate_prompt_tokens must be -1 or at least 1", param="truncate_prompt_tokens"
        )
    return EmbedRequest(
        texts=texts,
        tokens=tokens,
        prompt_name=body.prompt_name,
        truncate=truncates or asked == -1,
        max_tokens=asked if asked is not None and asked > 0 else None,
        dimensions=body.dimensions,
    )


def answer(parts: Sequence[EmbedPart], model: str, *, as_base64: bool) -> bytes:
    """Return the JSON of an answer; pure, for any thread."""
    found: dict[int, Any] = {}
    for part in parts:
        rows = np.frombuffer(part.vectors, "<f4").reshape(len(part.indices), -1)
        for index, row in zip(part.indices, rows, strict=True):
            vector = base64.b64encode(row.tobytes()).decode() if as_base64 else row.tolist()
            found[index] = {"object": "embedding", "index": index, "embedding": vector}
    num_tokens = sum(part.num_tokens for part in parts)
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    num_truncated = sum(part.num_truncated for part in parts)
    if num_truncated:
        usage["truncated_inputs"] = num_truncated
    data = [found[index] for index in range(len(found))]
    return msgspec.json.encode({"object": "list", "data": data, "model": model, "usage": usage})


def _inputs(given: Any) -> tuple[tuple[str, ...], tuple[bytes, ...]]:
    """Return the texts or the token lists of an input; raise `InvalidRequestError`."""
    if isinstance(given, str):
        return (given,), ()
    if not isinstance(given, list) or not given:
        raise InvalidRequestError(
            "input must be a text, a list of texts, token ids, or a list of those, and not empty",
            param="input",
        )
    if type(given[0]) is int:
        return (), (_tokens(given, "input"),)
    if len(given) > MAX_INPUTS:
        raise InvalidRequestError(
            f"input has {len(given)} entries; at most {MAX_INPUTS} are accepted", param="input"
        )
    if isinstance(given[0], str):
        for index, text in enumerate(given):
            if not isinstance(text, str):
                raise _mixed(index)
        return tuple(given), ()
    return (), tuple(_tokens(tokens, f"input[{index}]") for index, tokens in enumerate(given))


def _tokens(given: Any, where: str) -> bytes:
    if not isinstance(given, list) or not given:
        raise InvalidRequestError(f"{where} must be a list of token ids, not empty", param=where)
    for index, token in enumerate(given):
        if type(token) is not int or not 0 <= token <= MAX_TOKEN_ID:
            raise InvalidRequestError(f"{where}[{index}] is no token id", param=f"{where}[{index}]")
    return pack_tokens(given)


def _mixed(index: int) -> InvalidRequestError:
    return InvalidRequestError(
        f"input[{index}] is no text, as the entries before it are", param=f"input[{index}]"
    )
