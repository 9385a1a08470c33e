"""JSON responses, and error responses in the words of the API that was called."""

from __future__ import annotations

from typing import Any

import msgspec
from quart import Response, request

from vllm_mlx.server.errors import ErrorReply
from vllm_mlx.server.request_context import current_context

_encoder = msgspec.json.Encoder()

#: What the paths of Anthropic's API begin with.
ANTHROPIC_PATHS = "/v1/messages"


def json_response(payload: Any, status: int = 200) -> Response:
    """Make a JSON response."""
    return Response(_encoder.encode(payload), status, content_type="application/json")


def error_response(reply: ErrorReply) -> Response:
    """Make an error response with OpenAI's body, which every route but Anthropic's speaks."""
    if request.path.startswith(ANTHROPIC_PATHS):
        body = reply.anthropic_body(current_context().id)
    else:
        body = reply.openai_body()
    response = json_response(body, reply.rule.status)
    response.headers.update(reply.headers())
    return response
