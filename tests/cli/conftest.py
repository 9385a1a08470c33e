"""Run the command line as users do, and stand in for an OpenAI server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

RunCli = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def bytecode(pytestconfig: pytest.Config) -> Path:
    """Give a lasting folder for compiled modules, as an installed tool has them."""
    cache = pytestconfig.cache
    assert cache is not None
    return cache.mkdir("bytecode")


@pytest.fixture
def cli_env(tmp_path: Path, bytecode: Path) -> dict[str, str]:
    """Give the environment of a user with an empty home and no settings of ours."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("VLLM_MLX_", "XDG_", "PYTHON")) and name != "NO_COLOR"
    }
    home = tmp_path / "home"
    home.mkdir()
    return {
        **kept,
        "HOME": str(home),
        "PYTHONPYCACHEPREFIX": str(bytecode),
        "PYTHONWARNINGS": "error",
        "COLUMNS": "100",
    }


@pytest.fixture
def run_cli(cli_env: dict[str, str], tmp_path: Path) -> RunCli:
    """Give a function that runs `vllm-mlx` in a process of its own and returns what it did."""

    def run(*args: str, stdin: str = "", **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "vllm_mlx.cli", *args],
            input=stdin,
            capture_output=True,
            text=True,
            env={**cli_env, **env},
            cwd=tmp_path,
            timeout=60,
            check=False,
        )

    return run


class ScriptedServer:
    """Answer as an OpenAI server does, word by word; what it does is set by its attributes.

    Owns a listening socket and a thread. `requests` collects the bodies that were sent.
    """

    def __init__(self) -> None:
        self.words = ["Hello", " from", " the", " server", "."]
        self.delay_s = 0.0
        self.api_key: str | None = None
        #: Answers of `/v1/models` before it works: (status, headers, body).
        self.refusals: list[tuple[int, dict[str, str], dict[str, Any]]] = []
        #: Answer of the next completions instead of words.
        self.failure: tuple[int, dict[str, Any]] | None = None
        #: An event after the words, in place of the end.
        self.error_event: dict[str, Any] | None = None
        self.is_cut_short = False
        self.requests: list[dict[str, Any]] = []
        #: Set when a client has left in the middle of a stream.
        self.disconnected = threading.Event()
        self._http = _HttpServer(("127.0.0.1", 0), _Handler)
        self._http.script = self
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.02,))
        self._thread.start()

    @property
    def url(self) -> str:
        """Return the server's address."""
        return f"http://127.0.0.1:{self._http.server_port}"

    def close(self) -> None:
        """Stop listening."""
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


class _HttpServer(ThreadingHTTPServer):
    daemon_threads = True
    script: ScriptedServer


class _Handler(BaseHTTPRequestHandler):
    server: _HttpServer

    @property
    def script(self) -> ScriptedServer:
        return self.server.script

    def log_message(self, format: str, *args: Any) -> None:
        """Keep quiet."""

    def do_GET(self) -> None:
        if self.script.refusals:
            status, headers, body = self.script.refusals.pop(0)
            self.send_json(status, body, headers)
        else:
            self.send_json(200, {"data": [{"id": "scripted-model"}]})

    def do_POST(self) -> None:
        length = int(self.headers["content-length"])
        self.script.requests.append(json.loads(self.rfile.read(length)))
        key = self.headers.get("authorization", "").removeprefix("Bearer ")
        if self.script.api_key is not None and key != self.script.api_key:
            error = {"message": "wrong key", "code": "invalid_api_key"}
            self.send_json(401, {"error": error})
        elif self.script.failure is not None:
            self.send_json(*self.script.failure)
        else:
            try:
                self.stream()
            except (BrokenPipeError, ConnectionResetError):
                self.script.disconnected.set()

    def send_json(
        self, status: int, body: dict[str, Any], headers: dict[str, str] | None = None
    ) -> None:
        payload = json.dumps(body).encode()
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def stream(self) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        self.wfile.write(b": a comment\n\n")
        for word in self.script.words:
            self.event({"choices": [{"delta": {"content": word}}]})
            time.sleep(self.script.delay_s)
        if self.script.is_cut_short:
            return
        if self.script.error_event is not None:
            self.event(self.script.error_event)
        else:
            self.event({"choices": [{"delta": {}, "finish_reason": "stop"}]})
            usage = {"prompt_tokens": 7, "completion_tokens": len(self.script.words)}
            self.event({"choices": [], "usage": usage})
        self.wfile.write(b"data: [DONE]\n\n")

    def event(self, body: dict[str, Any]) -> None:
        # Not escaped: JSON may carry line separators that only Python splits at.
        data = json.dumps(body, ensure_ascii=False)
        self.wfile.write(f"data: {data}\n\n".encode())


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    """Give a scripted OpenAI server."""
    scripted = ScriptedServer()
    yield scripted
    scripted.close()
