"""A small HTTP/1.1 client for load: stamped bytes, connections kept open, nothing hidden.

httptools frames the responses, and the connections read into buffers of their own: both because
of what an event costs otherwise. No redirects, no proxies, no compression: each would measure
something else than the server.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import socket
import ssl
from typing import Protocol
from urllib.parse import urlsplit

import httptools

from vllm_mlx.bench.measuring_loop import arrived_at
from vllm_mlx.engine.errors import UsageError

_CONNECT_TIMEOUT_S = 10.0
_BUFFER_BYTES = 65536


class ExchangeError(Exception):
    """Report a request that got no whole response; `kind` is a `Failure`'s."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message


class Sink(Protocol):
    """Take a response as it comes; times were taken before anything was parsed."""

    def started(self, at: float) -> None:
        """Note that sending begins, or begins again on a new connection."""
        ...

    def head(self, status: int, content_type: str, at: float) -> None:
        """Take the status and the headers."""
        ...

    def body(self, block: bytes, at: float) -> None:
        """Take more of the body."""
        ...


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
        self._idle: list[_Connection] = []
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
            except _ClosedUnansweredError:
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

    def _idle_connection(self) -> _Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return connection
        return None

    async def _connect(self) -> _Connection:
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                host, port = await self._resolve()
                _, connection = await self._loop.create_connection(
                    lambda: _Connection(self._loop),
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


class _ClosedUnansweredError(Exception):
    """The connection was closed before any byte of a response."""


class _Connection(asyncio.BufferedProtocol):
    """Hold one connection, which answers one request at a time.

    All methods but `exchange` and `close` are for asyncio and httptools to call.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._buffer = bytearray(_BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._transport: asyncio.Transport | None = None
        self._sink: Sink | None = None
        self._done: asyncio.Future[float] | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._now = 0.0
        self._has_head = False
        self._has_bytes = False
        self.headers: dict[str, str] = {}
        self.is_open = False
        self.can_be_kept = False

    async def exchange(self, payload: bytes, sink: Sink) -> float:
        """Send one request; return when the last byte of its response came."""
        assert self._transport is not None
        if not self.is_open:
            raise _ClosedUnansweredError
        self._sink, self._done = sink, self._loop.create_future()
        self._parser = httptools.HttpResponseParser(self)
        self._has_head = self._has_bytes = self.can_be_kept = False
        self.headers = {}
        self._transport.write(payload)
        try:
            return await self._done
        finally:
            self._sink = self._done = self._parser = None

    def close(self) -> None:
        """Close the connection at once."""
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self.is_open = True

    def get_buffer(self, sizehint: int) -> memoryview:
        del sizehint
        return self._view

    def buffer_updated(self, nbytes: int) -> None:
        self._now = arrived_at(self._loop)
        if self._parser is None:
            # Bytes that nobody asked for: whatever they are, no response can be told from them.
            self.close()
            return
        self._has_bytes = True
        try:
            self._parser.feed_data(self._view[:nbytes])
        except httptools.HttpParserCallbackError as error:
            # A defect of the sink's, not of the server's.
            self._fail(error.__context__ if isinstance(error.__context__, Exception) else error)
        except httptools.HttpParserError as error:
            self._fail(ExchangeError("invalid", f"not an HTTP response: {error}"))

    def eof_received(self) -> None:
        self._now = arrived_at(self._loop)

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        if not self._has_bytes:
            self._fail(_ClosedUnansweredError())
        elif exc is None and self._has_head and self._ends_with_connection():
            self._complete()
        else:
            reason = f": {exc}" if exc is not None else ""
            self._fail(ExchangeError("cut", f"the connection ended within the response{reason}"))

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        status = self._parser.get_status_code()
        if status >= 200 and self._sink is not None:
            self._has_head = True
            self._sink.head(status, self.headers.get("content-type", ""), self._now)

    def on_body(self, body: bytes) -> None:
        if self._sink is not None:
            self._sink.body(body, self._now)

    def on_message_complete(self) -> None:
        if not self._has_head:
            # An interim response such as 100; the real one follows.
            self.headers = {}
            return
        assert self._parser is not None
        self.can_be_kept = self.is_open and self._parser.should_keep_alive()
        self._complete()

    def _ends_with_connection(self) -> bool:
        is_chunked = "chunked" in self.headers.get("transfer-encoding", "").lower()
        return not is_chunked and "content-length" not in self.headers

    def _complete(self) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_result(self._now)

    def _fail(self, error: Exception) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)


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
