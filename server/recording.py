"""Write down the requests that a server accepts, in the form that `warm --prompts` reads."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock

import msgspec

from vllm_mlx.engine.errors import UsageError

logger = logging.getLogger(__name__)

MAX_DAY_BYTES = 1 << 28
MAX_DAYS = 14
#: What waits for the disk; a request beyond that is not recorded.
MAX_PENDING_BYTES = 1 << 26

#: Fields that say who asks, which no prompt depends on.
_PERSONAL_FIELDS = (
    *("user", "metadata", "safety_identifier", "prompt_cache_key"),
    *("user_profile_id", "workspace_id", "client_metadata"),
)
_FILE_NAME = re.compile(r"requests-\d{4}-\d{2}-\d{2}\.jsonl")


class RequestRecorder:
    """Own a folder of recorded requests, and the thread that writes one file a day to it.

    A line is `{"at", "path", "body"}`: no header and so no key, no address, and no field that says
    who asks. A day's file ends at `max_day_bytes`, and the newest `max_days` files are kept. What
    cannot be written is lost, and said once a reason. Make one with `open_recorder`.
    """

    def __init__(
        self,
        folder: Path,
        *,
        max_day_bytes: int = MAX_DAY_BYTES,
        max_days: int = MAX_DAYS,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._folder = folder
        self._max_day_bytes = max_day_bytes
        self._max_days = max_days
        self._clock = clock
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="recorder")
        self._pending_bytes = 0
        self._lock = Lock()
        self._said: set[str] = set()

    def record(self, path: str, body: bytes) -> None:
        """Write down the JSON body of an accepted request; returns at once."""
        with self._lock:
            is_behind = self._pending_bytes + len(body) > MAX_PENDING_BYTES
            self._pending_bytes += 0 if is_behind else len(body)
        if is_behind:
            self._say("the disk is too slow")
        else:
            self._writer.submit(self._write, path, body, self._clock())

    def close(self) -> None:
        """Write what waits and end the thread."""
        self._writer.shutdown()

    def _write(self, path: str, body: bytes, now: float) -> None:
        try:
            line = _line(path, body, now)
            name = time.strftime("requests-%Y-%m-%d.jsonl", time.gmtime(now))
            if self._append(self._folder / name, line):
                self._remove_old()
        except OSError as error:
            self._say(error.strerror or str(error))
        finally:
            with self._lock:
                self._pending_bytes -= len(body)

    def _append(self, file: Path, line: bytes) -> bool:
        """Append a line whole or not at all; return whether the file is new."""
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        descriptor = os.open(file, flags, 0o600)
        try:
            size = os.fstat(descriptor).st_size
            if size + len(line) > self._max_day_bytes:
                self._say(f"{file.name} has reached {self._max_day_bytes} bytes")
                return False
            written = os.write(descriptor, line)
            if written < len(line):
                # The disk is full: half a line would be a fault of the next reader's.
                os.ftruncate(descriptor, size)
                self._say("no space left on the device")
            return size == 0
        finally:
            os.close(descriptor)

    def _remove_old(self) -> None:
        files = sorted(f for f in self._folder.iterdir() if _FILE_NAME.fullmatch(f.name))
        for file in files[: -self._max_days]:
            file.unlink(missing_ok=True)

    def _say(self, reason: str) -> None:
        if reason not in self._said:
            self._said.add(reason)
            logger.warning("a request was not recorded: %s (said once)", reason)


def open_recorder(folder: Path) -> RequestRecorder:
    """Open a folder, made for its owner only if it is missing; raise `UsageError` if it cannot."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot record to {folder}: {error.strerror or error}") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(f"cannot record to {folder}: it cannot be written")
    return RequestRecorder(folder)


def _line(path: str, body: bytes, now: float) -> bytes:
    fields = msgspec.json.decode(body)
    for name in _PERSONAL_FIELDS:
        fields.pop(name, None)
    at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(now))
    return msgspec.json.encode({"at": at, "path": path, "body": fields}) + b"\n"
