"""One HTTP request's identity: its id, what the log says of it, and what must end with it."""

from __future__ import annotations

import uuid
from contextlib import AsyncExitStack
from typing import cast

from quart import request

from vllm_mlx.server.engine_port import EngineCondition
from vllm_mlx.server.request_record import RequestRecord

#: Where the context travels in the ASGI scope.
SCOPE_KEY = "vllm_mlx.request"

#: What ids begin with, as each API's clients expect it.
_PREFIXES = {
    "/v1/chat/completions": "chatcmpl-",
    "/v1/completions": "cmpl-",
    "/v1/messages": "msg_",
    "/v1/responses": "resp_",
    "/v1/embeddings": "embd-",
    "/v1/rerank": "rerank-",
}
_OTHER_PREFIX = "req-"


def new_request_id(path: str) -> str:
    """Make an id that no other request has, in the style of the API at `path`."""
    return f"{_PREFIXES.get(path, _OTHER_PREFIX)}{uuid.uuid4().hex}"


class RequestContext:
    """Hold what belongs to one HTTP request.

    Made and closed by `RequestLifecycle`; `closing` runs when the request is over, however it
    ended, so what it holds cannot leak.
    """

    def __init__(self, request_id: str) -> None:
        self.id = request_id
        self.closing = AsyncExitStack()
        #: Unknown fields of the body, for the response header.
        self.ignored_fields: tuple[str, ...] = ()
        #: Who asks, for limits and fairness: a name of the API key, or else the address.
        self.client = ""
        #: The code of the error that the client was told of, also after a stream had begun.
        self.error_code: str | None = None
        #: The rule that the path has met, as OpenAPI writes it; None for a path of no route.
        self.route: str | None = None
        #: Of the engine that the request is for, if that is not the chat model's.
        self.condition: EngineCondition | None = None
        #: What its rows have cost.
        self.record = RequestRecord()


def current_context() -> RequestContext:
    """Return the context of the request that is being handled."""
    # ASGI's scope is an open mapping that Quart types as closed.
    return cast(RequestContext, cast(dict[str, object], request.scope)[SCOPE_KEY])
