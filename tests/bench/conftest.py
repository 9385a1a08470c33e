"""Run the load generator in virtual time, and a scripted server in a process of its own."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.scripted_server import Script, ServerScript, connect_to
from support.virtual_time import run_virtually

from vllm_mlx.bench.measuring_loop import MeasuringLoop
from vllm_mlx.bench.metrics import Slo
from vllm_mlx.bench.plan import make_plan
from vllm_mlx.bench.results import Results
from vllm_mlx.bench.session import Session
from vllm_mlx.bench.settings import BenchSettings
from vllm_mlx.cli.main import main

TESTS = Path(__file__).parents[1]

RunBench = Callable[..., Results]
Measure = Callable[..., Results]
StartServer = Callable[..., str]
BenchCli = Callable[..., "Done"]


class SilentProgress:
    """Say nothing."""

    def say(self, text: str) -> None:
        """Say nothing."""

    def began(self, label: str, repetition: int, runner: Any) -> None:
        """Say nothing."""

    def ended(self, row: Any) -> None:
        """Say nothing."""


def virtual_session(
    server: ServerScript,
    settings: BenchSettings,
    *,
    slo: Slo | None = None,
    cut: Any = None,
    accept: Any = lambda columns: None,
) -> Session:
    """Return a session that will measure a script."""
    return Session(
        settings,
        make_plan(settings),
        slo=slo,
        environment={"chip": "virtual"},
        progress=SilentProgress(),
        accept=accept,
        connect=connect_to(server, cut),
    )


@pytest.fixture
def run_bench() -> RunBench:
    """Give a function that measures a scripted server in virtual time.

    Takes a `Script` or a `ServerScript`, and the settings' fields.
    """

    def run(
        script: Script | ServerScript, *, slo: Slo | None = None, cut: Any = None, **fields: Any
    ) -> Results:
        server = script if isinstance(script, ServerScript) else ServerScript(script)
        settings = BenchSettings(url="http://scripted", **fields)
        return run_virtually(virtual_session(server, settings, slo=slo, cut=cut).run())

    return run


@pytest.fixture
def measure() -> Measure:
    """Give a function that measures the server at a URL over real sockets."""

    def run(url: str, **fields: Any) -> Results:
        settings = BenchSettings(url=url, **fields)
        session = Session(
            settings,
            make_plan(settings),
            slo=None,
            environment={},
            progress=SilentProgress(),
            accept=lambda columns: None,
        )
        with asyncio.Runner(loop_factory=MeasuringLoop) as runner:
            return runner.run(session.run())

    return run


@pytest.fixture
def start_server() -> Iterator[StartServer]:
    """Give a function that serves a script from another process and returns its URL."""
    running: list[subprocess.Popen[str]] = []

    def start(**fields: Any) -> str:
        process = subprocess.Popen(
            [sys.executable, str(TESTS / "support" / "scripted_server.py"), json.dumps(fields)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(TESTS)},
        )
        running.append(process)
        assert process.stdout is not None
        return f"http://127.0.0.1:{process.stdout.readline().strip()}"

    yield start
    for process in running:
        process.terminate()
        process.wait(10)
        assert process.stdout is not None
        process.stdout.close()


@dataclasses.dataclass(frozen=True)
class Done:
    """Hold what a command did."""

    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def bench_cli(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> BenchCli:
    """Give a function that runs `vllm-mlx bench-serve` in this process, in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def run(*args: str) -> Done:
        monkeypatch.setattr("sys.argv", ["vllm-mlx", "bench-serve", *args])
        capsys.readouterr()
        code = main(["bench-serve", *args])
        return Done(int(code), *capsys.readouterr())

    return run
