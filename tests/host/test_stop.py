"""Stopping a supervisor in every phase leaves no process, no open request and no task behind."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import psutil
import pytest

from vllm_mlx.engine.core.request import GenerationRequest
from vllm_mlx.engine.errors import EngineUnavailableError
from vllm_mlx.engine.host.restart import RestartPolicy
from vllm_mlx.engine.host.supervisor import EngineSupervisor

MakeRequest = Callable[..., GenerationRequest]
MakeSupervisor = Callable[..., EngineSupervisor]
Running = Callable[..., AbstractAsyncContextManager[EngineSupervisor]]

#: Commands of the fake engine.
KILL, SPIN = 2, 3


def other_tasks() -> set[asyncio.Task[object]]:
    """Return the tasks of this loop that are not the test itself."""
    return asyncio.all_tasks() - {asyncio.current_task()}


async def test_an_idle_engine_stops_at_once(
    make_supervisor: MakeSupervisor, caplog: pytest.LogCaptureFixture
) -> None:
    """Stopping idle takes well under two seconds, closes the engine and leaves no task."""
    supervisor = make_supervisor()
    await supervisor.start()
    await supervisor.wait_ready()
    started = time.monotonic()
    await supervisor.stop(10.0)
    assert time.monotonic() - started < 1.0
    assert supervisor.state.phase == "stopped"
    assert other_tasks() == set()
    assert "closed" in caplog.text
    await supervisor.stop(10.0)


async def test_running_requests_are_drained(running: Running, make_request: MakeRequest) -> None:
    """A stop lets what runs finish and refuses what is new."""
    async with running(step_s=0.01) as supervisor:
        stream = supervisor.generate(make_request(max_tokens=30))
        await anext(stream)
        stopping = asyncio.create_task(supervisor.stop(10.0))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert supervisor.state.phase == "draining"
        with pytest.raises(EngineUnavailableError, match="draining"):
            supervisor.generate(make_request())
        assert (await supervisor.stats()).num_running == 1
        assert (await stream.collect()).finish_reason == "length"
        await asyncio.wait_for(stopping, 2.0)


async def test_what_does_not_finish_in_time_is_aborted(
    running: Running, make_request: MakeRequest
) -> None:
    """After the drain timeout each open request gets one final `abort`."""
    async with running() as supervisor:
        streams = [supervisor.generate(make_request(max_tokens=100_000)) for _ in range(3)]
        started = time.monotonic()
        await supervisor.stop(0.3)
        assert 0.3 <= time.monotonic() - started < 1.5
        for stream in streams:
            rows = [row async for row in stream]
            assert [row.finish_reason for row in rows if row.finish_reason] == ["abort"]


async def test_a_second_stop_shortens_the_first(
    running: Running, make_request: MakeRequest
) -> None:
    """A second stop without patience ends the drain of the first."""
    async with running() as supervisor:
        stream = supervisor.generate(make_request(max_tokens=100_000))
        first = asyncio.create_task(supervisor.stop(60.0))
        await asyncio.sleep(0.05)
        await asyncio.wait_for(supervisor.stop(0), 2.0)
        await asyncio.wait_for(first, 0.1)
        assert (await stream.collect()).finish_reason == "abort"


async def test_a_cancelled_stop_goes_on(running: Running, make_request: MakeRequest) -> None:
    """Cancelling who waits for the stop does not cancel the stopping."""
    async with running() as supervisor:
        supervisor.generate(make_request(max_tokens=20))
        waiting = asyncio.create_task(supervisor.stop(10.0))
        await asyncio.sleep(0.01)
        waiting.cancel()
        state = supervisor.state
        while state.phase != "stopped":
            state = await asyncio.wait_for(supervisor.wait_for_change(state), 2.0)


async def test_stopping_while_loading(make_supervisor: MakeSupervisor) -> None:
    """A load that would take a minute does not delay the stop."""
    supervisor = make_supervisor(load_s=60.0)
    await supervisor.start()
    while supervisor.state.stage != "loading weights":
        await supervisor.wait_for_change(supervisor.state)
    waiting = asyncio.create_task(supervisor.wait_ready())
    await asyncio.sleep(0)
    started = time.monotonic()
    await supervisor.stop(10.0)
    assert time.monotonic() - started < 1.0
    with pytest.raises(EngineUnavailableError):
        await waiting
    assert other_tasks() == set()


async def test_stopping_right_after_start(make_supervisor: MakeSupervisor) -> None:
    """A stop before the process exists leaves none."""
    supervisor = make_supervisor()
    await supervisor.start()
    await supervisor.stop(10.0)
    assert supervisor.state.phase == "stopped"
    started_again = await _start_and_wait(supervisor)
    assert started_again == "ready"
    await supervisor.stop(0)


async def _start_and_wait(supervisor: EngineSupervisor) -> str:
    await supervisor.start()
    await supervisor.wait_ready()
    return supervisor.state.phase


async def test_stopping_between_two_processes(running: Running, make_request: MakeRequest) -> None:
    """A stop during the wait for a restart ends the wait."""
    async with running(restart=RestartPolicy(initial_s=60.0, max_s=60.0)) as supervisor:
        await supervisor.generate(make_request(KILL)).collect()
        assert supervisor.state.phase == "restarting"
        started = time.monotonic()
        await supervisor.stop(10.0)
        assert time.monotonic() - started < 0.5


async def test_an_engine_that_dies_while_draining_is_not_restarted(
    running: Running, make_request: MakeRequest
) -> None:
    """A death during the drain gives the open requests an error and ends the stop."""
    async with running() as supervisor:
        stream = supervisor.generate(make_request(max_tokens=100_000))
        stopping = asyncio.create_task(supervisor.stop(60.0))
        await anext(stream)
        pid = supervisor.state.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        assert (await stream.collect()).finish_reason == "error"
        await asyncio.wait_for(stopping, 2.0)
        assert supervisor.state.num_restarts == 0


@pytest.mark.parametrize("trouble", ["spin", "stopped", "slow to close"])
async def test_an_engine_that_does_not_shut_down_is_killed(
    running: Running, make_request: MakeRequest, trouble: str
) -> None:
    """A process that hangs, is stopped, or closes too slowly is gone after the grace."""
    close_s = 60.0 if trouble == "slow to close" else 0.0
    async with running(stop_grace_s=0.2, close_s=close_s) as supervisor:
        pid = supervisor.state.pid
        assert pid is not None
        if trouble == "spin":
            await anext(supervisor.generate(make_request(SPIN)))
        elif trouble == "stopped":
            os.kill(pid, signal.SIGSTOP)
        started = time.monotonic()
        await supervisor.stop(0.1)
        assert time.monotonic() - started < 1.5
        assert not psutil.pid_exists(pid)


async def test_an_engine_that_closes_slowly_is_waited_for(
    running: Running, caplog: pytest.LogCaptureFixture
) -> None:
    """An engine gets the time to close in order."""
    async with running(close_s=0.5) as supervisor:
        await supervisor.stop(0)
    assert "closed" in caplog.text


async def test_a_step_that_nobody_waits_for_does_not_hold_up_the_stop(
    running: Running, make_request: MakeRequest, caplog: pytest.LogCaptureFixture
) -> None:
    """After the only client has left, a stop ends the process in the middle of a long step."""
    async with running(step_s=30.0) as supervisor:
        stream = supervisor.generate(make_request())
        await asyncio.sleep(0.1)
        await stream.aclose()
        pid = supervisor.state.pid
        started = time.monotonic()
        await supervisor.stop(10.0)
        assert time.monotonic() - started < 2.5
        assert pid is not None
        assert not psutil.pid_exists(pid)
    assert "closed" not in caplog.text


async def test_a_short_step_is_waited_for_so_that_the_engine_can_close(
    running: Running, make_request: MakeRequest, caplog: pytest.LogCaptureFixture
) -> None:
    """An engine that gets to the end of its step soon closes in order, as long as that takes."""
    async with running(step_s=0.2, close_s=1.5) as supervisor:
        stream = supervisor.generate(make_request())
        await anext(stream)
        await stream.aclose()
        await supervisor.stop(10.0)
    assert "closed" in caplog.text
