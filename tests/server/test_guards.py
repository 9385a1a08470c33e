"""What stands before every route: the host's name, the headers' size, the rate and the origin."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from vllm_mlx.engine.errors import HostNotAllowedError, RateLimitedError, UsageError
from vllm_mlx.server.config import ServerConfig
from vllm_mlx.server.guards import client_of_address
from vllm_mlx.server.host_check import HostCheck
from vllm_mlx.server.rate_limit import RateLimiter

if TYPE_CHECKING:
    from tests.server.conftest import Served, ServerFactory

PAGE = "https://app.example.org"


class FakeClock:
    """Tell the time that a test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now


def num_allowed(limiter: RateLimiter, client: str) -> int:
    """Ask until refused, and count what was let in."""
    for count in range(10_000):
        try:
            limiter.check(client)
        except RateLimitedError:
            return count
    raise AssertionError("never refused")


def test_a_client_may_ask_so_often_a_minute_and_no_more() -> None:
    """A burst of a minute's worth is let in, then one each sixth of a minute."""
    clock = FakeClock()
    limiter = RateLimiter(6, clock=clock)
    assert num_allowed(limiter, "a") == 6
    assert num_allowed(limiter, "b") == 6
    with pytest.raises(RateLimitedError) as caught:
        limiter.check("a")
    assert caught.value.retry_after_s == pytest.approx(10)
    clock.now = 10
    assert num_allowed(limiter, "a") == 1
    clock.now = 1000
    assert num_allowed(limiter, "a") == 6


def test_being_refused_costs_nothing() -> None:
    """Who goes on asking is let in as soon as who waits."""
    clock = FakeClock()
    limiter = RateLimiter(60, clock=clock)
    assert num_allowed(limiter, "a") == 60
    for tenth in range(1, 10):
        clock.now = tenth / 10
        assert num_allowed(limiter, "a") == 0
    clock.now = 1.001
    assert num_allowed(limiter, "a") == 1


def test_the_table_of_clients_is_bounded() -> None:
    """Of very many clients the ones that have been silent longest are forgotten."""
    limiter = RateLimiter(1, max_clients=100, clock=FakeClock())
    for number in range(1000):
        limiter.check(f"client-{number}")
    assert limiter.num_clients == 100
    with pytest.raises(RateLimitedError):
        limiter.check("client-999")
    limiter.check("client-0")


def test_no_limit_remembers_nobody() -> None:
    """A limit of 0 lets everybody in and keeps no table."""
    limiter = RateLimiter(0)
    for _ in range(100):
        limiter.check("a")
    assert limiter.num_clients == 0


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2:ffff::1", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("<local>", "<local>"),
        (None, "unknown"),
    ],
)
def test_an_address_stands_for_its_client(address: str | None, expected: str) -> None:
    """All of an IPv6 client's addresses are one client."""
    assert client_of_address(address) == expected


@pytest.mark.parametrize(
    ("bound", "allowed", "header", "is_allowed"),
    [
        ("127.0.0.1", (), "127.0.0.1:8000", True),
        ("127.0.0.1", (), "localhost:8000", True),
        ("127.0.0.1", (), "LocalHost.", True),
        ("127.0.0.1", (), "me.localhost", True),
        ("127.0.0.1", (), "[::1]:8000", True),
        ("127.0.0.1", (), "192.0.2.7", True),
        ("127.0.0.1", (), None, True),
        ("127.0.0.1", (), "evil.example:8000", False),
        ("127.0.0.1", (), "localhost.evil.example", False),
        ("127.0.0.1", (), "127.0.0.1.evil.example", False),
        ("127.0.0.1", (), "evil.example@127.0.0.1", False),
        ("127.0.0.1", (), "", False),
        ("localhost", (), "evil.example", False),
        ("::1", (), "evil.example", False),
        ("::1", (), "[::1]:80", True),
        ("127.0.0.1", ("*",), "evil.example", True),
        ("127.0.0.1", ("mine.example",), "Mine.Example:80", True),
        ("127.0.0.1", ("mine.example",), "evil.example", False),
        ("0.0.0.0", (), "any.example", True),
        ("0.0.0.0", ("mine.example",), "evil.example", False),
        ("0.0.0.0", ("mine.example",), "localhost:8000", True),
    ],
)
def test_the_names_that_a_server_goes_by(
    bound: str, allowed: tuple[str, ...], header: str | None, is_allowed: bool
) -> None:
    """Its own and addresses; another name only where other machines reach it, or if allowed."""
    check = HostCheck(bound, allowed)
    if is_allowed:
        check.check(header)
        return
    with pytest.raises(HostNotAllowedError, match="--allowed-hosts"):
        check.check(header)


async def test_a_rebound_name_is_refused_on_every_route(served: Served) -> None:
    """A page whose name was made to resolve to this machine reads nothing."""
    for path in ("/v1/models", "/health", "/nothing"):
        response = await served.client.get(path, headers={"host": "evil.example:8000"})
        assert response.status_code == 403
        assert (await response.get_json())["error"]["code"] == "host_not_allowed"
        assert "access-control-allow-origin" not in response.headers


async def test_too_many_requests_are_told_when_to_come_again(make_server: ServerFactory) -> None:
    """429 with Retry-After in OpenAI's shape; another key and the probes are not touched."""
    server = await make_server(api_keys=("one", "two"), rate_limit=2)
    one, two = {"authorization": "Bearer one"}, {"x-api-key": "two"}
    for _ in range(2):
        assert (await server.client.get("/v1/models", headers=one)).status_code == 200
    response = await server.client.get("/v1/models", headers=one)
    assert response.status_code == 429
    assert 1 <= int(response.headers["retry-after"]) <= 30
    error = (await response.get_json())["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
    assert (await server.client.get("/v1/models", headers=two)).status_code == 200
    for _ in range(5):
        assert (await server.client.get("/health", headers=one)).status_code == 200


async def test_a_made_up_key_is_no_other_client(make_server: ServerFactory) -> None:
    """Without keys of its own the server goes by the address, whatever clients send."""
    server = await make_server(rate_limit=1)
    statuses = [
        (await server.client.get("/v1/models", headers={"x-api-key": f"{n}"})).status_code
        for n in range(3)
    ]
    assert statuses == [200, 429, 429]


async def test_too_much_header_is_a_431(make_server: ServerFactory) -> None:
    """The names and values of all headers count together."""
    server = await make_server(max_header_bytes=1000)
    response = await server.client.get("/health", headers={f"x-{n}": "x" * 50 for n in range(20)})
    assert response.status_code == 431
    error = (await response.get_json())["error"]
    assert (error["type"], error["code"]) == (
        "invalid_request_error",
        "request_headers_too_large",
    )
    assert (await server.client.get("/health")).status_code == 200


async def test_without_allowed_origins_no_page_may_read(served: Served) -> None:
    """No CORS header is sent, so that the browser refuses."""
    response = await served.client.get("/v1/models", headers={"origin": PAGE})
    assert not [name for name in response.headers if name[0].startswith("access-control")]


async def test_an_allowed_page_may_ask_and_read(make_server: ServerFactory) -> None:
    """Its preflight passes without a key, its request with one, and it may read errors too."""
    server = await make_server(api_keys=("secret",), allowed_origins=(PAGE,))
    preflight = await server.client.open(
        "/v1/chat/completions",
        method="OPTIONS",
        headers={
            "origin": PAGE,
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization,content-type",
        },
    )
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == PAGE
    assert "POST" in preflight.headers["access-control-allow-methods"]
    allowed = preflight.headers["access-control-allow-headers"].lower()
    assert {"authorization", "content-type"} <= {name.strip() for name in allowed.split(",")}

    headers = {"origin": PAGE, "authorization": "Bearer secret"}
    answer = await server.client.get("/v1/models", headers=headers)
    assert answer.headers["access-control-allow-origin"] == PAGE
    assert "x-request-id" in answer.headers["access-control-expose-headers"]
    refused = await server.client.get("/v1/models", headers={"origin": PAGE})
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == PAGE
    other = await server.client.get("/v1/models", headers={**headers, "origin": "https://x.org"})
    assert "access-control-allow-origin" not in other.headers


async def test_options_without_preflight_needs_the_key(make_server: ServerFactory) -> None:
    """Only what a browser cannot send a key with is let through."""
    server = await make_server(api_keys=("secret",), allowed_origins=("*",))
    response = await server.client.open("/v1/models", method="OPTIONS", headers={"origin": PAGE})
    assert response.status_code == 401


@pytest.mark.parametrize(
    "fields",
    [
        {"allowed_origins": ("app.example.org",)},
        {"allowed_origins": ("https://app.example.org/",)},
        {"allowed_hosts": ("",)},
        {"allowed_hosts": ("http://mine",)},
        {"rate_limit": -1},
        {"max_header_bytes": 0},
    ],
)
def test_values_that_could_not_work_are_refused(fields: dict[str, object]) -> None:
    """What would silently allow nothing or everything is a usage error."""
    with pytest.raises(UsageError):
        ServerConfig(**fields)  # type: ignore[arg-type]


async def test_requests_carry_their_client_and_their_priority(make_server: ServerFactory) -> None:
    """The engine is told whose turn it is, by a name that is not the key, and what is urgent."""
    server = await make_server(api_keys=("one", "two"))
    body = {"prompt": ["x", "y"], "priority": -3, "n": 2}
    chat = {"messages": [{"role": "user", "content": "x"}], "priority": 5}
    for key in ("one", "two"):
        headers = {"authorization": f"Bearer {key}"}
        for path, fields in (("/v1/completions", body), ("/v1/chat/completions", chat)):
            response = await server.client.post(path, json=fields, headers=headers)
            assert response.status_code == 200
    priorities = [request.priority for request in server.engine.requests]
    assert priorities == [3, 3, 3, 3, -5] * 2
    clients = [request.client for request in server.engine.requests]
    assert len(set(clients[:5])) == len(set(clients[5:])) == 1
    assert clients[0] != clients[5]
    assert not {"one", "two"} & set(clients)


async def test_without_keys_the_address_is_the_client(served: Served) -> None:
    """Requests of one machine take turns together."""
    await served.chat()
    assert [request.client for request in served.engine.requests] == ["<local>"]
    for priority in (2**31, 1.5, "high"):
        assert (await served.chat(priority=priority)).status_code == 400
