"""Count what goes wrong with the SSD tier, by reason, and log each reason once."""

from __future__ import annotations

import errno
import logging
import sqlite3
import threading
from typing import Literal

FaultReason = Literal[
    "missing",  # a file that the index knows is gone: another process or a person removed it
    "damaged",  # torn, cut off, flipped bits
    "version",  # a file of another format version
    "full",  # no space left on the disk, or a limit on file sizes
    "read_only",  # the folder cannot be written
    "io",  # any other fault of the file system
    "busy",  # another process held the index for too long
    "index",  # the index is damaged or cannot be used; it is made anew
    "too_large",  # one run is larger than the whole cap
    "no_room",  # nothing could be evicted for it
    "orphan",  # its parent is not stored, so that it would never be found
    "invalid",  # it contradicts itself; a defect of the program
    "queue_full",  # dropped by the write-behind queue
]

_LOG = logging.getLogger(__name__)

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_READ_ONLY = {errno.EROFS, errno.EACCES, errno.EPERM}
_MISSING = {errno.ENOENT, errno.ENOTDIR}


class FaultCounter:
    """Count faults by reason; any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, int] = {}

    def count(self, reason: FaultReason, detail: object) -> None:
        """Count a fault; the first of a reason is logged with its detail."""
        with self._lock:
            seen = self._counts.get(reason, 0)
            self._counts[reason] = seen + 1
        if not seen:
            _LOG.warning("prefix store: %s: %s (logged once, counted from here on)", reason, detail)

    def counts(self) -> dict[str, int]:
        """Return how often each reason has occurred."""
        with self._lock:
            return dict(self._counts)


def reason_of(error: OSError | sqlite3.Error) -> FaultReason:
    """Return the reason that an error of the file system or of SQLite is counted under."""
    if isinstance(error, OSError):
        if error.errno in _FULL:
            return "full"
        if error.errno in _READ_ONLY:
            return "read_only"
        return "missing" if error.errno in _MISSING else "io"
    # The lower byte is the primary code; the rest of an extended code is detail.
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
    if code in {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}:
        return "busy"
    if code == sqlite3.SQLITE_FULL:
        return "full"
    return "read_only" if code == sqlite3.SQLITE_READONLY else "index"
