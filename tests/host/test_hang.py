"""Steps that never end: the engine is ended and started again; what is merely slow goes on."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import pytest

from vllm_mlx.engine.config import EngineConfig
from vllm_mlx.engine.core.outputs import pack_tokens
from vllm_mlx.engine.core.request import GenerationRequest, SamplingParams
from vllm_mlx.engine.core.stats import EngineStats
from vllm_mlx.engine.errors import EngineDiedError, UsageError
from vllm_mlx.engine.host.client import EngineClient
from vllm_mlx.engine.host.messages import GetStats, ToEngine
from vllm_mlx.engine.host.restart import RestartPolicy
from vllm_mlx.engine.host.supervisor import EngineSupervisor
from vllm_mlx.engine.host.watchdog import StepWatchdog

MakeRequest = Callable[..., GenerationRequest]
Running = Callable[..., AbstractAsyncContextManager[EngineSupervisor]]

#: Commands of the fake engine: a loop that lets other threads run, and a call that does not.
SPIN, HOLD_LOCK = 3, 6
#: The loop before any output.
SPIN_FIRST = 8

REQUEST = GenerationRequest(request_id="a", prompt=pack_tokens([1]), sampling=SamplingParams())


@pytest.mark.parametrize("command", [SPIN, HOLD_LOCK])
async def test_a_hanging_step_is_an_engine_death_with_its_reason(
    running: Running, make_request: MakeRequest, command: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Each stream gets one error, the log the stacks, and the next request a new engine."""
    caplog.set_level(logging.INFO)
    async with running(step_timeout_s=0.4) as supervisor:
        pid = supervisor.state.pid
        streams = [supervisor.generate(make_request(n, max_tokens=10**6)) for n in (command, 0)]
        started = time.monotonic()
        finals = await asyncio.wait_for(asyncio.gather(*(s.collect() for s in streams)), 5)
        assert 0.4 <= time.monotonic() - started < 3
        for final in finals:
            assert final.error is not None
            assert final.error.code == EngineDiedError.code
            assert "a step did not finish within 0.4 s" in final.error.message
        await asyncio.wait_for(supervisor.wait_ready(), 5)
        assert supervisor.state.pid != pid
        assert (await supervisor.generate(make_request()).collect()).finish_reason == "length"
    assert "in _misbehave" in caplog.text


async def test_an_engine_that_always_hangs_is_given_up_with_the_reason(
    running: Running, make_request: MakeRequest
) -> None:
    """The last error says what happened."""
    restart = RestartPolicy(max_deaths=1, healthy_s=3600)
    async with running(step_timeout_s=0.2, restart=restart) as supervisor:
        await supervisor.generate(make_request(SPIN_FIRST)).collect()
        state = supervisor.state
        while state.phase != "failed":
            state = await asyncio.wait_for(supervisor.wait_for_change(state), 5)
        assert state.error is not None
        assert "a step did not finish within 0.2 s" in state.error.message


async def test_an_engine_that_was_stopped_longer_than_a_step_may_take_goes_on(
    running: Running, make_request: MakeRequest
) -> None:
    """SIGSTOP is no hang: the same process ends the same stream after SIGCONT."""
    async with running(step_timeout_s=0.4) as supervisor:
        stream = supervisor.generate(make_request(max_tokens=300))
        await anext(stream)
        pid = supervisor.state.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(1.2)
        assert supervisor.state.pid == pid
        os.kill(pid, signal.SIGCONT)
        final = await asyncio.wait_for(stream.collect(), 10)
        assert (final.finish_reason, supervisor.state.num_restarts) == ("length", 0)


async def test_steps_a_little_faster_than_the_limit_go_on(
    running: Running, make_request: MakeRequest
) -> None:
    """Each step has the limit for itself."""
    async with running(step_timeout_s=0.6, step_s=0.3) as supervisor:
        final = await supervisor.generate(make_request(max_tokens=5)).collect()
        assert (final.finish_reason, supervisor.state.num_restarts) == ("length", 0)


async def test_without_a_limit_a_step_may_take_any_time(
    running: Running, make_request: MakeRequest
) -> None:
    """0 switches the watchdog off."""
    async with running(step_timeout_s=0, step_s=0.5) as supervisor:
        final = await supervisor.generate(make_request(max_tokens=2)).collect()
        assert final.finish_reason == "length"


async def wait_hung(client: EngineClient, *, is_stopped: bool = False) -> bool:
    """Say whether a watchdog of 0.1 s finds the engine behind `client` hung within 0.5 s."""
    watchdog = StepWatchdog(client, 0.1, lambda: is_stopped)
    try:
        await asyncio.wait_for(watchdog.wait_hung(), 0.5)
    except TimeoutError:
        return False
    return True


async def test_silence_is_no_hang_while_the_engine_answers() -> None:
    """Steps of prefill have no output; that they end is asked for."""
    answering: list[EngineClient] = []

    def answer(message: ToEngine) -> None:
        if isinstance(message, GetStats):
            loop = asyncio.get_running_loop()
            loop.call_soon(answering[0].deliver, EngineStats())

    answering.append(EngineClient(answer))
    answering[0].generate(REQUEST)
    assert not await wait_hung(answering[0])


async def test_only_open_requests_make_silence_a_hang() -> None:
    """An idle engine owes nobody anything, nor does a stopped one."""
    client = EngineClient(lambda message: None)
    assert not await wait_hung(client)
    stream = client.generate(REQUEST)
    assert not await wait_hung(client, is_stopped=True)
    assert await wait_hung(client)
    await stream.aclose()


def test_a_limit_that_cannot_be_is_refused() -> None:
    """Neither negative nor endless."""
    for limit in (-1.0, float("inf"), float("nan")):
        with pytest.raises(UsageError):
            EngineConfig(step_timeout_s=limit)
