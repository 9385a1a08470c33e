"""Hold the HTTP client to real sockets: framing, kept connections, and every way to fail."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from vllm_mlx.bench.http_client import Address, HttpClient, HttpRequest
from vllm_mlx.bench.http_connection import ExchangeError
from vllm_mlx.bench.measuring_loop import MeasuringLoop, arrival_clock
from vllm_mlx.engine.errors import UsageError

GET = HttpRequest("GET", "/x", (("x-own", "1"),))
Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Gathered:
    """Gather a response as a sink."""

    def __init__(self) -> None:
        self.starts: list[float] = []
        self.status = 0
        self.content_type = ""
        self.blocks: list[bytes] = []
        self.times: list[float] = []

    def started(self, at: float) -> None:
        """Note when sending began."""
        self.starts.append(at)

    def head(self, status: int, content_type: str, at: float) -> None:
        """Note the head."""
        self.status, self.content_type = status, content_type
        self.times.append(at)

    def body(self, block: bytes, at: float) -> None:
        """Note more of the body."""
        self.blocks.append(block)
        self.times.append(at)

    @property
    def text(self) -> bytes:
        """Return the whole body."""
        return b"".join(self.blocks)


class RawServer:
    """Answer each connection by a function; counts connections and keeps what was sent."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self.num_connections = 0
        self.heads: list[bytes] = []

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection until its function returns or the client leaves."""
        self.num_connections += 1
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            await self._answer(reader, writer)
        writer.close()

    async def read_request(self, reader: asyncio.StreamReader) -> None:
        """Read the head of a request without a body."""
        self.heads.append(await reader.readuntil(b"\r\n\r\n"))


@contextlib.asynccontextmanager
async def serving(answer: Any) -> AsyncIterator[tuple[RawServer, HttpClient]]:
    """Serve `answer(server, reader, writer)` and give a client of it."""
    raw = RawServer(lambda reader, writer: answer(raw, reader, writer))
    listener = await asyncio.start_server(raw.connected, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    client = HttpClient(Address.parse(f"http://127.0.0.1:{port}/base/v1"))
    try:
        yield raw, client
    finally:
        client.close()
        listener.close()
        # Lets the connections see that they are closed.
        await asyncio.sleep(0.01)


def sends(*blocks: bytes, closes: bool = False) -> Any:
    """Return an answer of these bytes to each request, a moment between two blocks."""

    async def answer(raw: RawServer, reader: Any, writer: Any) -> None:
        while True:
            await raw.read_request(reader)
            for block in blocks:
                writer.write(block)
                await writer.drain()
                await asyncio.sleep(0.002)
            if closes:
                return

    return answer


CHUNKED = b"transfer-encoding: chunked\r\n\r\n"
OK = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\n"
RESPONSES: dict[str, tuple[list[bytes], bool]] = {
    "length": ([OK + b"content-length: 5\r\n\r\nhello"], False),
    "length in pieces": ([OK, b"content-length: 5\r", b"\n\r\nhe", b"llo"], False),
    "chunked": ([OK + CHUNKED + b"2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n"], False),
    "chunks cut": (
        [OK + CHUNKED, b"2\r", b"\nh", b"e\r\n3\r\nllo\r\n0", b"\r\n\r\n"],
        False,
    ),
    "until the end": ([OK + b"\r\nhel", b"lo"], True),
    "interim": ([b"HTTP/1.1 100 Continue\r\n\r\n", OK + b"content-length: 5\r\n\r\nhello"], False),
    "HTTP/1.0": ([b"HTTP/1.0 200 OK\r\ncontent-type: text/plain\r\n\r\nhello"], True),
}  # fmt: skip


@pytest.mark.parametrize("name", RESPONSES)
async def test_framings(name: str) -> None:
    """Every framing gives the status, the type and the body, twice over."""
    blocks, closes = RESPONSES[name]
    async with serving(sends(*blocks, closes=closes)) as (raw, client):
        for _ in range(2):
            sink = Gathered()
            done = await client.exchange(GET, sink, 5)
            assert (sink.status, sink.content_type, sink.text) == (200, "text/plain", b"hello")
            assert sink.starts[0] <= sink.times[0] <= done.ended_at
        assert raw.num_connections == (2 if closes else 1)
    head = raw.heads[0].decode()
    assert head.startswith("GET /base/x HTTP/1.1\r\nhost: 127.0.0.1:")
    assert "x-own: 1" in head


async def test_a_kept_connection_that_was_closed_is_opened_anew() -> None:
    """A server that closes idle connections costs a new one, and the time starts anew."""

    async def answer(raw: RawServer, reader: Any, writer: Any) -> None:
        await raw.read_request(reader)
        writer.write(OK + b"content-length: 2\r\n\r\nok")
        if raw.num_connections == 1:
            # The second request arrives, and the connection ends without an answer.
            await raw.read_request(reader)

    async with serving(answer) as (raw, client):
        await client.exchange(GET, Gathered(), 5)
        sink = Gathered()
        done = await client.exchange(GET, sink, 5)
        assert (sink.text, raw.num_connections) == (b"ok", 2)
        assert len(sink.starts) == 2
        assert done.connect_s > 0


async def test_connections_are_opened_beforehand() -> None:
    """Connections that are open cost a request nothing."""
    async with serving(sends(OK + b"content-length: 2\r\n\r\nok")) as (raw, client):
        await client.open(3)
        done = await asyncio.gather(*(client.exchange(GET, Gathered(), 5) for _ in range(3)))
        assert [one.connect_s for one in done] == [0, 0, 0]
        await asyncio.sleep(0.01)
        assert raw.num_connections == 3


FAILURES: dict[str, tuple[list[bytes], str]] = {
    "no response": ([], "cut"),
    "within the head": ([b"HTTP/1.1 200"], "cut"),
    "within the length": ([OK + b"content-length: 5\r\n\r\nhe"], "cut"),
    "within a chunk": ([OK + CHUNKED + b"5\r\nhe"], "cut"),
    "before the last chunk": ([OK + CHUNKED + b"2\r\nhe\r\n"], "cut"),
    "no HTTP": ([b"SSH-2.0-x\r\n\r\n"], "invalid"),
    "wrong chunk": ([OK + CHUNKED + b"zz\r\n"], "invalid"),
}


@pytest.mark.parametrize("name", FAILURES)
async def test_responses_that_fail(name: str) -> None:
    """What is cut off or is not HTTP raises with its kind, and the next request works."""
    blocks, kind = FAILURES[name]
    is_first = True

    async def answer(raw: RawServer, reader: Any, writer: Any) -> None:
        nonlocal is_first
        await raw.read_request(reader)
        response = blocks if is_first else [OK + b"content-length: 2\r\n\r\nok"]
        is_first = False
        for block in response:
            writer.write(block)
            await writer.drain()

    async with serving(answer) as (_, client):
        with pytest.raises(ExchangeError) as caught:
            await client.exchange(GET, Gathered(), 5)
        assert caught.value.kind == kind
        sink = Gathered()
        await client.exchange(GET, sink, 5)
        assert sink.text == b"ok"


async def test_a_silent_server_times_out() -> None:
    """A request that takes too long is given up."""

    async def answer(raw: RawServer, reader: Any, writer: Any) -> None:
        await raw.read_request(reader)
        await reader.read()

    async with serving(answer) as (_, client):
        with pytest.raises(ExchangeError, match=r"within 0.05 s") as caught:
            await client.exchange(GET, Gathered(), 0.05)
        assert caught.value.kind == "timeout"


async def test_nobody_listens() -> None:
    """A refused connection names the address and the reason."""
    listener = await asyncio.start_server(lambda r, w: None, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    listener.close()
    await listener.wait_closed()
    client = HttpClient(Address.parse(f"localhost:{port}"))
    with pytest.raises(ExchangeError, match=r"http://localhost:\d+: .*refused") as caught:
        await client.exchange(GET, Gathered(), 5)
    assert caught.value.kind == "connect"


async def test_an_unknown_host() -> None:
    """A name that does not resolve is a failed connection."""
    client = HttpClient(Address.parse("http://no-such-host.invalid"))
    with pytest.raises(ExchangeError) as caught:
        await client.exchange(GET, Gathered(), 5)
    assert caught.value.kind == "connect"


async def test_a_defect_of_the_sink_is_not_the_servers() -> None:
    """What a sink raises comes through as it is."""

    class Broken(Gathered):
        def body(self, block: bytes, at: float) -> None:
            raise ZeroDivisionError

    async with serving(sends(OK + b"content-length: 2\r\n\r\nok")) as (_, client):
        with pytest.raises(ZeroDivisionError):
            await client.exchange(GET, Broken(), 5)


def test_one_turn_of_the_loop_has_one_arrival_time() -> None:
    """What is read in one turn arrived by the time the turn began, however long it takes."""

    async def main() -> tuple[list[float], float, float]:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, MeasuringLoop)
        loop.take_longest_turn_s()
        stamps: list[float] = []

        def slow() -> None:
            stamps.append(arrival_clock(loop)())
            until = loop.time() + 0.01
            while loop.time() < until:
                continue

        loop.call_soon(slow)
        loop.call_soon(slow)
        await asyncio.sleep(0.05)
        return stamps, loop.take_longest_turn_s(), loop.take_longest_turn_s()

    with asyncio.Runner(loop_factory=MeasuringLoop) as runner:
        stamps, longest, after = runner.run(main())
    assert stamps[0] == stamps[1]
    assert longest >= 0.02
    assert after < 0.02


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://localhost:8000", "http://localhost:8000"),
        ("localhost:8000/v1/", "http://localhost:8000"),
        ("https://host/api/v1", "https://host:443/api"),
        ("http://user:pw@[::1]:9/", "http://[::1]:9"),
    ],
)
def test_addresses(url: str, expected: str) -> None:
    """An address is read with and without /v1, and shown without credentials."""
    assert Address.parse(url).url == expected


@pytest.mark.parametrize("url", ["ftp://x", "http://", "http://x:port", "http://x?y=1", ""])
def test_what_is_not_an_address(url: str) -> None:
    """Anything else is refused."""
    with pytest.raises(UsageError, match="is not a server's address"):
        Address.parse(url)
