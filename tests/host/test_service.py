"""A service in a process of its own: parts, errors, turns, leaving, dying and loading."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from support import scripted_service
from support.scripted_service import SCRIPTED, ScriptedConfig, ScriptedPart, ScriptedRequest

from vllm_mlx.engine.errors import (
    EngineDiedError,
    EngineUnavailableError,
    InvalidRequestError,
    RequestAbortedError,
    RowFailedError,
    UnsupportedModelError,
)
from vllm_mlx.engine.host.restart import RestartPolicy
from vllm_mlx.engine.host.service_supervisor import ServiceSupervisor

COMMAND = (sys.executable, str(Path(scripted_service.__file__)))
RESTART = RestartPolicy(initial_s=0.02, max_s=0.05, max_deaths=3)

Scripted = ServiceSupervisor[ScriptedConfig, ScriptedRequest, ScriptedPart]


def make(**options: Any) -> Scripted:
    """Return a supervisor that has not been started."""
    return ServiceSupervisor(SCRIPTED, ScriptedConfig(**options), command=COMMAND, restart=RESTART)


@contextlib.asynccontextmanager
async def running() -> AsyncIterator[Scripted]:
    """Run a ready service, stopped at the end."""
    supervisor = make()
    await supervisor.start()
    try:
        await supervisor.wait_ready()
        yield supervisor
    finally:
        await supervisor.stop(0)


async def test_parts_come_in_order_and_end() -> None:
    """A call's parts arrive in order, and the stream ends after them."""
    async with running() as service:
        info = service.info
        parts = [part.number async for part in service.call("a", ScriptedRequest(num_parts=4))]
        assert service.num_open == 0
    assert parts == [0, 1, 2, 3]
    assert info is not None
    assert (info.kind, info.details) == ("scripted", {"dimensions": 3})


async def test_errors_end_their_call_only() -> None:
    """A refusal arrives as what it is, a bug as a failed row, and the process goes on."""
    async with running() as service:
        pid = service.state.pid
        with pytest.raises(InvalidRequestError, match="too long") as refused:
            await anext(service.call("a", ScriptedRequest(num_parts=0, end="refuse")))
        assert refused.value.param == "input[1]"
        with pytest.raises(RowFailedError, match="ValueError: a bug"):
            await anext(service.call("b", ScriptedRequest(num_parts=0, end="bug")))
        assert [part.number async for part in service.call("c", ScriptedRequest())] == [0, 1, 2]
        assert service.state.pid == pid


async def test_calls_take_turns() -> None:
    """A short call that comes later ends while a long one still works."""
    async with running() as service:
        long = service.call("long", ScriptedRequest(num_parts=10_000, part_s=0.001))
        await anext(long)
        assert len([part async for part in service.call("short", ScriptedRequest())]) == 3
        assert not long.is_ended
        await long.aclose()


async def test_a_call_that_its_client_leaves_is_closed(tmp_path: Path) -> None:
    """Leaving closes the iterator in the process, for waiting calls too, and frees their places."""
    async with running() as service:
        marks = [tmp_path / str(number) for number in range(2)]
        calls = [
            service.call(
                str(number),
                ScriptedRequest(num_parts=10**6, part_s=0.001, closed_file=str(mark)),
            )
            for number, mark in enumerate(marks)
        ]
        # Both places are taken: this one only waits.
        waiting = service.call("waiting", ScriptedRequest())
        for call in calls:
            await anext(call)
        await waiting.aclose()
        for call in calls:
            await call.aclose()
        with pytest.raises(RequestAbortedError):
            await anext(waiting)
        assert len([part async for part in service.call("next", ScriptedRequest())]) == 3
        assert all(mark.exists() for mark in marks)


async def test_what_is_not_read_waits_in_the_process() -> None:
    """Parts far larger than the socket's buffer arrive whole, with statistics in between."""
    async with running() as service:
        request = ScriptedRequest(num_parts=8, num_bytes=1 << 21)
        parts = [len(part.data) async for part in service.call("a", request)]
    assert parts == [1 << 21] * 8


async def test_a_dead_process_ends_its_calls_and_is_started_again() -> None:
    """A kill ends every open call with a clean error; the next process answers."""
    async with running() as service:
        first = service.state.pid
        assert first is not None
        call = service.call("a", ScriptedRequest(num_parts=10**6, part_s=0.001))
        await anext(call)
        os.kill(first, signal.SIGKILL)
        with pytest.raises(EngineDiedError, match="SIGKILL"):
            async for _ in call:
                pass
        with contextlib.suppress(EngineUnavailableError):
            service.call("b", ScriptedRequest())
        await service.wait_ready()
        assert len([part async for part in service.call("c", ScriptedRequest())]) == 3
        assert service.state.pid != first
        assert service.state.num_restarts == 1


async def test_a_model_that_cannot_be_loaded_is_not_tried_again() -> None:
    """The error of the tree that loading raised is what waiting for the service raises."""
    service = make(is_unsupported=True)
    await service.start()
    with pytest.raises(UnsupportedModelError, match="no such kind"):
        await service.wait_ready()
    assert service.state.num_restarts == 0
    await service.stop(0)


async def test_a_stop_waits_for_open_calls_and_then_ends_them() -> None:
    """Within the drain time a call may finish; after it, it ends as aborted."""
    service = make()
    await service.start()
    await service.wait_ready()
    quick = service.call("quick", ScriptedRequest(part_s=0.01))
    endless = service.call("endless", ScriptedRequest(num_parts=10**6, part_s=0.001))
    await asyncio.gather(anext(quick), anext(endless))
    stopping = asyncio.create_task(service.stop(60))
    assert [part.number async for part in quick] == [1, 2]
    assert not endless.is_ended
    # A second call ends the waiting.
    await service.stop(0)
    await stopping
    with pytest.raises(RequestAbortedError):
        async for _ in endless:
            pass
    with pytest.raises(EngineUnavailableError):
        service.call("late", ScriptedRequest())
