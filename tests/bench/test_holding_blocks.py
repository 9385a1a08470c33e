"""Hold that blocks which are parsed later keep the times at which they came."""

from __future__ import annotations

import asyncio
from typing import Any

from vllm_mlx.bench.http_connection import HttpConnection

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"


class Clock(asyncio.SelectorEventLoop):
    """An event loop whose time the test sets."""

    now = 0.0

    def time(self) -> float:
        """Return the time that was set."""
        return self.now


class Sink:
    """Keep each piece with its time, and when it was handed on."""

    def __init__(self, loop: Clock) -> None:
        self._loop = loop
        self.pieces: list[tuple[float, bytes]] = []
        self.handed_on_at: list[float] = []

    def started(self, at: float) -> None:
        """Do nothing."""

    def head(self, status: int, content_type: str, at: float) -> None:
        """Do nothing."""

    def body(self, block: bytes, at: float) -> None:
        """Keep a piece."""
        self.pieces.append((at, block))
        self.handed_on_at.append(self._loop.now)


class Transport(asyncio.Transport):
    """Send nothing anywhere."""

    def write(self, data: Any) -> None:
        """Do nothing."""

    def abort(self) -> None:
        """Do nothing."""


def exchange(blocks: list[bytes]) -> Sink:
    """Feed a connection one block a second and return what its sink got."""
    loop = Clock()
    try:
        sink = Sink(loop)
        assert loop.run_until_complete(fed(loop, sink, blocks)) == loop.now
    finally:
        loop.close()
    return sink


async def fed(loop: Clock, sink: Sink, blocks: list[bytes]) -> float:
    """Ask, feed the blocks, and return when the response ended."""
    connection = HttpConnection(loop)
    connection.connection_made(Transport())
    task = loop.create_task(connection.exchange(b"", sink))
    await asyncio.sleep(0)
    for block in blocks:
        loop.now += 1
        connection.get_buffer(-1)[: len(block)] = block
        connection.buffer_updated(len(block))
    return await task


def chunk(data: bytes) -> bytes:
    """Frame a chunk."""
    return b"%x\r\n%s\r\n" % (len(data), data)


def test_held_blocks_keep_their_times() -> None:
    """Pieces are handed on together, each with the time of its own block."""
    sink = exchange([HEAD, *(chunk(b"data: %d\n\n" % n) for n in range(5)), END])
    assert sink.pieces == [(float(n + 2), b"data: %d\n\n" % n) for n in range(5)]
    assert sink.handed_on_at == [7.0] * 5


def test_only_so_many_blocks_are_held() -> None:
    """A long stream is parsed on its way, some dozens of blocks at a time."""
    sink = exchange([HEAD, *(chunk(b"data: x\n\n") for _ in range(100)), END])
    assert [at for at, _ in sink.pieces] == [float(n + 2) for n in range(100)]
    assert len(set(sink.handed_on_at)) == 4


def test_an_end_cut_anywhere_is_seen() -> None:
    """The last chunk ends the response whichever way its bytes were cut."""
    last = chunk(b"data: x\n\n") + END
    for place in range(1, len(last)):
        sink = exchange([HEAD, last[:place], last[place:]])
        assert b"".join(block for _, block in sink.pieces) == b"data: x\n\n"
    assert exchange([HEAD, *(last[n : n + 1] for n in range(len(last)))]).pieces
