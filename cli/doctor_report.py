"""Gather what a report of a fault must say of this machine, and judge what of it is one."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import msgspec

from vllm_mlx.bench.environment import environment_columns
from vllm_mlx.cli.doctor_port import PortState, look_at_port
from vllm_mlx.engine.diagnosis import EXIT_NO_BACKEND, Diagnosis
from vllm_mlx.engine.memory import GIB, MemoryLimits, format_bytes, host_limits, usable_bytes
from vllm_mlx.engine.models.cached_folder import user_cache_dir
from vllm_mlx.engine.models.found import FoundModel, found_models, hub_cache_dir
from vllm_mlx.engine.platform import installed_backend, usable_cpus

DISTRIBUTION = "vllm-mlx"
#: `-P` keeps the working directory out of the module path.
PROBE_COMMAND = (sys.executable, "-P", "-m", "vllm_mlx.engine.diagnosis")

#: What the probe may take: the first import of MLX from a cold disk included.
PROBE_TIMEOUT_S = 60.0

#: Backends of MLX, of which a machine needs the one that fits.
_BACKENDS = ("mlx", "mlx-metal", "mlx-cpu", "mlx-cuda-12", "mlx-cuda-13")
#: Less free disk or memory than this is worth a word.
_LITTLE_DISK_BYTES = 5 * GIB
_LITTLE_MEMORY_BYTES = GIB

_HUB = "hub"

Verdict = Literal["ok", "warning", "failed"]


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """Hold one judgement: `failed` is what keeps the server from running."""

    name: str
    verdict: Verdict
    message: str


class CacheFolder(msgspec.Struct, frozen=True, kw_only=True):
    """Describe a folder that something is kept in; what is not there has no bytes."""

    name: str
    path: str
    exists: bool
    is_writable: bool
    num_bytes: int
    num_files: int
    #: Of its file system; None where that cannot be told.
    free_bytes: int | None


class Probe(msgspec.Struct, frozen=True, kw_only=True):
    """Hold what trying MLX out has shown: a diagnosis, or why there is none."""

    found: Diagnosis | None = None
    error: str | None = None


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Hold everything that is told."""

    machine: dict[str, Any]
    usable_cpus: int
    #: None for what is not installed.
    versions: dict[str, str | None]
    installed_backend: str | None
    backend: Probe
    memory: MemoryLimits
    folders: tuple[CacheFolder, ...]
    models: tuple[FoundModel, ...]
    port: PortState
    findings: tuple[Finding, ...]

    @property
    def has_failed(self) -> bool:
        """Say whether anything was found that keeps the server from running."""
        return any(finding.verdict == "failed" for finding in self.findings)


def gather(
    *,
    port: int,
    ssd_cache_dir: Path | None,
    probe_command: Sequence[str] = PROBE_COMMAND,
    probe_timeout_s: float = PROBE_TIMEOUT_S,
) -> Report:
    """Look at everything; MLX is imported by a child process only."""
    probe = probe_backend(probe_command, probe_timeout_s)
    versions = _versions()
    memory = host_limits()
    folders = [_folder("models made here", user_cache_dir()), _folder(_HUB, hub_cache_dir())]
    if ssd_cache_dir is not None:
        folders.append(_folder("prefixes on SSD", ssd_cache_dir))
    port_state = look_at_port(port)
    models = tuple(found_models())
    return Report(
        machine=environment_columns(Path(__file__).parent),
        usable_cpus=usable_cpus(),
        versions=versions,
        installed_backend=installed_backend(),
        backend=probe,
        memory=memory,
        folders=tuple(folders),
        models=models,
        port=port_state,
        findings=(
            *_judge_packages(versions),
            *_judge_backend(probe),
            *_judge_memory(probe.found.limits if probe.found is not None else memory),
            *(finding for folder in folders for finding in _judge_folder(folder)),
            *_judge_port(port_state),
        ),
    )


def probe_backend(command: Sequence[str], timeout_s: float) -> Probe:
    """Try MLX out in a process of its own, whatever becomes of that."""
    try:
        done = subprocess.run(command, capture_output=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        return Probe(error=f"trying MLX out did not end within {timeout_s:g} s")
    except OSError as error:
        return Probe(error=f"{command[0]} could not be started: {error.strerror or error}")
    if done.returncode == 0:
        try:
            return Probe(found=msgspec.json.decode(done.stdout, type=Diagnosis))
        except msgspec.DecodeError as error:
            return Probe(error=f"trying MLX out gave no result: {error}")
    last = (done.stderr.decode("utf-8", "replace").strip() or "it said nothing").splitlines()[-1]
    if done.returncode == EXIT_NO_BACKEND:
        return Probe(error=last)
    if done.returncode < 0:
        name = signal.Signals(-done.returncode).name
        return Probe(error=f"trying MLX out ended by {name}: {last}")
    return Probe(error=f"trying MLX out ended with exit code {done.returncode}: {last}")


def _versions() -> dict[str, str | None]:
    """Return the versions of what the program needs, and of MLX's backends that are there."""
    try:
        needed = [_needed_name(line) for line in metadata.requires(DISTRIBUTION) or ()]
    except metadata.PackageNotFoundError:
        needed = []
    versions = {name: _version(name) for name in (DISTRIBUTION, *filter(None, needed))}
    versions |= {name: version for name in _BACKENDS if (version := _version(name)) is not None}
    return versions


def _needed_name(requirement: str) -> str | None:
    """Return the name in a requirement, None if it is for another platform or an extra."""
    if ";" in requirement:
        return None
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    return match[0] if match is not None else None


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _folder(name: str, path: Path) -> CacheFolder:
    sizes = []
    for file in path.rglob("*"):
        try:
            if file.is_file() and not file.is_symlink():
                sizes.append(file.stat().st_size)
        except OSError:
            continue  # gone meanwhile, or not ours to read
    nearest = next((place for place in (path, *path.parents) if place.exists()), None)
    try:
        free = shutil.disk_usage(nearest).free if nearest is not None else None
    except OSError:
        free = None
    return CacheFolder(
        name=name,
        path=str(path),
        exists=path.is_dir(),
        is_writable=nearest is not None and nearest.is_dir() and os.access(nearest, os.W_OK),
        num_bytes=sum(sizes),
        num_files=len(sizes),
        free_bytes=free,
    )


def _judge_packages(versions: dict[str, str | None]) -> Iterator[Finding]:
    missing = [name for name, version in versions.items() if version is None]
    if missing:
        message = f"not installed: {', '.join(missing)}; install again: pip install {DISTRIBUTION}"
        yield Finding(name="packages", verdict="failed", message=message)
    else:
        message = f"all {len(versions)} are installed"
        yield Finding(name="packages", verdict="ok", message=message)


def _judge_backend(probe: Probe) -> Iterator[Finding]:
    if probe.found is None:
        yield Finding(name="backend", verdict="failed", message=probe.error or "")
        return
    found = probe.found
    if not found.is_right:
        message = f"a matrix product on {found.device} has the wrong result"
        yield Finding(name="backend", verdict="failed", message=message)
    else:
        message = f"MLX computes on {found.device}, {found.gflops:.0f} GFLOP/s in float32"
        yield Finding(name="backend", verdict="ok", message=message)
    if found.blas.hint is not None:
        yield Finding(name="BLAS", verdict="warning", message=found.blas.hint)


def _judge_memory(limits: MemoryLimits) -> Iterator[Finding]:
    usable = usable_bytes(limits)
    verdict: Verdict = "warning" if usable < _LITTLE_MEMORY_BYTES else "ok"
    message = f"{format_bytes(usable)} of {format_bytes(limits.total_bytes)} are usable now"
    yield Finding(name="memory", verdict=verdict, message=message)


def _judge_folder(folder: CacheFolder) -> Iterator[Finding]:
    if not folder.is_writable:
        # What is in the hub's cache may well be only for reading.
        verdict: Verdict = "warning" if folder.name == _HUB else "failed"
        message = f"{folder.path} cannot be written"
        yield Finding(name=folder.name, verdict=verdict, message=message)
    elif folder.free_bytes is not None and folder.free_bytes < _LITTLE_DISK_BYTES:
        message = f"{format_bytes(folder.free_bytes)} are free where {folder.path} is"
        yield Finding(name=folder.name, verdict="warning", message=message)


def _judge_port(port: PortState) -> Iterator[Finding]:
    if port.is_free:
        yield Finding(name="port", verdict="ok", message=f"{port.port} is free")
    else:
        message = f"{port.port} is in use by {port.used_by}; choose another with --port"
        yield Finding(name="port", verdict="warning", message=message)
