"""Folders of the cache appear whole, once, and again when they are damaged."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from vllm_mlx.engine.errors import ModelLoadError
from vllm_mlx.engine.models import cached_folder
from vllm_mlx.engine.models.cached_folder import ensure_folder, user_cache_dir


class Builder:
    """Write a folder of two files and count how often."""

    def __init__(self) -> None:
        self.builds = 0
        self.waits = 0

    def build(self, folder: Path) -> None:
        """Fill `folder`."""
        self.builds += 1
        (folder / "weights").write_bytes(b"w" * 1000)
        (folder / "config").write_text("c")

    def ensure(self, path: Path, *, version: int = 1, source: str = "s") -> Path:
        """Ask for the folder."""

        def wait() -> None:
            self.waits += 1

        return ensure_folder(
            path, format_version=version, source=source, build=self.build, on_wait=wait
        )


@pytest.fixture
def builder() -> Builder:
    """Return a builder that has built nothing."""
    return Builder()


def test_a_folder_is_built_once(tmp_path: Path, builder: Builder) -> None:
    """The second caller finds the first one's work, and only the folder and its lock are left."""
    path = builder.ensure(tmp_path / "cache/m")
    assert builder.ensure(path) == path
    assert builder.builds == 1
    assert sorted(entry.name for entry in path.parent.iterdir()) == ["m", "m.lock"]
    assert (path / "weights").read_bytes() == b"w" * 1000


def flip(path: Path) -> None:
    """Change one byte in place, size unchanged."""
    data = bytearray(path.read_bytes())
    data[500] ^= 1
    path.write_bytes(data)


DAMAGE: dict[str, Callable[[Path], None]] = {
    "a flipped byte": lambda path: flip(path / "weights"),
    "a cut file": lambda path: os.truncate(path / "weights", 999),
    "a missing file": lambda path: (path / "config").unlink(),
    "a cut manifest": lambda path: os.truncate(path / "manifest.json", 20),
    "no manifest": lambda path: (path / "manifest.json").unlink(),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_folder_is_built_again(tmp_path: Path, builder: Builder, damage: str) -> None:
    """Whatever is wrong with it, the next caller gets a whole folder."""
    path = builder.ensure(tmp_path / "m")
    DAMAGE[damage](path)
    builder.ensure(path)
    assert builder.builds == 2
    assert (path / "weights").read_bytes() == b"w" * 1000
    assert builder.ensure(path) == path
    assert builder.builds == 2


def test_a_touched_but_equal_file_is_kept(tmp_path: Path, builder: Builder) -> None:
    """Another modification time alone leads to hashing and not to building."""
    path = builder.ensure(tmp_path / "m")
    os.utime(path / "weights", (1, 1))
    builder.ensure(path)
    assert builder.builds == 1


def test_another_format_or_source_is_built_again(tmp_path: Path, builder: Builder) -> None:
    """A newer program, or other weights, replace what an older one left."""
    path = builder.ensure(tmp_path / "m")
    builder.ensure(path, version=2)
    builder.ensure(path, version=2, source="other")
    assert builder.builds == 3


def test_a_failed_build_leaves_nothing(tmp_path: Path) -> None:
    """An exception in the middle reaches the caller, and no half folder stays."""

    def build(folder: Path) -> None:
        (folder / "weights").write_bytes(b"half")
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        ensure_folder(
            tmp_path / "m", format_version=1, source="s", build=build, on_wait=lambda: None
        )
    assert [entry.name for entry in tmp_path.iterdir()] == ["m.lock"]


def test_an_unwritable_cache_says_what_to_do(tmp_path: Path, builder: Builder) -> None:
    """The error names the folder and the variable that moves it."""
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ModelLoadError, match="VLLM_MLX_CACHE_DIR"):
        builder.ensure(tmp_path / "file/sub/m")


CHILD = """
import sys, time
from pathlib import Path
from vllm_mlx.engine.models.cached_folder import ensure_folder

def build(folder):
    print("building", flush=True)
    time.sleep(float(sys.argv[2]))
    (folder / "weights").write_bytes(b"w" * 1000)

ensure_folder(Path(sys.argv[1]), format_version=1, source="s", build=build,
              on_wait=lambda: print("waiting", flush=True))
print("done", flush=True)
"""


def start_child(path: Path, build_s: float) -> subprocess.Popen[str]:
    """Start a process that asks for `path` and builds slowly."""
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, str(path), str(build_s)], stdout=subprocess.PIPE, text=True
    )


def test_two_processes_build_once(tmp_path: Path) -> None:
    """One builds while the other waits for it and uses its work."""
    children = [start_child(tmp_path / "m", 0.5) for _ in range(2)]
    outputs = sorted(child.communicate(timeout=30)[0].split() for child in children)
    assert outputs == [["building", "done"], ["waiting", "done"]]


def test_a_killed_builder_is_cleaned_up_after(tmp_path: Path, builder: Builder) -> None:
    """The lock of a killed process is free, and what it left is removed."""
    path = tmp_path / "m"
    with start_child(path, 60) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "building\n"
        child.send_signal(signal.SIGKILL)
    assert not path.exists()
    assert len(list(tmp_path.glob(".m.tmp-*"))) == 1
    begin = time.monotonic()
    builder.ensure(path)
    assert time.monotonic() - begin < 5
    assert builder.waits == 0
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["m", "m.lock"]


def test_the_cache_folder_can_be_moved(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The variable wins over the platform's own place."""
    monkeypatch.setenv(cached_folder.CACHE_DIR_VARIABLE, str(tmp_path / "elsewhere"))
    assert user_cache_dir() == tmp_path / "elsewhere"
    monkeypatch.delenv(cached_folder.CACHE_DIR_VARIABLE)
    assert user_cache_dir().name == "vllm-mlx"
