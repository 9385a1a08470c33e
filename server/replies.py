"""JSON responses, and error responses in the words of the API that was called."""

from __future__ import annotations

from typing import Any

import msgspec
from quart import Response

from vllm_mlx.server.errors import ErrorReply

_encoder = msgspec.json.Encoder()


def json_response(payload: Any, status: int = 200) -> Response:
    """Make a JSON response."""
    return Response(_encoder.encode(payload), status, content_type="application/json")


def error_response(reply: ErrorReply) -> Response:
    """Make an error response with OpenAI's body, which every route but Anthropic's speaks."""
    response = json_response(reply.openai_body(), reply.rule.status)
    response.headers.update(reply.headers())
    return response
