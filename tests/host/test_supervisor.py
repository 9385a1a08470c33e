"""A supervisor of a real process with a fake engine: requests, aborts, statistics, slow readers."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import pytest

from vllm_mlx.engine.core.outputs import unpack_tokens
from vllm_mlx.engine.core.request import GenerationRequest
from vllm_mlx.engine.errors import EngineUnavailableError
from vllm_mlx.engine.host.supervisor import EngineSupervisor

MakeRequest = Callable[..., GenerationRequest]
MakeSupervisor = Callable[..., EngineSupervisor]
Running = Callable[..., AbstractAsyncContextManager[EngineSupervisor]]

#: Commands of the fake engine.
FAIL_ROW = 4


async def test_a_request_streams_its_tokens_and_ends_once(
    running: Running, make_request: MakeRequest
) -> None:
    """A request's text arrives in order and exactly its last output has a finish reason."""
    async with running() as supervisor:
        rows = [row async for row in supervisor.generate(make_request(max_tokens=6))]
    assert "".join(row.text for row in rows) == "0 1 2 3 4 5 "
    assert unpack_tokens(b"".join(row.token_ids for row in rows)) == [0, 7, 8, 0, 7, 8]
    assert [row.finish_reason for row in rows if row.finish_reason] == ["length"]
    assert rows[-1].finish_reason == "length"
    assert rows[-1].num_completion_tokens == 6


async def test_loading_is_reported_before_ready(make_supervisor: MakeSupervisor) -> None:
    """The states of a start are loading with a stage and fraction, then ready with a pid."""
    supervisor = make_supervisor(load_s=0.05)
    assert (supervisor.state.phase, supervisor.info) == ("stopped", None)
    await supervisor.start()
    seen = [supervisor.state]
    while seen[-1].phase == "loading":
        seen.append(await supervisor.wait_for_change(seen[-1]))
    await supervisor.stop(0)
    assert seen[0].retry_after_s is not None
    assert [state.phase for state in seen] == ["loading"] * (len(seen) - 1) + ["ready"]
    assert ("loading weights", 0.5) in [(state.stage, state.fraction) for state in seen]
    assert (seen[-1].stage, seen[-1].error, seen[-1].retry_after_s) == ("", None, None)
    assert seen[-1].pid is not None
    info, after = supervisor.info, supervisor.state
    assert info is not None
    assert info.pid == seen[-1].pid
    assert (after.phase, after.pid) == ("stopped", None)


async def test_the_engine_has_a_session_of_its_own(running: Running) -> None:
    """A terminal's Ctrl-C, which goes to the whole group, does not reach the engine."""
    async with running() as supervisor:
        pid = supervisor.state.pid
        assert pid is not None
        assert os.getsid(pid) == pid != os.getsid(0)


async def test_requests_are_refused_until_ready(
    make_supervisor: MakeSupervisor, make_request: MakeRequest
) -> None:
    """Before start, while loading and after stop a request is refused, never queued."""
    supervisor = make_supervisor(load_s=0.2)
    with pytest.raises(EngineUnavailableError, match="stopped"):
        supervisor.generate(make_request())
    await supervisor.start()
    with pytest.raises(EngineUnavailableError, match="loading") as refused:
        supervisor.generate(make_request())
    assert refused.value.retry_after_s is not None
    with pytest.raises(EngineUnavailableError):
        await supervisor.stats()
    await supervisor.wait_ready()
    await supervisor.stop(0)
    with pytest.raises(EngineUnavailableError, match="stopped"):
        supervisor.generate(make_request())
    with pytest.raises(EngineUnavailableError, match="stopped"):
        await supervisor.wait_ready()


async def test_abort_ends_one_request_and_no_other(
    running: Running, make_request: MakeRequest
) -> None:
    """An abort gives its request a final `abort` and leaves the neighbour to its end."""
    async with running(step_s=0.01) as supervisor:
        aborted = make_request(max_tokens=100_000)
        stream = supervisor.generate(aborted)
        neighbour = supervisor.generate(make_request(max_tokens=20))
        await anext(stream)
        assert supervisor.abort(aborted.request_id)
        assert (await stream.collect()).finish_reason == "abort"
        assert not supervisor.abort(aborted.request_id)
        assert not supervisor.abort("never heard of")
        assert (await neighbour.collect()).num_completion_tokens == 20
        assert supervisor.num_open == 0


async def test_a_reader_that_leaves_frees_its_row(
    running: Running, make_request: MakeRequest
) -> None:
    """Closing an unfinished stream aborts the request in the engine and ends the stream once."""
    async with running(step_s=0.01) as supervisor:
        stream = supervisor.generate(make_request(max_tokens=100_000))
        await anext(stream)
        await stream.aclose()
        assert stream.is_finished
        rows = [row async for row in stream]
        assert [row.finish_reason for row in rows] == ["abort"]
        assert supervisor.num_open == 0
        # The stats request follows the abort, so one step lies between them at most.
        first = await supervisor.stats()
        second = await supervisor.stats()
        assert 0 in (first.num_running, second.num_running)
        assert second.requests_finished == 1


async def test_a_failed_row_is_that_rows_error(running: Running, make_request: MakeRequest) -> None:
    """A row's own failure reaches its reader as an error output, and the engine goes on."""
    async with running() as supervisor:
        failed = await supervisor.generate(make_request(FAIL_ROW)).collect()
        assert failed.finish_reason == "error"
        assert failed.error is not None
        assert failed.error.code == "row_failed"
        assert (await supervisor.generate(make_request()).collect()).finish_reason == "length"
        assert supervisor.state.num_restarts == 0


async def test_a_slow_reader_gets_everything_merged(
    running: Running, make_request: MakeRequest
) -> None:
    """A reader that looks twice gets the whole text in two outputs, and delays nobody."""
    async with running(step_s=0.001) as supervisor:
        slow = supervisor.generate(make_request(max_tokens=60))
        first = await anext(slow)
        quick = await supervisor.generate(make_request(max_tokens=80)).collect()
        rest = [row async for row in slow]
    assert quick.num_completion_tokens == 80
    assert len(rest) == 1
    assert first.text + rest[0].text == "".join(f"{i} " for i in range(60))
    assert rest[0].finish_reason == "length"


async def test_many_requests_share_the_steps(running: Running, make_request: MakeRequest) -> None:
    """Sixteen requests at once end each with its own length."""
    async with running() as supervisor:
        lengths = range(5, 21)
        streams = [supervisor.generate(make_request(max_tokens=n)) for n in lengths]
        finals = await asyncio.gather(*(stream.collect() for stream in streams))
        assert [final.num_completion_tokens for final in finals] == list(lengths)
        assert (await supervisor.stats()).requests_finished == 16


async def test_a_stopped_engine_is_waited_for(running: Running, make_request: MakeRequest) -> None:
    """SIGSTOP makes streams pause and statistics old; after SIGCONT everything goes on."""
    async with running(step_s=0.01) as supervisor:
        pid = supervisor.state.pid
        assert pid is not None
        stream = supervisor.generate(make_request(max_tokens=30))
        await anext(stream)
        known = await supervisor.stats()
        os.kill(pid, signal.SIGSTOP)
        try:
            started = time.monotonic()
            stale = await supervisor.stats(timeout_s=0.2)
            assert time.monotonic() - started < 1.0
            assert stale.steps_executed == known.steps_executed
            assert (known.age_s, stale.age_s > 0.2) == (0, True)
            late = supervisor.generate(make_request(max_tokens=3))
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(anext(late), 0.5)
            assert supervisor.state.phase == "ready"
        finally:
            os.kill(pid, signal.SIGCONT)
        assert (await stream.collect()).num_completion_tokens == 30
        assert (await late.collect()).text == "0 1 2 "
        assert supervisor.state.pid == pid
        assert (await supervisor.stats()).steps_executed > known.steps_executed


@pytest.mark.faults
@pytest.mark.timeout(180)
async def test_a_minute_of_standstill_is_waited_for(
    running: Running, make_request: MakeRequest
) -> None:
    """An engine that was stopped for a minute goes on with its streams as if nothing had been."""
    async with running(step_s=0.01) as supervisor:
        pid = supervisor.state.pid
        assert pid is not None
        streams = [supervisor.generate(make_request(max_tokens=50)) for _ in range(8)]
        await anext(streams[0])
        os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(60.0)
        os.kill(pid, signal.SIGCONT)
        finals = await asyncio.gather(*(stream.collect() for stream in streams))
        assert {final.num_completion_tokens for final in finals} == {50}
        assert (supervisor.state.pid, supervisor.state.num_restarts) == (pid, 0)


async def test_stats_of_an_engine_that_never_answered_are_refused(running: Running) -> None:
    """Without any known statistics a stopped engine's are refused instead of waited for."""
    async with running() as supervisor:
        pid = supervisor.state.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        try:
            with pytest.raises(EngineUnavailableError, match="did not answer"):
                await supervisor.stats(timeout_s=0.1)
        finally:
            os.kill(pid, signal.SIGCONT)
        assert (await supervisor.stats()).num_running == 0
