"""What the OpenAI routes share on the way in: read, check, and name what was ignored."""

from __future__ import annotations

from typing import TypeVar

from quart import request

from vllm_mlx.engine.errors import InvalidRequestError
from vllm_mlx.server.openai.body_limits import LARGE_BODY_BYTES
from vllm_mlx.server.openai.fields import POLICIES, Policies, unknown_fields
from vllm_mlx.server.openai.schemas import Body, GenerationBody
from vllm_mlx.server.openai.translate import Limits
from vllm_mlx.server.openai.validation import BYTE_ORDER_MARK, decode_object, validate
from vllm_mlx.server.request_context import current_context
from vllm_mlx.server.runtime import ServerRuntime
from vllm_mlx.server.served_model import ServedModel

BodyT = TypeVar("BodyT", bound=Body)


async def read_body(
    runtime: ServerRuntime, schema: type[BodyT], policies: Policies = POLICIES
) -> BodyT:
    """Read and check the body of the request at hand; raise `InvalidRequestError`.

    A large one is checked on a thread, where it delays no stream. What is accepted is recorded or
    logged, if that is asked for.
    """
    raw = await request.get_data(cache=False, as_text=False, parse_form_data=False)
    raw = raw.removeprefix(BYTE_ORDER_MARK)
    if len(raw) <= LARGE_BODY_BYTES:
        body, names = _checked(schema, raw, policies)
    else:
        body, names = await runtime.run_aside(lambda: _checked(schema, raw, policies))
    if names:
        current_context().ignored_fields = runtime.unknown_fields.record(names)
    runtime.accepted(current_context().id, request.path, raw)
    return body


def _checked(schema: type[BodyT], raw: bytes, policies: Policies) -> tuple[BodyT, list[str]]:
    """Return the body and the names of its unknown fields; pure, for any thread."""
    body = validate(schema, decode_object(raw), policies)
    return body, unknown_fields(body)


def check_streaming(body: GenerationBody) -> bool:
    """Return whether the stream is to end with usage; refuse stream options without a stream."""
    if body.stream_options is None:
        return False
    if not body.stream:
        raise InvalidRequestError(
            "stream_options is only allowed when stream is true", param="stream_options"
        )
    return bool(body.stream_options.include_usage)


def limits_of(runtime: ServerRuntime, served: ServedModel) -> Limits:
    """Return the limits and defaults that hold for `served`."""
    return Limits.of(runtime.config, served.info, served.tokenizers.vocab_size)


def row_ids(request_id: str, num_rows: int) -> list[str]:
    """Return the ids of one request's rows: the client's own, with a number where it has more."""
    if num_rows == 1:
        return [request_id]
    return [f"{request_id}-{index}" for index in range(num_rows)]
