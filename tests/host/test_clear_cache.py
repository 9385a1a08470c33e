"""Removing stored prefixes through the engine's process, and the level that it logs at."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import pytest

from vllm_mlx.engine.core.request import GenerationRequest
from vllm_mlx.engine.core.stats import CacheCleared
from vllm_mlx.engine.errors import EngineUnavailableError
from vllm_mlx.engine.host.supervisor import EngineSupervisor

Running = Callable[..., AbstractAsyncContextManager[EngineSupervisor]]


async def test_each_tier_is_cleared_as_asked(running: Running) -> None:
    """Both tiers, or one, and the answer says what went."""
    async with running(clear_s=0.01) as supervisor:
        assert await supervisor.clear_cache(ram=True, ssd=False) == CacheCleared(num_blocks=3)
        assert await supervisor.clear_cache(ram=False, ssd=True) == CacheCleared(num_runs=2)
        both = await supervisor.clear_cache(ram=True, ssd=True)
    assert both == CacheCleared(num_blocks=3, num_runs=2)


async def test_steps_go_on_while_files_are_removed(
    running: Running, make_request: Callable[..., GenerationRequest]
) -> None:
    """A removal that takes long stops no request."""
    async with running(clear_s=0.5) as supervisor:
        clearing = asyncio.create_task(supervisor.clear_cache(ram=False, ssd=True))
        await supervisor.generate(make_request(max_tokens=5)).collect()
        assert not clearing.done()
        assert (await clearing).num_runs == 2


async def test_an_engine_that_dies_meanwhile_leaves_nobody_waiting(running: Running) -> None:
    """The question ends with an error, and without an engine it is refused at once."""
    async with running(clear_s=60.0) as supervisor:
        clearing = asyncio.create_task(supervisor.clear_cache(ram=False, ssd=True))
        await asyncio.sleep(0.05)
        assert supervisor.state.pid is not None
        os.kill(supervisor.state.pid, signal.SIGKILL)
        with pytest.raises(EngineUnavailableError):
            await clearing
        await supervisor.stop(0)
        with pytest.raises(EngineUnavailableError):
            await supervisor.clear_cache(ram=True, ssd=False)


@pytest.mark.parametrize(("level", "is_logged"), [("DEBUG", True), ("INFO", False)])
async def test_the_engine_process_logs_at_the_given_level(
    running: Running, caplog: pytest.LogCaptureFixture, level: str, *, is_logged: bool
) -> None:
    """Debug records of the engine come through only where they were asked for."""
    caplog.set_level(logging.DEBUG)

    def logged() -> list[tuple[str, str, str]]:
        return [(r.levelname, r.name, r.message) for r in caplog.records if "fake" in r.name]

    async with running(log_level=level) as supervisor:
        await supervisor.clear_cache(ram=True, ssd=False)
    # What it says at its end comes after everything else.
    while ("WARNING", "fake", "closed") not in logged():
        await asyncio.sleep(0.01)
    assert is_logged == (("DEBUG", "vllm_mlx.fake", "clearing") in logged())
