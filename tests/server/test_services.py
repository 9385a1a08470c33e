"""Engines beside the chat model: found by name, ready, counted, and never in the chat's way."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from support import scripted_service
from support.scripted_service import SCRIPTED, ScriptedConfig, ScriptedPart, ScriptedRequest

from vllm_mlx.engine.errors import (
    EngineDiedError,
    EngineUnavailableError,
    ModelUnknownError,
    OverloadedError,
    RequestTimeoutError,
    UnsupportedModelError,
    UsageError,
)
from vllm_mlx.engine.host.restart import RestartPolicy
from vllm_mlx.engine.host.service import ServiceKind
from vllm_mlx.engine.host.service_supervisor import ServiceSupervisor
from vllm_mlx.server.request_context import RequestContext
from vllm_mlx.server.services.plan import ServicePlan, split_served_name

if TYPE_CHECKING:
    from tests.server.conftest import Served, ServerFactory

COMMAND = (sys.executable, scripted_service.__file__)
RESTART = RestartPolicy(initial_s=0.02, max_s=0.05, max_deaths=3)

#: The scripted kind under the name of a real one.
KIND: ServiceKind[ScriptedConfig, ScriptedRequest, ScriptedPart] = replace(
    SCRIPTED, name="embedding"
)


def planned(model: str = "org/encoder", **config: Any) -> tuple[ServicePlan, Any]:
    """Return a service of the real supervisor around the scripted process."""
    loading = ScriptedConfig(**config)
    port = ServiceSupervisor(KIND, loading, command=COMMAND, restart=RESTART)
    return ServicePlan(KIND, loading, model, served_name="small"), port


@contextlib.asynccontextmanager
async def started(server: Served) -> AsyncIterator[Served]:
    """Run the services of a server, stopped at the end."""
    await server.runtime.services.start()
    try:
        yield server
    finally:
        await server.runtime.services.stop(0)


async def get(server: Served, path: str) -> tuple[int, Any]:
    """Return the status and the JSON of a route."""
    response = await server.client.get(path)
    return response.status_code, await response.get_json()


async def test_services_are_found_by_kind_and_name(make_server: ServerFactory) -> None:
    """A path, a hub id, a served name, `default` and no name all find it; others name the flag."""
    server = await make_server(services=[planned()])
    find = server.runtime.services.find
    service = find("embedding", None)
    assert {find("embedding", name) for name in ("org/encoder", "small", "default")} == {service}
    with pytest.raises(ModelUnknownError, match=r"'other' does not exist.*--embedding-model"):
        find("embedding", "other")
    with pytest.raises(ModelUnknownError, match=r"no rerank model.*--rerank-model MODEL"):
        find("rerank", "default")


async def test_a_server_without_chat_is_ready_with_its_services(make_server: ServerFactory) -> None:
    """`/ready` is 503 with progress while they load, then 200; chat routes say why they are 404."""
    server = await make_server(services=[planned(load_s=0.8)], serves_chat=False)
    async with started(server):
        status, body = await get(server, "/ready")
        assert (status, body["status"]) == (503, "loading")
        assert "embedding model is loading" in body["message"]
        await server.runtime.services.wait_loaded()
        assert await get(server, "/ready") == (200, {"status": "ready", "model": "small"})
        assert (await get(server, "/health"))[1] == {"status": "healthy", "model_loaded": True}
        response = await server.chat()
        assert response.status_code == 404
        assert "--no-chat-model" in (await response.get_json())["error"]["message"]
        _, models = await get(server, "/v1/models")
        assert [(m["id"], m["kind"], m["dimensions"]) for m in models["data"]] == [
            ("small", "embedding", 3)
        ]
        status, model = await get(server, "/v1/models/org/encoder")
        assert (status, model["root"]) == (200, "org/encoder")
        _, report = await get(server, "/v1/status")
        assert (report["status"], report["services"][0]["phase"]) == ("running", "ready")


async def test_calls_are_counted_by_outcome(make_server: ServerFactory) -> None:
    """The metrics tell answers from refusals and faults, with the labels of kind and model."""
    server = await make_server(services=[planned()], metrics=True)
    async with started(server):
        await server.runtime.services.wait_loaded()
        service = server.runtime.services.find("embedding", None)
        for end in ("", "refuse", "bug"):
            context = RequestContext(f"req-{end}")
            async with context.closing:
                call = await service.start_call(context, ScriptedRequest(end=end))
                with contextlib.suppress(Exception):
                    assert len(await call.collect()) == 3
        context = RequestContext("req-left")
        async with context.closing:
            call = await service.start_call(context, ScriptedRequest(part_s=0.01, num_parts=10**6))
        response = await server.client.get("/metrics")
        lines = (await response.get_data(as_text=True)).splitlines()
        found = {line for line in lines if line.startswith("vllm_mlx_service")}
        for outcome in ("success", "refused", "error", "aborted"):
            labels = f'kind="embedding",model="small",outcome="{outcome}"'
            assert f"vllm_mlx_service_requests_total{{{labels}}} 1.0" in found
        assert 'vllm_mlx_service_up{kind="embedding",model="small"} 1.0' in found


async def test_killing_a_service_leaves_chat_alone(make_server: ServerFactory) -> None:
    """The open call ends with a clean error, chat and readiness go on, and it comes back."""
    server = await make_server(services=[planned()])
    async with started(server):
        await server.runtime.services.wait_loaded()
        service = server.runtime.services.find("embedding", None)
        context = RequestContext("req-1")
        async with context.closing:
            call = await service.start_call(context, ScriptedRequest(part_s=0.01, num_parts=10**6))
            parts = call.parts()
            await anext(parts)
            os.kill(service.port.state.pid, signal.SIGKILL)
            with pytest.raises(EngineDiedError):
                async for _ in parts:
                    pass
        assert (await server.chat()).status_code == 200
        assert (await get(server, "/ready"))[0] == 200
        await service.port.wait_ready()
        again = RequestContext("req-2")
        async with again.closing:
            call = await service.start_call(again, ScriptedRequest())
            assert len(await call.collect()) == 3
        assert service.port.state.num_restarts == 1


async def test_loading_on_demand_waits_for_the_first_request(make_server: ServerFactory) -> None:
    """Nothing is loaded at the start, `/ready` does not wait, and the first requests share one."""
    server = await make_server(services=[planned(load_s=0.1)], loads_on_demand=True)
    async with started(server):
        service = server.runtime.services.find("embedding", None)
        assert (service.port.state.phase, (await get(server, "/ready"))[0]) == ("stopped", 200)

        async def ask(number: int) -> int:
            context = RequestContext(f"req-{number}")
            async with context.closing:
                call = await service.start_call(context, ScriptedRequest())
                return len(await call.collect())

        assert await asyncio.gather(ask(1), ask(2)) == [3, 3]
    with pytest.raises(EngineUnavailableError, match="shutting down"):
        await ask(3)


async def test_a_model_that_cannot_load_is_told_of(make_server: ServerFactory) -> None:
    """Waiting for the services raises the reason; on demand the request gets it."""
    server = await make_server(services=[planned(is_unsupported=True)])
    async with started(server):
        with pytest.raises(UnsupportedModelError):
            await server.runtime.services.wait_loaded()
        service = server.runtime.services.find("embedding", None)
        with pytest.raises(EngineUnavailableError, match="no such kind of model"):
            await service.start_call(RequestContext("req-1"), ScriptedRequest())


async def test_the_queue_and_the_silence_are_bounded(make_server: ServerFactory) -> None:
    """Over the places and the queue a request is refused with 429; silence ends with a timeout."""
    server = await make_server(services=[planned()], max_queue=0, timeout_s=0.2)
    async with started(server):
        await server.runtime.services.wait_loaded()
        service = server.runtime.services.find("embedding", None)
        context, other = RequestContext("req-0"), RequestContext("req-0b")
        async with context.closing, other.closing:
            slow = ScriptedRequest(num_parts=1, part_s=0.6)
            call = await service.start_call(context, slow)
            await service.start_call(other, slow)
            with pytest.raises(OverloadedError):
                await service.start_call(RequestContext("req-1"), slow)
            with pytest.raises(RequestTimeoutError):
                await call.collect()


def test_models_are_written_with_or_without_a_name(tmp_path: Any) -> None:
    """`NAME=MODEL` gives the name; a folder with an equals sign, and a plain model, have none."""
    folder = tmp_path / "a=b"
    folder.mkdir()
    assert split_served_name("e5=org/e5") == ("e5", "org/e5")
    assert split_served_name("org/e5") == (None, "org/e5")
    assert split_served_name(str(folder)) == (None, str(folder))
    with pytest.raises(UsageError):
        split_served_name("=org/e5")
