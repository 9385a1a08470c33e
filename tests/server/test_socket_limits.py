"""Limits that only a real socket shows: endless heads, slow bodies, and what the log keeps."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest

from vllm_mlx.server import app as app_module
from vllm_mlx.server import serving
from vllm_mlx.server.listener import bind, url_of
from vllm_mlx.server.ready_file import ReadyFile
from vllm_mlx.server.serving import Serving

if TYPE_CHECKING:
    from tests.server.conftest import Served, ServerFactory

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"


@asynccontextmanager
async def listening(server: Served, folder: Path) -> AsyncIterator[httpx.URL]:
    """Serve `server` on a free port of this process."""
    listener = bind("127.0.0.1", 0)
    url = httpx.URL(url_of(listener))
    ready_file = folder / "ready.json"
    task = asyncio.create_task(Serving(server.runtime, listener, ReadyFile(str(ready_file))).run())
    try:
        async with asyncio.timeout(30):
            while not ready_file.exists():
                await asyncio.sleep(0.005)
        yield url
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def exchange(url: httpx.URL, *parts: bytes, pause_s: float = 0.0) -> bytes:
    """Send `parts`, with pauses, and return what comes back until the server closes."""
    reader, writer = await asyncio.open_connection(url.host, url.port)
    try:
        reading = asyncio.create_task(reader.read())
        for part in parts:
            if reading.done():
                break
            writer.write(part)
            await asyncio.sleep(pause_s)
        async with asyncio.timeout(8):
            return await reading
    except ConnectionResetError:
        return b""
    finally:
        writer.close()
        await asyncio.gather(writer.wait_closed(), return_exceptions=True)


async def test_a_head_that_never_ends_is_refused_before_it_is_kept(
    make_server: ServerFactory, tmp_path: Path
) -> None:
    """Twice the limit ends the connection with 431; the next request is answered."""
    server = await make_server(load=False, max_header_bytes=1024)
    async with listening(server, tmp_path) as url:
        answer = await exchange(url, HEAD + b"x-long: " + b"x" * 8000)
        assert answer.startswith(b"HTTP/1.1 431 ")
        little_over = HEAD + b"x-long: " + b"x" * 1100 + b"\r\nConnection: close\r\n\r\n"
        answer = await exchange(url, little_over)
        assert answer.startswith(b"HTTP/1.1 431 ")
        assert b"request_headers_too_large" in answer
        async with httpx.AsyncClient(base_url=url) as client:
            assert (await client.get("/health")).status_code == 200


async def test_heads_sent_byte_by_byte_do_not_hold_a_connection(
    make_server: ServerFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However slowly it trickles, a head has so long, not so long between two bytes."""
    monkeypatch.setattr(serving, "_IDLE_CONNECTION_S", 0.5)
    server = await make_server(load=False)
    async with listening(server, tmp_path) as url:
        started = asyncio.get_running_loop().time()
        trickle = [b"x-%d: y\r\n" % number for number in range(100)]
        slow = [exchange(url, HEAD, *trickle, pause_s=0.1) for _ in range(20)]
        answers = await asyncio.gather(*slow)
        assert asyncio.get_running_loop().time() - started < 3
        assert set(answers) == {b""}


async def test_a_body_that_does_not_come_is_given_up(
    make_server: ServerFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """408 in OpenAI's shape, and nothing is left of it."""
    monkeypatch.setattr(app_module, "_BODY_TIMEOUT_S", 0.3)
    server = await make_server(load=False)
    async with listening(server, tmp_path) as url:
        head = HEAD + b"Connection: close\r\nContent-Length: 100\r\n\r\n"
        answer = await exchange(url, head, b'{"prompt"')
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b"body_timeout" in answer
        assert server.engine.requests == []


async def test_a_body_that_is_cut_off_starts_nothing(
    make_server: ServerFactory, tmp_path: Path
) -> None:
    """A client that leaves in the middle of its body leaves nothing, and the server goes on."""
    server = await make_server(load=False)
    async with listening(server, tmp_path) as url:
        for _ in range(5):
            _, writer = await asyncio.open_connection(url.host, url.port)
            writer.write(HEAD + b'Content-Length: 100\r\n\r\n{"prompt": "x')
            await writer.drain()
            writer.close()
            await writer.wait_closed()
        async with httpx.AsyncClient(base_url=url) as client:
            assert (await client.post("/v1/completions", json={"prompt": "x"})).status_code == 200
        assert len(server.engine.requests) == 1
        assert server.runtime.generations.num_open_rows == 0


async def test_neither_keys_nor_prompts_reach_the_log(
    make_server: ServerFactory, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Right and wrong, in headers, bodies, queries and errors, at the finest level."""
    caplog.set_level(logging.DEBUG)
    server = await make_server(load=False, api_keys=("right-key-5150",), rate_limit=6)
    async with (
        listening(server, tmp_path) as url,
        httpx.AsyncClient(base_url=url) as client,
    ):
        good = {"authorization": "Bearer right-key-5150"}
        for headers in ({"x-api-key": "wrong-key-5150"}, good):
            for body in (
                {"prompt": "prompt-5150"},
                {"prompt": "prompt-5150", "temperature": "prompt-5150"},
                {"prompt": ["prompt-5150", 5]},
                {"prompt": "prompt-5150" * 100},
            ):
                path = "/v1/completions?api_key=right-key-5150"
                await client.post(path, json=body, headers=headers)
        for _ in range(4):
            await client.get("/v1/models", headers=good)
    lines = "\n".join(
        record.getMessage()
        for record in caplog.records
        if not record.name.startswith(("httpx", "httpcore"))
    )
    assert lines.count("/v1/completions") == 8
    assert "rate_limit_exceeded" in lines
    assert "5150" not in lines


@pytest.mark.parametrize("path", [b"/v1/chat/completions", b"/health", b"/nothing"])
async def test_a_websocket_is_refused_in_words_of_http(
    make_server: ServerFactory, tmp_path: Path, caplog: pytest.LogCaptureFixture, path: bytes
) -> None:
    """The handshake ends with 403, without a traceback, and the server goes on."""
    server = await make_server(load=False, api_keys=("secret",))
    head = (
        b"GET %s HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    )
    async with listening(server, tmp_path) as url:
        answer = await exchange(url, head % path)
        assert answer.startswith(b"HTTP/1.1 403 ")
        async with httpx.AsyncClient(base_url=url) as client:
            assert (await client.get("/health")).status_code == 200
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


async def test_an_answer_before_the_body_does_not_spoil_the_next_request(
    make_server: ServerFactory, tmp_path: Path
) -> None:
    """A body a little late keeps the connection; one that does not come is told of its close."""
    server = await make_server(load=False, api_keys=("secret",))
    async with listening(server, tmp_path) as url:
        head = HEAD + b"Content-Length: 2\r\n\r\n"
        last = HEAD + b"Content-Length: 2\r\nConnection: close\r\n\r\n"
        answer = await exchange(url, head, b"{}", last + b"{}", pause_s=0.03)
        assert answer.count(b"HTTP/1.1 401 ") == 2
        assert answer.lower().count(b"connection: close") == 1
        answer = await exchange(url, head, pause_s=0.3)
        assert answer.startswith(b"HTTP/1.1 401 ")
        assert b"connection: close" in answer.lower()
