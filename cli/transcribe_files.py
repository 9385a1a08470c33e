"""Which files `transcribe` reads, and where what it hears is written."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from vllm_mlx.engine.errors import UsageError

#: What stands for stdin.
STDIN = "-"

#: What counts as sound in a folder; a file that is named itself is read whatever it is called.
SUFFIXES = frozenset(
    {
        *(".wav", ".mp3", ".flac", ".m4a", ".mp4", ".mov", ".ogg", ".oga", ".opus", ".webm"),
        *(".mkv", ".mka", ".aac", ".aif", ".aiff", ".caf"),
    }
)


@dataclasses.dataclass(frozen=True)
class SoundFile:
    """Hold one input and the files that become of it; none where it goes to stdout."""

    #: None is stdin.
    path: Path | None
    outputs: tuple[Path, ...] = ()

    @property
    def name(self) -> str:
        """Return what people are told it is."""
        return str(self.path) if self.path is not None else "stdin"

    @property
    def is_done(self) -> bool:
        """Say whether all of its outputs are there, written after the sound was."""
        if self.path is None or not self.outputs:
            return False
        try:
            heard_at = self.path.stat().st_mtime
            return all(output.stat().st_mtime >= heard_at for output in self.outputs)
        except OSError:
            return False


def plan_files(
    names: Sequence[str], formats: Sequence[str], output_dir: Path | None, *, to_stdout: bool
) -> list[SoundFile]:
    """Return the inputs in order, each once; a folder stands for all sound in it.

    Outputs stand beside their input, or in `output_dir`, with the suffix in place of its own; where
    two inputs would share one, it is added. Raises `UsageError` for what is not there.
    """
    paths: dict[Path | None, None] = {}
    for name in names:
        for path in _expanded(name):
            paths[path] = None
    targets = Counter(_target(path, output_dir) for path in paths if path is not None)
    planned = []
    for path in paths:
        if path is None or to_stdout:
            planned.append(SoundFile(path))
            continue
        target = _target(path, output_dir)
        stem = target.name if targets[target] == 1 else path.name
        planned.append(SoundFile(path, tuple(target.with_name(f"{stem}.{f}") for f in formats)))
    return planned


def _expanded(name: str) -> Iterator[Path | None]:
    if name == STDIN:
        yield None
        return
    path = Path(name)
    if not path.is_dir():
        # One that is not there is a fault of its own, which does not stop the others.
        yield path
        return
    found = sorted(p for p in path.rglob("*") if p.suffix.lower() in SUFFIXES and p.is_file())
    if not found:
        raise UsageError(f"{name}: no sound files in this folder")
    yield from found


def _target(path: Path, output_dir: Path | None) -> Path:
    return (output_dir or path.parent) / path.stem


def write_whole(path: Path, text: str) -> None:
    """Write a file that is either there with all of its text or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        umask = os.umask(0)
        os.umask(umask)
        Path(name).chmod(0o666 & ~umask)
        Path(name).replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(name).unlink()
        raise
