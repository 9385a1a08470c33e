"""Sockets of clients that left, counted in this process."""

from __future__ import annotations

import asyncio
from typing import Any

import hypercorn.asyncio.run
import psutil
import pytest
from hypercorn.asyncio import serve
from hypercorn.asyncio.tcp_server import TCPServer
from hypercorn.config import Config

from vllm_mlx.server.connections import Connection
from vllm_mlx.server.listener import bind

NUM_CLIENTS = 6
REQUEST = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"


async def answer(scope: Any, receive: Any, send: Any) -> None:
    """Answer every request with two bytes."""
    if scope["type"] != "http":
        raise RuntimeError("no lifespan here")
    headers = [(b"content-length", b"2")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"ok"})


def num_served(port: int) -> int:
    """Return how many accepted sockets of `port` this process holds, whoever left them."""
    connections = psutil.Process().net_connections("tcp4")
    return sum(
        c.laddr.port == port and c.status in ("ESTABLISHED", "CLOSE_WAIT") for c in connections
    )


async def leave(port: int, request: bytes) -> None:
    """Connect, perhaps ask and read the answer, and close in an orderly way."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    if request:
        writer.write(request)
        await reader.readuntil(b"ok")
    writer.close()
    await writer.wait_closed()


@pytest.mark.parametrize("request_bytes", [b"", REQUEST], ids=["never asked", "answered"])
@pytest.mark.parametrize("kind", [Connection, TCPServer])
async def test_the_socket_of_a_client_that_left_is_closed(
    kind: type[TCPServer], request_bytes: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once by ours; Hypercorn's own keeps it, and while it does ours is needed."""
    monkeypatch.setattr(hypercorn.asyncio.run, "TCPServer", kind)
    listener = bind("127.0.0.1", 0)
    port = listener.getsockname()[1]
    config = Config()
    config.bind = [f"fd://{listener.detach()}"]
    config.keep_alive_timeout = 3
    config.errorlog = None
    stop = asyncio.Event()
    serving = asyncio.create_task(serve(answer, config, shutdown_trigger=stop.wait))
    try:
        await asyncio.gather(*(leave(port, request_bytes) for _ in range(NUM_CLIENTS)))
        if kind is TCPServer:
            await asyncio.sleep(0.3)
            assert num_served(port) == NUM_CLIENTS
        else:
            async with asyncio.timeout(2):
                while num_served(port):
                    await asyncio.sleep(0.01)
    finally:
        stop.set()
        await serving
