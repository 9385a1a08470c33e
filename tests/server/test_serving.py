"""The server's life over real sockets and signals, with an engine made of text."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from vllm_mlx.engine.errors import EngineDiedError, ModelLoadError, VllmMlxError
from vllm_mlx.server import serving
from vllm_mlx.server.listener import bind, url_of
from vllm_mlx.server.ready_file import ReadyFile
from vllm_mlx.server.serving import Serving

if TYPE_CHECKING:
    from tests.server.conftest import Served, ServerFactory

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


class Running:
    """Hold a serving in this process and a client of it."""

    def __init__(self, server: Served, url: str, ready_file: Path, client: Any) -> None:
        self.engine = server.engine
        self.runtime = server.runtime
        self.url = url
        self.ready_file = ready_file
        self.client: httpx.AsyncClient = client
        self.task: asyncio.Task[int]

    async def wait_ready(self) -> None:
        """Wait for the ready file."""
        async with asyncio.timeout(30):
            while not self.ready_file.exists():
                await asyncio.sleep(0.005)

    async def wait_requests(self, count: int) -> None:
        """Wait until the engine has so many requests."""
        async with asyncio.timeout(30):
            while len(self.engine.requests) < count:
                await asyncio.sleep(0.005)

    async def stream(self) -> tuple[asyncio.Task[None], list[str]]:
        """Begin a stream, which the engine holds after its first word."""
        lines: list[str] = []
        reading = asyncio.create_task(read_stream(self, lines))
        await self.wait_requests(1)
        self.engine.put(self.engine.requests[0].request_id, "begun")
        async with asyncio.timeout(30):
            while len(lines) < 2:
                await asyncio.sleep(0.005)
        return reading, lines

    async def ended(self) -> int:
        """Wait for the end and return the exit code."""
        async with asyncio.timeout(30):
            return await self.task


@asynccontextmanager
async def running(server: Served, folder: Path) -> AsyncIterator[Running]:
    """Serve `server` on a free port of this process."""
    path = folder / "ready.json"
    listener = bind("127.0.0.1", 0)
    url = url_of(listener)
    async with httpx.AsyncClient(base_url=url, timeout=10) as client:
        held = Running(server, url, path, client)
        held.task = asyncio.create_task(
            Serving(server.runtime, listener, ReadyFile(str(path))).run()
        )
        try:
            yield held
        finally:
            held.task.cancel()
            await asyncio.gather(held.task, return_exceptions=True)


async def read_stream(run: Running, lines: list[str]) -> None:
    """Read a streamed chat to its end."""
    async with run.client.stream(
        "POST", "/v1/chat/completions", json={**CHAT, "stream": True}
    ) as response:
        async for line in response.aiter_lines():
            if line:
                lines.append(line)  # noqa: PERF401  (read while it grows)


async def test_it_answers_over_a_real_socket_and_ends_on_sigterm(
    make_server: ServerFactory, tmp_path: Path
) -> None:
    """The ready file tells the truth, is removed, and the exit code names the signal."""
    server = await make_server(load=False)
    async with running(server, tmp_path) as run:
        await run.wait_ready()
        ready = json.loads(run.ready_file.read_text())
        assert ready["url"] == run.url
        assert ready["pid"] == os.getpid()
        response = await run.client.post("/v1/chat/completions", json=CHAT)
        assert response.json()["choices"][0]["message"]["content"] == "Hello world"
        started = asyncio.get_running_loop().time()
        os.kill(os.getpid(), signal.SIGTERM)
        assert await run.ended() == 143
        assert asyncio.get_running_loop().time() - started < 2
        assert not run.ready_file.exists()
        with pytest.raises(httpx.ConnectError):
            await run.client.get("/health")


async def test_a_running_stream_finishes_while_nothing_new_is_accepted(
    make_server: ServerFactory, tmp_path: Path
) -> None:
    """SIGINT stops accepting at once and waits for what runs."""
    server = await make_server(load=False)
    server.engine.is_held = True
    async with running(server, tmp_path) as run:
        await run.wait_ready()
        reading, lines = await run.stream()
        request_id = server.engine.requests[0].request_id
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(0.1)
        async with httpx.AsyncClient(base_url=run.url) as other:
            with pytest.raises(httpx.ConnectError):
                await other.get("/health")
        server.engine.put(request_id, "to the end")
        server.engine.finish(request_id)
        await reading
        assert '"content":"to the end"' in lines[2]
        assert lines[-1] == "data: [DONE]"
        assert await run.ended() == 130


async def test_what_outlasts_the_drain_is_aborted_with_an_event(
    make_server: ServerFactory, tmp_path: Path
) -> None:
    """The stream of a request that never ends is ended properly."""
    server = await make_server(load=False, drain_timeout_s=0.3)
    server.engine.is_held = True
    async with running(server, tmp_path) as run:
        await run.wait_ready()
        reading, lines = await run.stream()
        os.kill(os.getpid(), signal.SIGTERM)
        await reading
        assert '"code":"aborted"' in lines[-2]
        assert lines[-1] == "data: [DONE]"
        assert await run.ended() == 143


async def test_a_second_signal_does_not_wait(
    make_server: ServerFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The drain of a minute ends at once, but not for an echo of the first signal."""
    monkeypatch.setattr(serving, "_SAME_SIGNAL_S", 0.3)
    server = await make_server(load=False, drain_timeout_s=60)
    server.engine.is_held = True
    async with running(server, tmp_path) as run:
        await run.wait_ready()
        reading, lines = await run.stream()
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.4)
        assert not run.task.done()
        os.kill(os.getpid(), signal.SIGINT)
        assert await run.ended() == 130
        await reading
        assert lines[-1] == "data: [DONE]"


async def test_a_client_that_does_not_read_cannot_keep_the_server(
    make_server: ServerFactory, tmp_path: Path
) -> None:
    """The last events get a moment to leave, not for ever."""
    server = await make_server(load=False, drain_timeout_s=0.1)
    server.engine.is_held = True
    async with running(server, tmp_path) as run:
        await run.wait_ready()
        host, _, port = run.url.removeprefix("http://").partition(":")
        _, writer = await asyncio.open_connection(host, int(port), limit=2**10)
        body = json.dumps({**CHAT, "stream": True}).encode()
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
            b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
        )
        await run.wait_requests(1)
        for _ in range(50):
            server.engine.put(server.engine.requests[0].request_id, "y" * 2**20)
        await asyncio.sleep(0.2)
        os.kill(os.getpid(), signal.SIGTERM)
        assert await run.ended() == 143
        writer.transport.abort()
        # What the end of the event loop does in earnest.
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ModelLoadError("the weights are torn"), ModelLoadError),
        (EngineDiedError("gave up after 5 deaths"), VllmMlxError),
    ],
)
async def test_an_engine_that_has_failed_ends_the_server(
    make_server: ServerFactory, tmp_path: Path, error: VllmMlxError, expected: type
) -> None:
    """A model that cannot load and an engine that keeps dying are told apart."""
    server = await make_server(load=False)
    async with running(server, tmp_path) as run:
        await run.wait_ready()
        server.engine.set(phase="failed", error=error)
        with pytest.raises(VllmMlxError, match=error.message) as caught:
            await run.ended()
        assert type(caught.value) is expected
        assert not run.ready_file.exists()


async def test_a_model_that_never_loads_ends_the_server(
    make_server: ServerFactory, tmp_path: Path
) -> None:
    """Who waits for the model learns why there is none."""
    server = await make_server(load=False)

    async def wait_ready() -> Any:
        raise ModelLoadError("no such weights")

    server.engine.wait_ready = wait_ready
    async with running(server, tmp_path) as run:
        with pytest.raises(ModelLoadError, match="no such weights"):
            await run.ended()
        assert not run.ready_file.exists()


async def test_a_signal_while_loading_ends_it_at_once(
    make_server: ServerFactory, tmp_path: Path
) -> None:
    """Nobody waits for a model that is not wanted any more."""
    server = await make_server(load=False)
    server.engine.set(phase="loading", stage="downloading", fraction=0.1)

    async def wait_ready() -> Any:
        await asyncio.sleep(60)

    server.engine.wait_ready = wait_ready
    async with running(server, tmp_path) as run:
        assert (await run.client.get("/ready")).status_code == 503
        started = asyncio.get_running_loop().time()
        os.kill(os.getpid(), signal.SIGTERM)
        assert await run.ended() == 143
        assert asyncio.get_running_loop().time() - started < 2
