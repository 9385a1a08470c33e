"""One HTTP/1.1 connection: it stamps the bytes of a response, holds them, and parses them later.

httptools frames the responses and asyncio reads into a buffer of the connection's own, both
because of what an event costs otherwise. Most of that is cold code after each wake-up: the blocks
of a chunked response are only stamped and kept, and parsed some dozens at a time, or when one
may be the last.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

import httptools

from vllm_mlx.bench.measuring_loop import arrival_clock

_BUFFER_BYTES = 65536
#: Blocks that are parsed at once; bounds how long parsing keeps the loop from its sockets.
_MAX_HELD = 32


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


class ClosedUnansweredError(Exception):
    """Report a connection that was closed before any byte of a response."""


class HttpConnection(asyncio.BufferedProtocol):
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
        self._arrived_at = arrival_clock(loop)
        self._now = 0.0
        self._held: list[tuple[float, bytes]] = []
        self._has_head = False
        self._has_bytes = False
        self._may_hold = False
        self.headers: dict[str, str] = {}
        self.is_open = False
        self.can_be_kept = False

    async def exchange(self, payload: bytes, sink: Sink) -> float:
        """Send one request; return when the last byte of its response came."""
        assert self._transport is not None
        if not self.is_open:
            raise ClosedUnansweredError
        self._sink, self._done = sink, self._loop.create_future()
        self._parser = httptools.HttpResponseParser(self)
        self._has_head = self._has_bytes = self._may_hold = self.can_be_kept = False
        self.headers = {}
        self._transport.write(payload)
        try:
            return await self._done
        finally:
            self._release()
            self._sink = self._done = self._parser = None

    def close(self) -> None:
        """Close the connection at once."""
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the transport."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self.is_open = True

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the buffer to read into."""
        del sizehint
        return self._view

    def buffer_updated(self, nbytes: int) -> None:
        """Stamp what was read, and hold it or parse it."""
        at = self._arrived_at()
        if self._parser is None:
            # Bytes that nobody asked for: whatever they are, no response can be told from them.
            self.close()
            return
        self._has_bytes = True
        block = bytes(self._view[:nbytes])
        self._held.append((at, block))
        if not self._may_hold or len(self._held) == _MAX_HELD or _may_end(block):
            self._release()

    def eof_received(self) -> None:
        """Note when the server ended its side."""
        self._now = self._arrived_at()

    def connection_lost(self, exc: Exception | None) -> None:
        """End the response that was under way, as its framing says."""
        self.is_open = False
        self._release()
        if not self._has_bytes:
            self._fail(ClosedUnansweredError())
        elif exc is None and self._has_head and self._ends_with_connection():
            self._complete()
        else:
            reason = f": {exc}" if exc is not None else ""
            self._fail(ExchangeError("cut", f"the connection ended within the response{reason}"))

    def _release(self) -> None:
        """Parse what is held, each block at the time at which it came."""
        held, self._held = self._held, []
        try:
            for self._now, block in held:
                if self._parser is not None:
                    self._parser.feed_data(block)
        except httptools.HttpParserCallbackError as error:
            # A defect of the sink's, not of the server's.
            self._fail(error.__context__ if isinstance(error.__context__, Exception) else error)
        except httptools.HttpParserError as error:
            self._fail(ExchangeError("invalid", f"not an HTTP response: {error}"))

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header."""
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """Hand on the head, and see whether blocks may be held."""
        assert self._parser is not None
        status = self._parser.get_status_code()
        if status >= 200 and self._sink is not None:
            self._has_head = True
            self._may_hold = self._is_chunked()
            self._sink.head(status, self.headers.get("content-type", ""), self._now)

    def on_body(self, body: bytes) -> None:
        """Hand on a piece of the body."""
        if self._sink is not None:
            self._sink.body(body, self._now)

    def on_message_complete(self) -> None:
        """End the exchange."""
        if not self._has_head:
            # An interim response such as 100; the real one follows.
            self.headers = {}
            return
        assert self._parser is not None
        self.can_be_kept = self.is_open and self._parser.should_keep_alive()
        self._complete()

    def _is_chunked(self) -> bool:
        return "chunked" in self.headers.get("transfer-encoding", "").lower()

    def _ends_with_connection(self) -> bool:
        return not self._is_chunked() and "content-length" not in self.headers

    def _complete(self) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_result(self._now)

    def _fail(self, error: Exception) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)


def _may_end(block: bytes) -> bool:
    """Return whether a block of a chunked response may be its last.

    That one ends with an empty line, or is the end of one that was cut.
    """
    return block.endswith(b"\r\n\r\n") or len(block) < 4
