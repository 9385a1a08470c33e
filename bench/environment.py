"""Where a measurement was made: hardware, versions, revision, and whether two places are alike."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

_COMMAND_TIMEOUT_S = 5
_SECRET_FLAGS = ("--api-key",)

#: What must agree for two runs to be compared; the machine counts only if the server runs on it.
_SERVER_COLUMNS = ("model", "server_device", "server_is_local")
_MACHINE_COLUMNS = ("chip", "cpu_cores", "memory_gb", "gpu")


def environment_columns(folder: Path) -> dict[str, Any]:
    """Return the columns on this machine and the revision of `folder`."""
    import psutil

    return {
        "chip": _chip(),
        "cpu_cores": os.cpu_count(),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "gpu": _gpus(),
        "os": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python_version": platform.python_version(),
        "client_version": metadata.version("vllm-mlx"),
        "git_revision": git_revision(folder),
    }


def differences(baseline: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """Return in words what makes a baseline's row unlike the current ones, nothing if alike."""
    names = [*_SERVER_COLUMNS]
    if current.get("server_is_local"):
        names += _MACHINE_COLUMNS
    return [
        f"{name} was {_shown(baseline.get(name))}, is {_shown(current.get(name))}"
        for name in names
        if baseline.get(name) != current.get(name)
    ]


def git_revision(folder: Path) -> str | None:
    """Return the revision of the repository around `folder`, `+` if files differ; else None."""
    revision = _output(["git", "-C", str(folder), "rev-parse", "--short=12", "HEAD"])
    if revision is None:
        return None
    changes = _output(["git", "-C", str(folder), "status", "--porcelain", "-uno"])
    return f"{revision}+" if changes else revision


def command_line(arguments: Sequence[str]) -> str:
    """Return a command line for a report: quoted, and without the keys it holds."""
    import shlex

    shown: list[str] = []
    is_secret = False
    for argument in arguments:
        flag, has_value, _ = argument.partition("=")
        if is_secret:
            shown.append("***")
            is_secret = False
        elif flag in _SECRET_FLAGS:
            shown.append(f"{flag}=***" if has_value else flag)
            is_secret = not has_value
        else:
            shown.append(_without_credentials(argument))
    return " ".join(shlex.quote(argument) if argument != "***" else "***" for argument in shown)


def _without_credentials(argument: str) -> str:
    """Return a URL without its user and password, anything else as it is."""
    scheme, separator, rest = argument.partition("://")
    host = rest.partition("/")[0]
    if not separator or "@" not in host:
        return argument
    return f"{scheme}://{rest[host.rindex('@') + 1 :]}"


def _chip() -> str:
    if sys.platform == "darwin":
        return _output(["sysctl", "-n", "machdep.cpu.brand_string"]) or platform.processor()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _gpus() -> str | None:
    if shutil.which("nvidia-smi") is None:
        return None
    names = _output(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"])
    return ", ".join(names.splitlines()) if names else None


def _output(command: list[str]) -> str | None:
    """Return what a command prints, None where it is missing or fails."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def _shown(value: Any) -> str:
    return "unknown" if value is None else str(value)
