"""What every request must pass before its route sees it: host, headers, key and rate."""

from __future__ import annotations

import ipaddress

from quart import Quart, request
from quart_cors import cors

from vllm_mlx.engine.errors import HeadersTooLargeError
from vllm_mlx.server.auth import PUBLIC_PATHS, ApiKeys
from vllm_mlx.server.config import ServerConfig
from vllm_mlx.server.host_check import HostCheck
from vllm_mlx.server.rate_limit import RateLimiter
from vllm_mlx.server.request_context import current_context

#: Headers of ours that a page of another origin may read.
_EXPOSED_HEADERS = (
    *("x-request-id", "request-id", "x-ignored-fields", "x-should-retry", "retry-after"),
)

#: A browser asks again after so long whether it may.
_PREFLIGHT_MAX_AGE_S = 600

#: One IPv6 client has at least so long a network for itself.
_IPV6_PREFIX = 64


class RequestGuards:
    """Own the checks that stand before all routes, and say who a request's client is."""

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self._keys = ApiKeys(config.api_keys)
        self._hosts = HostCheck(config.host, config.allowed_hosts)
        self._rates = RateLimiter(config.rate_limit)

    def install(self, app: Quart) -> None:
        """Put the checks before every route of `app`."""
        app.before_request(self.check)
        if self._config.allowed_origins:
            cors(
                app,
                allow_origin=self._config.allowed_origins,
                allow_methods=("GET", "POST", "DELETE"),
                allow_headers=("*",),
                expose_headers=_EXPOSED_HEADERS,
                max_age=_PREFLIGHT_MAX_AGE_S,
            )

    async def check(self) -> None:
        """Raise what refuses the request at hand; note its client otherwise."""
        headers = request.headers
        num_bytes = sum(len(name) + len(value) for name, value in headers.items())
        if num_bytes > self._config.max_header_bytes:
            raise HeadersTooLargeError(
                f"the request's headers have {num_bytes} bytes; "
                f"at most {self._config.max_header_bytes} are read"
            )
        self._hosts.check(headers.get("host"))
        if self._is_preflight():
            return
        key = self._keys.check(request.path, headers.get("authorization"), headers.get("x-api-key"))
        client = key if key is not None else client_of_address(request.remote_addr)
        current_context().client = client
        if request.path not in PUBLIC_PATHS:
            self._rates.check(client)

    def _is_preflight(self) -> bool:
        """Say whether a browser asks what a page may ask; it sends no key with that."""
        return (
            bool(self._config.allowed_origins)
            and request.method == "OPTIONS"
            and "access-control-request-method" in request.headers
        )


def client_of_address(address: str | None) -> str:
    """Return what stands for the client at `address`: of IPv6, its network."""
    try:
        parsed = ipaddress.ip_address((address or "").partition("%")[0])
    except ValueError:
        return address or "unknown"
    if isinstance(parsed, ipaddress.IPv6Address):
        if parsed.ipv4_mapped is not None:
            return str(parsed.ipv4_mapped)
        return str(ipaddress.ip_network((parsed, _IPV6_PREFIX), strict=False))
    return str(parsed)
