"""`GET /openapi.json`: the routes and their bodies, read off the route table and the schemas."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from typing import Any

from pydantic.json_schema import models_json_schema
from quart import Quart, Response, current_app

from vllm_mlx.server.anthropic import fields as anthropic_fields
from vllm_mlx.server.anthropic.schemas import CountTokensBody, MessagesBody
from vllm_mlx.server.audio import fields as audio_fields
from vllm_mlx.server.audio.schemas import TranscriptionForm, TranslationForm
from vllm_mlx.server.auth import PUBLIC_PATHS
from vllm_mlx.server.encoders import fields as encoder_fields
from vllm_mlx.server.encoders.schemas import EmbeddingsBody, RerankBody
from vllm_mlx.server.openai import fields as openai_fields
from vllm_mlx.server.openai.fields import FieldPolicy, FieldUse
from vllm_mlx.server.openai.schemas import (
    Body,
    ChatCompletionBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
)
from vllm_mlx.server.replies import ANTHROPIC_PATHS, json_response
from vllm_mlx.server.responses_api import fields as responses_fields
from vllm_mlx.server.responses_api.schemas import ResponsesBody

#: What the routes that take a JSON body take.
BODIES: Mapping[str, type[Body]] = {
    "/v1/chat/completions": ChatCompletionBody,
    "/v1/completions": CompletionBody,
    "/v1/messages": MessagesBody,
    "/v1/messages/count_tokens": CountTokensBody,
    "/v1/responses": ResponsesBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
}

#: What the routes that take a form with a file take.
FORMS: Mapping[str, type[Body]] = {
    "/v1/embeddings": EmbeddingsBody,
    "/rerank": RerankBody,
    "/v2/rerank": RerankBody,
    "/v1/rerank": RerankBody,
    "/v1/audio/transcriptions": TranscriptionForm,
    "/v1/audio/translations": TranslationForm,
}

#: What becomes of the fields of all these bodies.
POLICIES = {
    **openai_fields.POLICIES,
    **anthropic_fields.POLICIES,
    **responses_fields.POLICIES,
    **encoder_fields.POLICIES,
    **audio_fields.POLICIES,
}

#: Bodies that have no schema of their own.
OTHER_BODIES: Mapping[str, dict[str, Any]] = {
    "/v1/cache/warm": {
        "type": "object",
        "properties": {
            "prompts": {"type": "array", "minItems": 1, "description": "Texts or chats."},
            "model": {"type": ["string", "null"], "description": "A name of the model."},
        },
        "required": ["prompts"],
    }
}

#: Parameters in the query.
_QUERIES: Mapping[tuple[str, str], list[dict[str, Any]]] = {
    ("DELETE", "/v1/cache"): [
        {
            "name": "tier",
            "in": "query",
            "schema": {"type": "array", "items": {"enum": ["ram", "ssd"]}},
            "explode": True,
        }
    ],
    ("GET", "/v1/responses/{response_id}/input_items"): [
        {
            "name": "limit",
            "in": "query",
            "schema": {"type": "integer", "minimum": 1, "maximum": 100},
        },
        {"name": "order", "in": "query", "schema": {"enum": ["asc", "desc"]}},
        {"name": "after", "in": "query", "schema": {"type": "string"}},
    ],
}

_STREAMS = frozenset(
    {"/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses", *FORMS}
)

_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": "string"},
            },
        }
    },
}

_ANTHROPIC_ERROR = {
    "type": "object",
    "required": ["type", "error", "request_id"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
        "request_id": {"type": "string"},
    },
}

#: One event of a stream: its JSON, and its name on the routes whose events have one.
_EVENT = {
    "type": "object",
    "required": ["data"],
    "properties": {"data": {"type": "string"}, "event": {"type": "string"}},
}

_REF = "#/components/schemas/"


@dataclass(frozen=True)
class Route:
    """Hold one route: its path as OpenAPI writes it, and what its view says of itself."""

    method: str
    path: str
    summary: str


class OpenApiRoute:
    """Describe the application that it is a route of."""

    async def show(self) -> Response:
        """Describe every route as OpenAPI does."""
        return json_response(document(routes_of(current_app)))


def routes_of(app: Quart) -> list[Route]:
    """Return the routes of an application, in the order of their paths."""
    found = []
    for rule in app.url_map.iter_rules():
        path = path_of(rule.rule)
        view = app.view_functions[rule.endpoint]
        summary = (view.__doc__ or "").strip().partition("\n")[0]
        methods = (rule.methods or set()) - {"HEAD", "OPTIONS"}
        found += [Route(method, path, summary) for method in methods]
    return sorted(found, key=lambda route: (route.path, route.method))


def path_of(rule: str) -> str:
    """Return a routing rule as OpenAPI writes its path."""
    return re.sub(r"<(?:\w+:)?(\w+)>", r"{\1}", rule)


def document(routes: Iterable[Route]) -> dict[str, Any]:
    """Return the OpenAPI document of `routes`."""
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route)
    return {
        "openapi": "3.1.0",
        "info": {"title": "vllm-mlx", "version": version("vllm-mlx")},
        "paths": paths,
        "components": {
            "schemas": {**body_schemas(), "Error": _ERROR, "AnthropicError": _ANTHROPIC_ERROR},
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "apiKey": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def _operation(route: Route) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
    if route.path in _STREAMS:
        content["text/event-stream"] = {"schema": _EVENT}
    if route.path == "/metrics":
        content = {"text/plain": {"schema": {"type": "string"}}}
    name = "AnthropicError" if route.path.startswith(ANTHROPIC_PATHS) else "Error"
    error = {"application/json": {"schema": {"$ref": f"{_REF}{name}"}}}
    unavailable = error if route.path != "/ready" else content
    operation: dict[str, Any] = {
        "summary": route.summary,
        "responses": {
            "200": {"description": "The answer.", "content": content},
            "4XX": {"description": "The request is at fault.", "content": error},
            "503": {"description": "The model does not answer now.", "content": unavailable},
            "5XX": {"description": "The server is at fault.", "content": error},
        },
    }
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"\{(\w+)\}", route.path)
    ]
    parameters += _QUERIES.get((route.method, route.path), [])
    if parameters:
        operation["parameters"] = parameters
    schema = _body_schema(route)
    if schema is not None:
        kind = "multipart/form-data" if route.path in FORMS else "application/json"
        content = {kind: {"schema": schema}}
        operation["requestBody"] = {"required": True, "content": content}
    if route.path not in PUBLIC_PATHS:
        # Where the server was started with keys; {} is for one without.
        operation["security"] = [{"bearer": []}, {"apiKey": []}, {}]
    return operation


def _body_schema(route: Route) -> dict[str, Any] | None:
    if route.method != "POST":
        return None
    if body := BODIES.get(route.path) or FORMS.get(route.path):
        return {"$ref": f"{_REF}{body.__name__}"}
    return OTHER_BODIES.get(route.path)


@cache
def body_schemas() -> dict[str, Any]:
    """Return the JSON schemas of all bodies, with what the field policy refuses taken out."""
    _, collected = models_json_schema(
        [(body, "validation") for body in (*BODIES.values(), *FORMS.values())],
        ref_template=_REF + "{model}",
    )
    schemas: dict[str, Any] = collected["$defs"]
    by_name = {body.__name__: policies for body, policies in POLICIES.items()}
    for name, schema in schemas.items():
        for field, policy in by_name[name].items():
            _apply_policy(schema["properties"][field], policy)
    return schemas


def _apply_policy(schema: dict[str, Any], policy: FieldPolicy) -> None:
    """Say in a field's schema what becomes of it: of a refused one only what asks for nothing."""
    schema.pop("title", None)
    schema["x-use"] = policy.use.value
    if policy.use is not FieldUse.REFUSED or policy.same_as is not None:
        return
    schema.pop("anyOf", None)
    schema["enum"] = [None, *policy.no_ops]
