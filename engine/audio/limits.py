"""How large and how long a sound file may be."""

from __future__ import annotations

import math

import msgspec

from vllm_mlx.engine.errors import FileTooLargeError, UsageError

DEFAULT_MAX_MB = 100
DEFAULT_MAX_MINUTES = 120.0


class AudioLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Bound what one file may cost, before and while it is decoded."""

    #: Bytes of the file as it is sent.
    max_bytes: int = DEFAULT_MAX_MB * 1024 * 1024
    #: Sound in it, however few bytes that takes.
    max_seconds: float = DEFAULT_MAX_MINUTES * 60

    def __post_init__(self) -> None:
        if self.max_bytes < 1:
            raise UsageError(f"a sound file has at least 1 byte, not {self.max_bytes}")
        if not 0 < self.max_seconds < math.inf:
            raise UsageError(f"the longest sound must be above 0 s, not {self.max_seconds}")

    def too_large(self) -> FileTooLargeError:
        """Return the error for a file of too many bytes."""
        return FileTooLargeError(
            f"the file is larger than {self.max_bytes / 2**20:g} MiB (--max-audio-mb)",
            param="file",
        )

    def too_long(self) -> FileTooLargeError:
        """Return the error for a file with too much sound in it."""
        return FileTooLargeError(
            f"the file has more than {self.max_seconds / 60:g} minutes of sound "
            "(--max-audio-minutes)",
            param="file",
        )
