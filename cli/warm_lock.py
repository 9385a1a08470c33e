"""Keep two runs of `warm` on one folder from computing the same at the same time."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from vllm_mlx.engine.errors import CacheError
from vllm_mlx.engine.kv.disk_folder import StoreFolder

LOCK_NAME = "warm.lock"


@contextlib.contextmanager
def warm_lock(path: Path, on_wait: Callable[[], None] | None) -> Iterator[bool]:
    """Hold the folder's lock, and give whether it is held; the folder is made if it is missing.

    While another process holds it, `on_wait` is called and the lock waited for; without `on_wait`
    it is not. The system lets go of it however the process ends. Raises CacheError.
    """
    try:
        StoreFolder(path).make()
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        descriptor = os.open(path / LOCK_NAME, flags, 0o600)
    except OSError as error:
        raise CacheError(f"{path} cannot be written: {error.strerror or error}") from error
    try:
        yield _acquire(descriptor, on_wait)
    finally:
        os.close(descriptor)


def _acquire(descriptor: int, on_wait: Callable[[], None] | None) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        if on_wait is None:
            return False
        on_wait()
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    return True
