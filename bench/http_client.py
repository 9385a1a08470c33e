"""A small HTTP/1.1 client for load: stamped bytes, connections kept open, nothing hidden.

No redirects, no proxies, no compression: each would measure something else than the server.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import socket
import ssl
from urllib.parse import urlsplit

from vllm_mlx.bench.http_connection import (
    ClosedUnansweredError,
    ExchangeError,
    HttpConnection,
    Sink,
)
from vllm_mlx.engine.errors import UsageError

_CONNECT_TIMEOUT_S = 10.0


@dataclasses.dataclass(frozen=True, slots=True)
class HttpRequest:
    """Hold one request, encoded before its time is measured."""

    method: str
    path: str
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes = b""


@dataclasses.dataclass(frozen=True, slots=True)
class Exchanged:
    """Say how a request went: when its last byte came, and what its connection cost."""

    ended_at: float
    connect_s: float
    headers: dict[str, str]


@dataclasses.dataclass(frozen=True, slots=True)
class Address:
    """Hold where a server is, as its URL says."""

    scheme: str
    host: str
    port: int
    #: Comes before every path; without a slash at its end.
    prefix: str

    @property
    def url(self) -> str:
        """Return the URL, without credentials."""
        return f"{self.scheme}://{self.netloc}{self.prefix}"

    @property
    def netloc(self) -> str:
        """Return host and port as a URL or a Host header has them."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @classmethod
    def parse(cls, url: str) -> Address:
        """Read a server's address, with or without `/v1`; raises `UsageError` for anything else."""
        text = url if "://" in url else f"http://{url}"
        try:
            parts = urlsplit(text)
            port = parts.port or {"http": 80, "https": 443}[parts.scheme]
        except (ValueError, KeyError):
            parts, port = urlsplit(""), 0
        if not parts.hostname or parts.query or parts.fragment:
            raise UsageError(f"'{url}' is not a server's address; write it as http://host:port")
        prefix = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
        return cls(parts.scheme, parts.hostname, port, prefix)

    @property
    def is_local(self) -> bool:
        """Return whether this names the machine itself."""
        return self.host in ("localhost", "::1") or self.host.startswith("127.")


class HttpClient:
    """Send requests to one server over as many connections as are needed at once.

    Owns its connections; used from one event loop. Nothing is retried but a request whose kept
    connection turns out to have been closed before any byte of its response came.
    """

    def __init__(self, address: Address) -> None:
        self.address = address
        self._loop = asyncio.get_running_loop()
        self._tls = _tls_context() if address.scheme == "https" else None
        self._idle: list[HttpConnection] = []
        self._target: tuple[str, int] | None = None

    async def open(self, num_connections: int) -> None:
        """Have so many connections open before they are needed; raises `ExchangeError`."""
        missing = num_connections - len(self._idle)
        if missing > 0:
            self._idle += await asyncio.gather(*(self._connect() for _ in range(missing)))

    async def exchange(self, request: HttpRequest, sink: Sink, timeout_s: float) -> Exchanged:
        """Send `request` and feed its response to `sink`; raises `ExchangeError`."""
        payload = self._encode(request)
        try:
            async with asyncio.timeout(timeout_s):
                return await self._exchange(payload, sink)
        except TimeoutError:
            raise ExchangeError("timeout", f"no whole answer within {timeout_s:g} s") from None

    def close(self) -> None:
        """Close every connection that is idle."""
        while self._idle:
            self._idle.pop().close()

    async def _exchange(self, payload: bytes, sink: Sink) -> Exchanged:
        while True:
            connection, connect_s = self._idle_connection(), 0.0
            is_kept = connection is not None
            sink.started(self._loop.time())
            if connection is None:
                began = self._loop.time()
                connection = await self._connect()
                connect_s = self._loop.time() - began
            try:
                ended_at = await connection.exchange(payload, sink)
            except ClosedUnansweredError:
                if is_kept:
                    continue
                raise ExchangeError("cut", "the server closed the connection unasked") from None
            except BaseException:
                connection.close()
                raise
            if connection.can_be_kept:
                self._idle.append(connection)
            else:
                connection.close()
            return Exchanged(ended_at, connect_s, connection.headers)

    def _idle_connection(self) -> HttpConnection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return connection
        return None

    async def _connect(self) -> HttpConnection:
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                host, port = await self._resolve()
                _, connection = await self._loop.create_connection(
                    lambda: HttpConnection(self._loop),
                    host,
                    port,
                    ssl=self._tls,
                    server_hostname=self.address.host if self._tls is not None else None,
                )
        except TimeoutError:
            raise ExchangeError("connect", f"{self.address.url} does not answer") from None
        except OSError as error:
            raise ExchangeError("connect", f"{self.address.url}: {_reason(error)}") from None
        return connection

    async def _resolve(self) -> tuple[str, int]:
        """Return the first of the host's addresses that takes a connection; ask once only."""
        if self._target is not None:
            return self._target
        found = await self._loop.getaddrinfo(
            self.address.host, self.address.port, type=socket.SOCK_STREAM
        )
        targets = [(str(entry[4][0]), int(entry[4][1])) for entry in found]
        for host, port in targets[:-1]:
            try:
                _, writer = await asyncio.open_connection(host, port)
            except OSError:
                continue
            writer.close()
            self._target = (host, port)
            return self._target
        # The last one is not tried: connecting to it reports the error.
        return targets[-1]

    def _encode(self, request: HttpRequest) -> bytes:
        address = self.address
        lines = [
            f"{request.method} {address.prefix}{request.path} HTTP/1.1",
            f"host: {address.netloc}",
            "accept-encoding: identity",
            "user-agent: vllm-mlx-bench-serve",
            *(f"{name}: {value}" for name, value in request.headers),
        ]
        if request.body or request.method == "POST":
            lines.append(f"content-length: {len(request.body)}")
        return "\r\n".join([*lines, "", ""]).encode("latin-1") + request.body


def _reason(error: OSError) -> str:
    """Return why a connection failed; asyncio's own text leaves that out."""
    is_plain = error.errno is not None and error.errno > 0 and not isinstance(error, ssl.SSLError)
    if is_plain and error.errno is not None:
        return os.strerror(error.errno)
    return error.strerror or str(error) or type(error).__name__


def _tls_context() -> ssl.SSLContext:
    """Return a context with the certificates that httpx trusts."""
    import httpx

    return httpx.create_ssl_context()
