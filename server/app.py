"""Put the routes, the keys and the error answers together into the ASGI application."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any, cast

from quart import Quart, Response, request
from werkzeug.exceptions import HTTPException
from werkzeug.routing import PathConverter

from vllm_mlx.engine.errors import EngineUnavailableError, VllmMlxError
from vllm_mlx.server.admission import progress_fields
from vllm_mlx.server.anthropic.routes import MessageRoutes
from vllm_mlx.server.audio.routes import AudioRoutes
from vllm_mlx.server.body_sizes import request_class
from vllm_mlx.server.encoders.embeddings import EmbeddingRoute
from vllm_mlx.server.encoders.rerank import RerankRoute
from vllm_mlx.server.errors import ErrorReply, internal_reply, reply_to, reply_to_http_fault
from vllm_mlx.server.guards import RequestGuards
from vllm_mlx.server.lifecycle import AsgiApp, RequestLifecycle
from vllm_mlx.server.openai.chat import ChatRoute
from vllm_mlx.server.openai.completions import CompletionRoute
from vllm_mlx.server.openai.models import ModelRoutes
from vllm_mlx.server.openai.tokenization import TokenizationRoutes
from vllm_mlx.server.openapi import OpenApiRoute, path_of
from vllm_mlx.server.operations.cache import CacheRoutes
from vllm_mlx.server.operations.cancel import CancelRoute
from vllm_mlx.server.operations.health import HealthRoutes
from vllm_mlx.server.operations.metrics import MetricsRoute
from vllm_mlx.server.operations.status import StatusRoute
from vllm_mlx.server.replies import error_response
from vllm_mlx.server.request_context import current_context
from vllm_mlx.server.responses_api.routes import ResponseRoutes
from vllm_mlx.server.runtime import ServerRuntime

logger = logging.getLogger(__name__)

#: Where the clients of several APIs look for the same route.
RERANK_PATHS = ("/rerank", "/v1/rerank", "/v2/rerank")

#: Seconds for a whole request body to arrive.
_BODY_TIMEOUT_S = 120


class ModelIdConverter(PathConverter):
    """Match model ids, which hold slashes and, being paths, may begin with one."""

    regex = ".+?"
    part_isolating = False


def create_app(runtime: ServerRuntime) -> Quart:
    """Make the application; it starts and stops nothing."""
    app = Quart(__name__, static_folder=None)
    app.config["MAX_CONTENT_LENGTH"] = runtime.config.max_body_bytes
    app.request_class = request_class(runtime)
    app.config["BODY_TIMEOUT"] = _BODY_TIMEOUT_S
    # Errors are answered in tests as they are in earnest.
    app.config["PROPAGATE_EXCEPTIONS"] = False
    # A model id that is a path begins with a second slash, which must not be redirected away.
    app.url_map.merge_slashes = False
    app.url_map.converters["model_id"] = ModelIdConverter
    _add_routes(app, runtime)
    _add_guards(app, runtime)
    # Outermost, so that whatever happens inside has an id and an end.
    lifecycle = RequestLifecycle(cast(AsgiApp, app.asgi_app), runtime.records)
    app.asgi_app = cast(Any, lifecycle)  # type: ignore[method-assign]
    return app


def _add_routes(app: Quart, runtime: ServerRuntime) -> None:
    health, status, cancel = HealthRoutes(runtime), StatusRoute(runtime), CancelRoute(runtime)
    models, tokenization = ModelRoutes(runtime), TokenizationRoutes(runtime)
    cache, anthropic = CacheRoutes(runtime), MessageRoutes(runtime)
    responses, audio = ResponseRoutes(runtime), AudioRoutes(runtime)
    table: list[tuple[str, str, Callable[..., Awaitable[Response]]]] = [
        ("GET", "/health", health.health),
        ("GET", "/ready", health.ready),
        ("GET", "/metrics", MetricsRoute(runtime).show),
        ("GET", "/v1/status", status.status),
        ("POST", "/v1/requests/<request_id>/cancel", cancel.cancel),
        ("DELETE", "/v1/requests/<request_id>", cancel.cancel),
        ("POST", "/v1/chat/completions", ChatRoute(runtime).create),
        ("POST", "/v1/completions", CompletionRoute(runtime).create),
        ("POST", "/v1/messages", anthropic.create),
        ("POST", "/v1/messages/count_tokens", anthropic.count_tokens),
        ("POST", "/v1/responses", responses.create),
        ("GET", "/v1/responses/<response_id>", responses.retrieve),
        ("DELETE", "/v1/responses/<response_id>", responses.delete),
        ("POST", "/v1/responses/<response_id>/cancel", responses.cancel),
        ("GET", "/v1/responses/<response_id>/input_items", responses.list_input_items),
        ("POST", "/v1/embeddings", EmbeddingRoute(runtime).create),
        *(("POST", path, RerankRoute(runtime).create) for path in RERANK_PATHS),
        ("POST", "/v1/audio/transcriptions", audio.transcribe),
        ("POST", "/v1/audio/translations", audio.translate),
        ("GET", "/v1/models", models.index),
        ("GET", "/v1/models/<model_id:model_id>", models.retrieve),
        ("GET", "/v1/cache", cache.show),
        ("DELETE", "/v1/cache", cache.clear),
        ("POST", "/v1/cache/warm", cache.warm),
        ("POST", "/tokenize", tokenization.tokenize),
        ("POST", "/detokenize", tokenization.detokenize),
        ("GET", "/openapi.json", OpenApiRoute().show),
    ]
    for method, path, view in table:
        app.add_url_rule(path, f"{method} {path}".replace(".", "_"), view, methods=[method])


def _add_guards(app: Quart, runtime: ServerRuntime) -> None:
    async def answer_error(error: VllmMlxError) -> Response:
        extra = None
        if isinstance(error, EngineUnavailableError):
            condition = current_context().condition or runtime.engine.state
            extra = progress_fields(condition)
        return _told(reply_to(error, extra))

    async def answer_http_fault(error: HTTPException) -> Response:
        return _told(_http_reply(error))

    async def answer_defect(error: Exception) -> Response:
        context = current_context()
        logger.error("request %s failed", context.id, exc_info=error)
        return _told(internal_reply(context.id))

    def note_route() -> None:
        if request.url_rule is not None:
            current_context().route = path_of(request.url_rule.rule)

    # Before the guards: who is refused by them has met a route, too.
    app.before_request(note_route)
    RequestGuards(runtime.config).install(app)
    app.register_error_handler(VllmMlxError, answer_error)
    app.register_error_handler(HTTPException, answer_http_fault)
    app.register_error_handler(Exception, answer_defect)


def _http_reply(error: HTTPException) -> ErrorReply:
    status = error.code or 500
    messages = {
        404: f"no such route: {request.method} {request.path}",
        405: f"{request.path} does not take {request.method}",
        408: f"the request body did not arrive within {_BODY_TIMEOUT_S} s",
        413: "the request body is too large",
    }
    return reply_to_http_fault(status, messages.get(status, error.description or error.name))


def _told(reply: ErrorReply) -> Response:
    """Answer with an error and note its code for the log."""
    current_context().error_code = reply.code
    return error_response(reply)
