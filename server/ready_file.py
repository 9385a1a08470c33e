"""The file that tells scripts where the server is, there exactly while the model can be asked."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import msgspec

from vllm_mlx.engine.errors import UsageError


class ReadyFile:
    """Own one ready file; without a path, do nothing."""

    def __init__(self, path: str | None) -> None:
        self._path = None if path is None else Path(path)

    def prepare(self) -> None:
        """Remove a file that an earlier server left; raise `UsageError` if that cannot be done."""
        if self._path is None:
            return
        try:
            self._path.unlink(missing_ok=True)
            if not self._path.parent.is_dir():
                raise FileNotFoundError(f"no folder {self._path.parent}")
        except OSError as error:
            raise UsageError(f"cannot use the ready file {self._path}: {error}") from error

    def write(self, *, url: str, host: str, port: int, model: str) -> None:
        """Write the file at once and whole, so that who sees it can read it."""
        if self._path is None:
            return
        content = {"url": url, "host": host, "port": port, "pid": os.getpid(), "model": model}
        temporary = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        temporary.write_bytes(msgspec.json.encode(content) + b"\n")
        temporary.replace(self._path)

    def remove(self) -> None:
        """Remove the file if it is there."""
        if self._path is not None:
            with suppress(OSError):
                self._path.unlink(missing_ok=True)
