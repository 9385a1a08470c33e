"""Engine processes that die: each request ends once, a new process takes over or is given up."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from vllm_mlx.engine.core.outputs import RowOutput
from vllm_mlx.engine.core.request import GenerationRequest
from vllm_mlx.engine.errors import (
    EngineDiedError,
    EngineUnavailableError,
    InsufficientMemoryError,
    ModelLoadError,
)
from vllm_mlx.engine.host.restart import RestartPolicy
from vllm_mlx.engine.host.stream import RequestStream
from vllm_mlx.engine.host.supervisor import EngineSupervisor

MakeRequest = Callable[..., GenerationRequest]
MakeSupervisor = Callable[..., EngineSupervisor]
Running = Callable[..., AbstractAsyncContextManager[EngineSupervisor]]

#: Commands of the fake engine.
RAISE, KILL, KILL_FIRST, SPAWN_AND_KILL = 1, 2, 5, 7


async def read_all(stream: RequestStream) -> list[RowOutput]:
    """Return every output of a stream."""
    return [row async for row in stream]


async def kill_in_the_middle(supervisor: EngineSupervisor, make_request: MakeRequest) -> None:
    """Kill the engine under eight streams and hold it to what that must look like."""
    pid = supervisor.state.pid
    assert pid is not None
    streams = [supervisor.generate(make_request(max_tokens=100_000)) for _ in range(8)]
    for stream in streams:
        await anext(stream)
    os.kill(pid, signal.SIGKILL)
    started = time.monotonic()
    rows = await asyncio.gather(*(read_all(stream) for stream in streams))
    assert time.monotonic() - started < 1.0
    for one in rows:
        assert [row.finish_reason for row in one if row.finish_reason] == ["error"]
        assert one[-1].error is not None
        assert one[-1].error.code == EngineDiedError.code
        assert "signal 9 (SIGKILL)" in one[-1].error.message
        assert one[-1].error.retry_after_s is not None
        assert one[-1].num_completion_tokens > 0
    assert supervisor.state.phase == "restarting"
    assert supervisor.num_open == 0
    with pytest.raises(EngineUnavailableError, match="restarting") as refused:
        supervisor.generate(make_request())
    assert refused.value.retry_after_s is not None
    await asyncio.wait_for(supervisor.wait_ready(), 5.0)
    assert supervisor.state.pid != pid
    assert (await supervisor.generate(make_request()).collect()).finish_reason == "length"


async def test_a_killed_engine_costs_each_stream_one_error(
    running: Running, make_request: MakeRequest
) -> None:
    """SIGKILL under eight streams ends each once within a second; the next request succeeds."""
    async with running() as supervisor:
        await kill_in_the_middle(supervisor, make_request)
        assert supervisor.state.num_restarts == 1
        assert supervisor.state.error is None


@pytest.mark.faults
async def test_ten_kills_in_a_row_are_survived(running: Running, make_request: MakeRequest) -> None:
    """An engine that is killed ten times, of use each time, comes back each time."""
    async with running() as supervisor:
        for _ in range(10):
            await kill_in_the_middle(supervisor, make_request)
        assert supervisor.state.num_restarts == 10


async def test_a_child_of_a_dead_engine_does_not_hide_the_death(
    running: Running, make_request: MakeRequest
) -> None:
    """A process that outlives the engine with its socket and log open delays nothing."""
    async with running(restart=RestartPolicy(max_deaths=1)) as supervisor:
        started = time.monotonic()
        final = await supervisor.generate(make_request(SPAWN_AND_KILL)).collect()
        assert time.monotonic() - started < 1.0
        assert final.error is not None
        assert "SIGKILL" in final.error.message
        await asyncio.sleep(0.05)
        assert supervisor.state.phase == "failed"


@pytest.mark.faults
@pytest.mark.parametrize("seed", range(3))
async def test_kills_at_any_moment_leave_each_request_one_end(
    running: Running, make_request: MakeRequest, seed: int
) -> None:
    """Kills while loading, serving, restarting and dying leave no request without its one end."""
    chance = random.Random(seed)
    restart = RestartPolicy(initial_s=0.01, max_s=0.01, max_deaths=1000)
    streams: list[asyncio.Task[list[RowOutput]]] = []
    async with running(restart=restart, load_s=0.05) as supervisor:
        for _ in range(40):
            end = time.monotonic() + chance.uniform(0.0, 0.4)
            while time.monotonic() < end:
                if supervisor.state.phase == "ready":
                    stream = supervisor.generate(
                        make_request(max_tokens=chance.choice([1, 5, 500]))
                    )
                    streams.append(asyncio.create_task(read_all(stream)))
                await asyncio.sleep(0.01)
            if supervisor.state.pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(supervisor.state.pid, signal.SIGKILL)
        ends = [
            [row.finish_reason for row in await asyncio.wait_for(task, 2.0) if row.finish_reason]
            for task in streams
        ]
        await asyncio.wait_for(supervisor.wait_ready(), 5.0)
        assert (await supervisor.generate(make_request()).collect()).finish_reason == "length"
    assert {tuple(end) for end in ends} == {("error",), ("length",)}


async def test_a_step_that_raises_ends_the_process(
    running: Running, make_request: MakeRequest, caplog: pytest.LogCaptureFixture
) -> None:
    """An exception out of `step` is an engine's death, with its traceback in the log."""
    async with running() as supervisor:
        final = await supervisor.generate(make_request(RAISE)).collect()
        assert final.finish_reason == "error"
        assert final.error is not None
        assert "exit code 70" in final.error.message
        assert "RuntimeError: the step failed" in caplog.text
        # The traceback is for the log and the state, not for clients.
        assert "Traceback" not in final.error.message
        error = supervisor.state.error
        assert error is not None
        assert "the step failed" in error.message
        await supervisor.wait_ready()


async def test_a_request_that_kills_again_and_again_does_not_end_the_service(
    running: Running, make_request: MakeRequest
) -> None:
    """Lives that generated something do not count against the engine."""
    async with running() as supervisor:
        for _ in range(4):
            final = await supervisor.generate(make_request(KILL)).collect()
            assert final.finish_reason == "error"
            await asyncio.wait_for(supervisor.wait_ready(), 5.0)
        assert supervisor.state.num_restarts == 4


async def test_an_engine_that_dies_at_once_is_given_up(
    running: Running, make_request: MakeRequest
) -> None:
    """Three lives that end before any output are the last; the error says why."""
    async with running() as supervisor:
        for _ in range(3):
            final = await supervisor.generate(make_request(KILL_FIRST)).collect()
            assert final.finish_reason == "error"
            state = supervisor.state
            while state.phase == "restarting":
                state = await supervisor.wait_for_change(state)
        assert supervisor.state.phase == "failed"
        assert supervisor.state.retry_after_s is None
        with pytest.raises(EngineDiedError, match=r"gave up after 3 .* signal 9"):
            await supervisor.wait_ready()
        with pytest.raises(EngineUnavailableError, match="has failed") as refused:
            supervisor.generate(make_request())
        assert refused.value.retry_after_s is None


async def test_deaths_while_loading_are_retried(
    make_supervisor: MakeSupervisor, tmp_path: Path
) -> None:
    """Two deaths while loading cost two restarts; the third process gets ready."""
    supervisor = make_supervisor(num_load_deaths=2, count_file=str(tmp_path / "loads"))
    await supervisor.start()
    await asyncio.wait_for(supervisor.wait_ready(), 5.0)
    assert supervisor.state.num_restarts == 2
    await supervisor.stop(0)


async def test_giving_up_quotes_the_last_words(
    make_supervisor: MakeSupervisor, tmp_path: Path
) -> None:
    """A process that never gets ready is given up with what it printed, and may be started anew."""
    supervisor = make_supervisor(num_load_deaths=3, count_file=str(tmp_path / "loads"))
    await supervisor.start()
    with pytest.raises(EngineDiedError, match=r"signal 9 \(SIGKILL\)[^$]*about to die"):
        await asyncio.wait_for(supervisor.wait_ready(), 5.0)
    assert supervisor.state.pid is None
    await supervisor.start()
    await asyncio.wait_for(supervisor.wait_ready(), 5.0)
    assert supervisor.state.error is None
    await supervisor.stop(0)


@pytest.mark.parametrize(
    ("failure", "kind", "message"),
    [
        ("memory", InsufficientMemoryError, "12 GiB do not fit"),
        ("bug", ModelLoadError, "KeyError: 'hidden_size'"),
    ],
)
async def test_a_model_that_cannot_be_loaded_is_not_retried(
    make_supervisor: MakeSupervisor,
    caplog: pytest.LogCaptureFixture,
    failure: str,
    kind: type[ModelLoadError],
    message: str,
) -> None:
    """A clean load error fails at once, as itself, and is left to be told by who waits for it."""
    supervisor = make_supervisor(load_failure=failure)
    await supervisor.start()
    with pytest.raises(kind, match=message) as failed:
        await asyncio.wait_for(supervisor.wait_ready(), 5.0)
    assert type(failed.value) is kind
    assert (supervisor.state.phase, supervisor.state.num_restarts) == ("failed", 0)
    told = [record for record in caplog.records if record.name.endswith(".supervisor")]
    assert [record for record in told if record.levelno > logging.DEBUG] == []
    await supervisor.stop(0)
    assert (supervisor.state.phase, supervisor.state.pid) == ("stopped", None)


async def test_a_model_that_was_loaded_before_is_tried_again(
    running: Running, make_request: MakeRequest, tmp_path: Path
) -> None:
    """After one good load a load error is the moment's: retried, and given up as itself."""
    counted = str(tmp_path / "loads")
    async with running(num_good_loads=1, count_file=counted) as supervisor:
        await supervisor.generate(make_request(KILL)).collect()
        with pytest.raises(InsufficientMemoryError, match=r"gave up after 3 .*not enough memory"):
            await asyncio.wait_for(supervisor.wait_ready(), 5.0)
        assert Path(counted).stat().st_size == 4


async def test_a_command_that_cannot_start_is_given_up(make_supervisor: MakeSupervisor) -> None:
    """A missing executable is named when the supervisor gives up."""
    restart = RestartPolicy(initial_s=0.01, max_deaths=2)
    supervisor = make_supervisor(command=("/no/such/interpreter",), restart=restart)
    await supervisor.start()
    with pytest.raises(EngineDiedError, match=r"could not be started.*/no/such/interpreter"):
        await asyncio.wait_for(supervisor.wait_ready(), 5.0)
    await supervisor.stop(0)


async def test_a_process_that_talks_nonsense_is_replaced(make_supervisor: MakeSupervisor) -> None:
    """Bytes that are no message end the process that sent them."""
    fake = str(Path(__file__).with_name("fake_engine.py"))
    supervisor = make_supervisor(
        command=(sys.executable, fake, "--garbage"),
        restart=RestartPolicy(initial_s=0.01, max_deaths=1),
    )
    await supervisor.start()
    with pytest.raises(EngineDiedError, match="gave up after 1 "):
        await asyncio.wait_for(supervisor.wait_ready(), 5.0)
    await supervisor.stop(0)


async def test_sigterm_ends_an_engine_and_the_supervisor_replaces_it(
    running: Running, make_request: MakeRequest
) -> None:
    """SIGTERM to the engine alone is a death like any other; SIGINT is none."""
    async with running() as supervisor:
        pid = supervisor.state.pid
        assert pid is not None
        os.kill(pid, signal.SIGINT)
        assert (await supervisor.generate(make_request()).collect()).finish_reason == "length"
        assert supervisor.state.pid == pid
        os.kill(pid, signal.SIGTERM)
        state = supervisor.state
        while state.phase == "ready":
            state = await asyncio.wait_for(supervisor.wait_for_change(state), 5.0)
        await asyncio.wait_for(supervisor.wait_ready(), 5.0)
        assert supervisor.state.num_restarts == 1
