"""A real `vllm-mlx serve` in a process of its own, on a port that the system picks."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx


class ServerProcess:
    """Own one server process and its log; `stop` or the context manager end it."""

    def __init__(self, model: str, folder: Path, *options: str) -> None:
        """Start serving `model`; `folder` takes the ready file and the log."""
        self._ready_file = folder / "ready.json"
        self._log = folder / "server.log"
        self._client = httpx.Client(timeout=30)
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "vllm_mlx.cli", "serve", model),
                    *("--port", "0", "--ready-file", str(self._ready_file), *options),
                ],
                stdout=log,
                stderr=log,
                # Ctrl-C at the terminal that runs the tests is not for the server.
                start_new_session=True,
            )

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        """Return the HTTP process's id."""
        return self._process.pid

    @property
    def log(self) -> str:
        """Return what the server has printed."""
        return self._log.read_text()

    @property
    def ready_file_exists(self) -> bool:
        """Say whether the ready file is there."""
        return self._ready_file.exists()

    @property
    def url(self) -> str:
        """Return where it listens, from its log, which says so before the model is ready."""
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            if found := re.search(r"listening on ([^\s\"]+)", self.log):
                return found[1]
            time.sleep(0.02)
        raise TimeoutError(f"it does not listen:\n{self.log}")

    def wait_ready(self, timeout_s: float = 90) -> ServerProcess:
        """Wait until the model answers and return this."""
        deadline = time.monotonic() + timeout_s
        while not self._ready_file.exists():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise TimeoutError(f"not ready:\n{self.log}")
            time.sleep(0.05)
        assert json.loads(self._ready_file.read_text())["url"] == self.url
        return self

    def get(self, path: str, **headers: str) -> httpx.Response:
        """Get one path."""
        return self._client.get(self.url + path, headers=headers)

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        """Post JSON to one path."""
        return self._client.post(self.url + path, json=body)

    def status(self, **headers: str) -> dict[str, Any]:
        """Return `/v1/status`."""
        status: dict[str, Any] = self.get("/v1/status", **headers).json()
        return status

    def signal(self, number: int) -> None:
        """Send a signal to the HTTP process."""
        self._process.send_signal(number)

    def wait(self, timeout_s: float = 20) -> int:
        """Wait for the end and return the exit code."""
        return self._process.wait(timeout_s)

    def stop(self) -> int:
        """End it, by force if it must be, and return the exit code."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(15)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
        self._client.close()
        return self._process.returncode


def is_running(pid: int) -> bool:
    """Say whether a process exists and is no zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"
