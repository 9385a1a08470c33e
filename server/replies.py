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


def wants_anthropic() -> bool:
    """Say whether the request at hand is one of Anthropic's API: by its path, or by its client."""
    return request.path.startswith(ANTHROPIC_PATHS) or "anthropic-version" in request.headers


def json_response(payload: Any, status: int = 200) -> Response:
    """Make a JSON response."""
    return Response(_encoder.encode(payload), status, content_type="application/json")


def error_response(reply: ErrorReply) -> Response:
    """Make an error response with OpenAI's body, or with Anthropic's for those who speak that."""
    is_anthropic = wants_anthropic()
    body = reply.anthropic_body(current_context().id) if is_anthropic else reply.openai_body()
    response = json_response(body, reply.rule.status)
    response.headers.update(reply.headers())
    return response
