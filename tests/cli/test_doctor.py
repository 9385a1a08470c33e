"""`doctor`: what it tells of a machine, sound or broken, and what its exit code says."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from vllm_mlx.cli.doctor_port import look_at_port
from vllm_mlx.cli.doctor_report import probe_backend

RunCli = Callable[..., subprocess.CompletedProcess[str]]

#: Runs one command line and prints, on stderr, whether it has loaded MLX itself.
PROBE = """
import sys
from vllm_mlx.cli.main import main
code = main(["doctor", "--json", *sys.argv[1:]])
sys.stderr.write(str([name for name in ("mlx", "mlx.core", "transformers") if name in sys.modules]))
sys.exit(code)
"""


def free_port() -> int:
    """Return a port that nobody uses."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def make_model(folder: Path, **config: Any) -> None:
    """Write a folder that looks like a model."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(b"x" * 1000)


@pytest.fixture
def home(cli_env: dict[str, str]) -> Path:
    """Return a home with models of both kinds, and folders that are none."""
    home = Path(cli_env["HOME"])
    hub = home / "hub" / "models--org--some-model" / "snapshots" / "abc"
    make_model(hub, model_type="qwen3", quantization={"bits": 4})
    (home / "hub" / "models--org--unfinished" / "snapshots" / "abc").mkdir(parents=True)
    make_model(home / ".lmstudio" / "models" / "maker" / "theirs", model_type="llama")
    (home / ".lmstudio" / "models" / "maker" / "gguf only").mkdir()
    return home


def test_a_sound_machine_is_described_without_loading_mlx(
    cli_env: dict[str, str], home: Path
) -> None:
    """The report has everything, the process itself never imports MLX, and 0 says it is sound."""
    done = subprocess.run(
        [sys.executable, "-c", PROBE, "--port", str(free_port()), "--ssd-cache-dir", str(home)],
        env={**cli_env, "HF_HUB_CACHE": str(home / "hub")},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "[]")
    report = json.loads(done.stdout)
    assert report["verdict"] == "ok"
    assert report["machine"]["os"]
    assert report["versions"]["mlx"]
    assert report["versions"]["mlx-lm"]
    found = report["backend"]["found"]
    assert found["device"]
    assert found["is_right"] is True
    assert found["limits"]["total_bytes"] > found["limits"]["available_bytes"] > 0
    assert "library" in found["blas"]
    assert report["port"]["is_free"] is True
    models = [(model["name"], model["source"], model["bits"]) for model in report["models"]]
    assert models == [
        ("~/.lmstudio/models/maker/theirs", "LM Studio", None),
        ("org/some-model", "hub", 4),
    ]
    folders = {folder["name"]: folder for folder in report["folders"]}
    assert folders["hub"]["num_files"] == 2
    assert folders["prefixes on SSD"]["num_bytes"] > 2000
    # A report is pasted where others read it.
    assert str(home) not in done.stdout


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("raise ImportError('no such symbol')", "no such symbol"),
        ("import os; os.abort()", "SIGABRT"),
    ],
)
def test_a_machine_without_a_working_mlx_is_told_so(
    run_cli: RunCli, tmp_path: Path, source: str, words: str
) -> None:
    """An installation that cannot be imported, or takes its process down, is a line and a 1."""
    (tmp_path / "broken" / "mlx").mkdir(parents=True)
    (tmp_path / "broken" / "mlx" / "__init__.py").write_text(source)
    done = run_cli("doctor", "--port", str(free_port()), PYTHONPATH=str(tmp_path / "broken"))
    assert (done.returncode, done.stderr) == (1, "")
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("FAILED")]
    assert line.startswith("FAILED  backend: ")
    assert words in line


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import time; time.sleep(60)", "did not end within 0.5 s"),
        ("print('nonsense')", "gave no result"),
        ("import sys; sys.exit('at the end')", "exit code 1: at the end"),
        ("import sys; sys.stderr.write('install it'); sys.exit(3)", "install it"),
    ],
)
def test_whatever_the_probe_does_is_an_answer(code: str, words: str) -> None:
    """A probe that hangs, babbles or fails gives the reason for a report."""
    probe = probe_backend((sys.executable, "-S", "-c", code), timeout_s=0.5)
    assert probe.found is None
    assert words in str(probe.error)


def test_a_probe_that_cannot_start_is_an_answer() -> None:
    """So is one that is not there."""
    probe = probe_backend(("/nowhere/python",), timeout_s=0.5)
    assert "could not be started" in str(probe.error)


class _Health(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = b'{"status": "healthy", "model_loaded": true}'
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        """Say nothing."""


@pytest.fixture
def health_port() -> Iterator[int]:
    """Return the port of a server that answers like ours."""
    with HTTPServer(("127.0.0.1", 0), _Health) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


def test_a_port_is_free_or_says_who_has_it(health_port: int) -> None:
    """A server of ours is known by its health; one that does not answer is in the way, too."""
    assert look_at_port(free_port()).is_free
    ours = look_at_port(health_port)
    assert (ours.is_free, ours.used_by) == (False, "a vllm-mlx server")
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        state = look_at_port(silent.getsockname()[1])
    assert not state.is_free
    assert "in use" in str(state.used_by)
