"""API keys: every route but the probes' asks for one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from vllm_mlx.engine.errors import AuthenticationError
from vllm_mlx.server.app import create_app
from vllm_mlx.server.auth import PUBLIC_PATHS, ApiKeys

if TYPE_CHECKING:
    from tests.server.conftest import ServerFactory


@pytest.mark.parametrize(
    ("authorization", "api_key"),
    [
        ("Bearer one", None),
        ("bearer two", None),
        (None, "two"),
        ("Basic one", "one"),
        ("Bearer wrong", "one"),
    ],
)
def test_any_key_opens_in_either_header(authorization: str | None, api_key: str | None) -> None:
    """Bearer and x-api-key are both looked at, and each of the keys works."""
    ApiKeys(["one", "two"]).check("/v1/models", authorization, api_key)


@pytest.mark.parametrize(
    ("authorization", "api_key"),
    [
        (None, None),
        ("", ""),
        ("Bearer", None),
        ("Bearer ", None),
        ("Basic one", None),
        ("one", None),
        ("Bearer on", None),
        ("Bearer onee", "twoo"),
        ("Bearer ünë", None),
    ],
)
def test_anything_else_is_refused(authorization: str | None, api_key: str | None) -> None:
    """A missing key, another scheme and a near miss do not open."""
    with pytest.raises(AuthenticationError):
        ApiKeys(["one", "two"]).check("/v1/models", authorization, api_key)


def test_without_keys_everybody_is_let_in() -> None:
    """A server with no key asks for none."""
    ApiKeys().check("/v1/models", None, None)


async def test_every_route_but_the_probes_asks_for_the_key(make_server: ServerFactory) -> None:
    """Walk the route table: 401 without a key and with a wrong one, in the API's shape."""
    server = await make_server(metrics=True, api_keys=("secret",))
    routes = {
        (rule.rule, method)
        for rule in create_app(server.runtime).url_map.iter_rules()
        for method in rule.methods or ()
        if method not in {"HEAD", "OPTIONS"}
    }
    assert len(routes) >= 11
    for rule, method in sorted(routes):
        path = rule.replace("<model_id:model_id>", "x").replace("<request_id>", "x")
        for headers in ({}, {"authorization": "Bearer wrong"}, {"x-api-key": "wrong"}):
            response = await server.client.open(path, method=method, headers=headers)
            if path in PUBLIC_PATHS:
                assert response.status_code == 200, path
                continue
            assert response.status_code == 401, (method, path)
            error = (await response.get_json())["error"]
            if path.startswith("/v1/messages"):
                assert error["type"] == "authentication_error"
            else:
                assert error["code"] == "invalid_api_key"
            assert "secret" not in str(error)
            assert response.headers["www-authenticate"] == "Bearer"


async def test_the_right_key_opens(make_server: ServerFactory) -> None:
    """Both headers work on a real route."""
    server = await make_server(api_keys=("secret",))
    for headers in ({"Authorization": "Bearer secret"}, {"X-Api-Key": "secret"}):
        assert (await server.client.get("/v1/models", headers=headers)).status_code == 200


async def test_an_unknown_route_tells_nothing_without_a_key(make_server: ServerFactory) -> None:
    """Who has no key does not learn which routes there are."""
    server = await make_server(api_keys=("secret",))
    assert (await server.client.get("/v1/nothing")).status_code == 401
