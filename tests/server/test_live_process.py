"""A real server's life: it listens at once, drains on a signal, and outlives its engine."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from support.server_process import ServerProcess, is_running
from support.tiny_folder import write_tiny_folder

ENDLESS: dict[str, Any] = {
    "model": "default",
    "prompt": "x",
    "max_tokens": 8000,
    "ignore_eos": True,
    "temperature": 0,
    "stream": True,
}


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory, demo_model_path: Path) -> Path:
    """Return the folder of a tiny model."""
    return write_tiny_folder(tmp_path_factory.mktemp("tiny"), demo_model_path)


@pytest.fixture
def server(tiny_folder: Path, tmp_path: Path) -> Iterator[ServerProcess]:
    """Return a server that has just been started."""
    options = ("--kv-memory-mb", "64", "--drain-timeout", "8")
    with ServerProcess(str(tiny_folder), tmp_path, *options) as process:
        yield process


def stream_lines(server: ServerProcess, body: dict[str, Any], lines: list[str]) -> None:
    """Read a stream to its end into `lines`."""
    with (
        httpx.Client(timeout=60) as client,
        client.stream("POST", f"{server.url}/v1/completions", json=body) as response,
    ):
        lines.extend(line for line in response.iter_lines() if line)


def wait_for(lines: list[str], count: int) -> None:
    """Wait until a stream has brought so many lines."""
    deadline = time.monotonic() + 30
    while len(lines) < count:
        assert time.monotonic() < deadline, lines
        time.sleep(0.01)


@pytest.mark.faults
def test_it_outlives_its_engine_and_drains_what_runs(server: ServerProcess) -> None:
    """From the first moment to the last: loading, killed in the middle of streams, drained."""
    assert server.get("/health").status_code == 200
    loading = server.get("/ready")
    assert loading.status_code == 503
    assert int(loading.headers["retry-after"]) >= 1
    assert server.get("/v1/models").json()["error"]["code"] == "engine_unavailable"
    server.wait_ready()
    assert server.get("/ready").status_code == 200

    engine_pid = server.status()["engine"]["pid"]
    kill_amid_streams(server, engine_pid)
    assert server.get("/health").status_code == 200
    assert server.get("/ready").status_code == 503
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        with pytest.raises(openai.APIStatusError) as caught:
            client.completions.create(model="default", prompt="x", max_tokens=1)
        assert caught.value.status_code == 503
        assert int(caught.value.response.headers["retry-after"]) >= 1
        patient = client.with_options(max_retries=30)
        assert patient.completions.create(model="default", prompt="x", max_tokens=3).choices
    status = server.status()
    assert status["engine"]["restarts"] == 1
    assert status["requests"] == []
    engine_pid, killed_pid = status["engine"]["pid"], engine_pid
    assert not is_running(killed_pid)

    lines: list[str] = []
    body = {**ENDLESS, "max_tokens": 200}
    reader = threading.Thread(target=stream_lines, args=(server, body, lines))
    reader.start()
    wait_for(lines, 5)
    server.signal(signal.SIGTERM)
    assert server.wait() == 143
    reader.join()
    assert lines[-1] == "data: [DONE]"
    assert '"finish_reason":"length"' in lines[-2]
    assert not is_running(engine_pid)
    assert not server.ready_file_exists


def kill_amid_streams(server: ServerProcess, engine_pid: int) -> None:
    """Kill the engine while three streams run: each must get one error event and its end."""
    streams: list[list[str]] = [[], [], []]
    readers = [
        threading.Thread(target=stream_lines, args=(server, ENDLESS, lines)) for lines in streams
    ]
    for reader in readers:
        reader.start()
    for lines in streams:
        wait_for(lines, 3)
    os.kill(engine_pid, signal.SIGKILL)
    killed = time.monotonic()
    for reader in readers:
        reader.join(10)
        assert not reader.is_alive()
    assert time.monotonic() - killed < 3
    for lines in streams:
        assert lines[-1] == "data: [DONE]"
        assert '"code":"engine_died"' in lines[-2]
        assert sum('"error"' in line for line in lines) == 1


def test_a_model_that_cannot_load_ends_the_server(tmp_path: Path) -> None:
    """One line and exit code 3; a port in use is exit code 2, and neither leaves a ready file."""
    with ServerProcess(str(tmp_path / "nothing"), tmp_path) as server:
        assert server.wait(60) == 3
        assert server.log.strip().splitlines()[-1].startswith("Error: ")
        assert not server.ready_file_exists
