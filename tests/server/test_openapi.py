"""The OpenAPI document: every route, and bodies as the field policy has them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jsonschema
import pytest

from vllm_mlx.server.app import create_app
from vllm_mlx.server.openapi import routes_of

if TYPE_CHECKING:
    from tests.server.conftest import Served, ServerFactory

MESSAGES = [{"role": "user", "content": "x"}]


async def document_of(served: Served) -> dict[str, Any]:
    """Return the served document."""
    response = await served.client.get("/openapi.json")
    assert response.status_code == 200
    document: dict[str, Any] = await response.get_json()
    return document


async def test_every_route_is_described(served: Served) -> None:
    """No route is left out, and each says what it does."""
    document = await document_of(served)
    described = {
        (method.upper(), path): operation["summary"]
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
    }
    routes = {(route.method, route.path) for route in routes_of(create_app(served.runtime))}
    assert set(described) == routes
    assert len(routes) >= 15
    assert [route for route, summary in described.items() if not summary.endswith(".")] == []
    posts = {path for method, path in routes if method == "POST" and "cancel" not in path}
    assert {path for path in posts if "requestBody" not in document["paths"][path]["post"]} == set()


@pytest.mark.parametrize(
    ("fields", "is_valid"),
    [
        ({}, True),
        ({"temperature": 2, "n": 3, "stop": ["x"], "priority": -5}, True),
        ({"temperature": 3}, False),
        ({"tools": []}, True),
        ({"tools": [{"type": "function"}]}, False),
        ({"suffix": None, "echo": False}, True),
        ({"echo": True}, False),
        ({"messages": []}, False),
        ({"messages": [{"role": "wizard", "content": "x"}]}, False),
        ({"unknown": 1}, True),
    ],
)
async def test_the_document_says_what_the_server_does(
    served: Served, fields: dict[str, Any], is_valid: bool
) -> None:
    """What its schema allows is answered, what it does not is a 400."""
    document = await document_of(served)
    body = {"messages": MESSAGES, **fields}
    schema = {"$ref": "#/components/schemas/ChatCompletionBody", **document}
    validator = jsonschema.Draft202012Validator(schema)
    assert validator.is_valid(body) == is_valid
    response = await served.client.post("/v1/chat/completions", json=body)
    assert response.status_code == (200 if is_valid else 400)


async def test_it_needs_a_key_where_the_server_does(make_server: ServerFactory) -> None:
    """Who has no key does not learn which routes there are."""
    server = await make_server(api_keys=("secret",))
    assert (await server.client.get("/openapi.json")).status_code == 401
