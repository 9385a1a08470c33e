"""Supervisors of fake engine processes."""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import psutil
import pytest

from vllm_mlx.engine.config import EngineConfig, ModelConfig
from vllm_mlx.engine.core.outputs import pack_tokens
from vllm_mlx.engine.core.request import GenerationRequest, SamplingParams
from vllm_mlx.engine.host.restart import RestartPolicy
from vllm_mlx.engine.host.supervisor import EngineSupervisor

FAKE_ENGINE = (sys.executable, str(Path(__file__).with_name("fake_engine.py")))
QUICK_RESTART = RestartPolicy(initial_s=0.02, max_s=0.05, max_deaths=3)

MakeRequest = Callable[..., GenerationRequest]
MakeSupervisor = Callable[..., EngineSupervisor]
Running = Callable[..., AbstractAsyncContextManager[EngineSupervisor]]


@pytest.fixture
def make_request() -> MakeRequest:
    """Return a function that makes requests with new ids."""
    numbers = itertools.count()

    def make(command: int = 0, *, max_tokens: int = 5) -> GenerationRequest:
        return GenerationRequest(
            request_id=f"request-{next(numbers)}",
            prompt=pack_tokens([command, 7, 8]),
            sampling=SamplingParams(max_tokens=max_tokens),
        )

    return make


@pytest.fixture
def make_supervisor() -> MakeSupervisor:
    """Return a function that makes a supervisor of a fake engine, not started."""

    def make(
        *,
        restart: RestartPolicy = QUICK_RESTART,
        command: tuple[str, ...] = FAKE_ENGINE,
        stop_grace_s: float = 5.0,
        log_level: str = "INFO",
        step_timeout_s: float = 300.0,
        **model: object,
    ) -> EngineSupervisor:
        return EngineSupervisor(
            ModelConfig(model=json.dumps(model)),
            EngineConfig(step_timeout_s=step_timeout_s),
            restart=restart,
            command=command,
            stop_grace_s=stop_grace_s,
            log_level=log_level,
        )

    return make


@pytest.fixture
def running(make_supervisor: MakeSupervisor) -> Running:
    """Return a context manager around a ready supervisor, stopped at its end."""

    @contextlib.asynccontextmanager
    async def run(**options: object) -> AsyncIterator[EngineSupervisor]:
        supervisor = make_supervisor(**options)
        await supervisor.start()
        try:
            await supervisor.wait_ready()
            yield supervisor
        finally:
            await supervisor.stop(0)

    return run


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fail a test that leaves a child process, a zombie or an open file behind."""
    this = psutil.Process()
    before = this.children(recursive=True)
    num_fds = this.num_fds()
    yield
    # What an earlier test left is that test's fault, and may not fail every one behind it.
    left = [child for child in this.children(recursive=True) if child not in before]
    for child in left:
        child.kill()
    psutil.wait_procs(left, timeout=10)
    assert left == []
    assert this.num_fds() <= num_fds
