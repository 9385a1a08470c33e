"""The outermost layer: ids, access log, and clients that leave at any moment."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest

from vllm_mlx.server.lifecycle import RequestLifecycle
from vllm_mlx.server.metrics import ServerMetrics
from vllm_mlx.server.request_context import SCOPE_KEY
from vllm_mlx.server.request_record import RequestRecords

if TYPE_CHECKING:
    from tests.server.conftest import Served, ServerFactory

CHAT = b'{"messages": [{"role": "user", "content": "secret words"}], "stream": %s}'


def records() -> RequestRecords:
    """Return records of no requests."""
    return RequestRecords(ServerMetrics("org/model"))


async def leave(server: Served, *, stream: bool, after_chunks: int) -> Any:
    """Open a chat, read so many chunks, and disconnect."""
    async with server.client.request("/v1/chat/completions", method="POST") as connection:
        await connection.send(CHAT % (b"true" if stream else b"false"))
        await connection.send_complete()
        while not server.engine.requests:
            await server.engine.sleep()
        for _ in range(after_chunks):
            server.engine.put(server.engine.requests[0].request_id, "x")
            await connection.receive()
        await connection.disconnect()
    return connection


@pytest.mark.parametrize(("stream", "after_chunks"), [(False, 0), (True, 0), (True, 1), (True, 3)])
async def test_a_client_that_leaves_ends_its_request(
    make_server: ServerFactory,
    caplog: pytest.LogCaptureFixture,
    stream: bool,
    after_chunks: int,
) -> None:
    """Its row is aborted, nothing stays open, and the log says 499."""
    server = await make_server()
    server.engine.is_held = True
    with caplog.at_level("INFO", "vllm_mlx.access"):
        await leave(server, stream=stream, after_chunks=after_chunks)
    request_id = server.engine.requests[0].request_id
    assert server.engine.left == [request_id]
    assert server.runtime.generations.num_open_rows == 0
    (line,) = [r.getMessage() for r in caplog.records if r.name == "vllm_mlx.access"]
    assert " 499 " in line
    assert request_id in line


async def test_the_access_log_has_no_prompt_key_or_query(
    make_server: ServerFactory, caplog: pytest.LogCaptureFixture
) -> None:
    """One line a request, with status, time and id; an error adds its code."""
    server = await make_server(api_keys=("secret-key",))
    headers = {"Authorization": "Bearer secret-key"}
    with caplog.at_level("DEBUG"):
        await server.client.post(
            "/v1/chat/completions?key=secret-query", data=CHAT % b"false", headers=headers
        )
        await server.client.post("/v1/chat/completions", data=b"{", headers=headers)
        await server.client.get("/v1/line%0Abreak", headers=headers)
    lines = [r.getMessage() for r in caplog.records if r.name == "vllm_mlx.access"]
    assert len(lines) == 3
    assert "POST /v1/chat/completions 200 " in lines[0]
    assert "POST /v1/chat/completions 400 " in lines[1]
    assert lines[1].endswith(" invalid_value")
    assert "GET /v1/line%0Abreak 404 " in lines[2]
    assert "secret" not in caplog.text


async def test_probes_do_not_fill_the_log(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    """Health and readiness are logged for debugging only."""
    with caplog.at_level("INFO", "vllm_mlx.access"):
        await served.client.get("/health")
        await served.client.get("/ready")
    assert caplog.records == []


async def test_a_request_is_closed_though_its_response_never_began() -> None:
    """What a handler opened is closed even if no chunk was ever asked for."""
    closed = asyncio.Event()

    async def application(scope: Any, receive: Any, send: Any) -> None:
        async def close() -> None:
            closed.set()

        scope[SCOPE_KEY].closing.push_async_callback(close)
        await asyncio.sleep(60)

    async def receive() -> Any:
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        raise AssertionError("nothing is sent")

    scope = {"type": "http", "path": "/v1/completions", "method": "POST", "client": ("::1", 1)}
    task = asyncio.create_task(RequestLifecycle(application, records())(scope, receive, send))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert closed.is_set()


@pytest.mark.parametrize("num_swallowed", [0, 1, 3])
async def test_an_application_ends_when_its_client_left_even_if_it_swallows_that(
    num_swallowed: int,
) -> None:
    """It is cancelled until it ends, what it opened is closed, and nothing is raised."""
    closed: list[bool] = []

    async def handle(scope: Any) -> None:
        async def close() -> None:
            closed.append(True)

        scope[SCOPE_KEY].closing.push_async_callback(close)
        for _ in range(num_swallowed):
            with suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
        await asyncio.Event().wait()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        handling = asyncio.create_task(handle(scope))
        while (await receive())["type"] != "http.disconnect":
            await asyncio.sleep(0)
        handling.cancel()
        await asyncio.gather(handling, return_exceptions=True)

    messages = [{"type": "http.request"}, {"type": "http.disconnect"}]

    async def receive() -> Any:
        return messages.pop(0)

    async def send(message: Any) -> None:
        raise AssertionError(message)

    scope = {"type": "http", "path": "/", "method": "POST"}
    async with asyncio.timeout(3):
        await RequestLifecycle(app, records())(scope, receive, send)
    assert closed == [True]
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
