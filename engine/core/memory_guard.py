"""Watch the memory that the machine has left, and give way step by step when it runs short."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from enum import IntEnum

from vllm_mlx.engine.core.prefixes import Prefixes
from vllm_mlx.engine.core.scheduler import Scheduler
from vllm_mlx.engine.core.stats import MemoryPressure, PressureName
from vllm_mlx.engine.errors import OutOfMemoryError

logger = logging.getLogger(__name__)

#: How often the machine is asked.
_INTERVAL_S = 0.25
#: How long a client that was refused should wait.
_RETRY_AFTER_S = 5.0
#: Memory counts as enough again this far above the reserve, so that a level does not flutter.
_RECOVERY = 1.25


class Pressure(IntEnum):
    """Say how short memory is; each level does what those below it do."""

    NONE = 0
    #: Less than the reserve is left: unreferenced prefixes go.
    EVICT = 1
    #: Less than half of it: nothing new starts beside what runs, and new requests are refused.
    REFUSE = 2
    #: Less than a quarter: the youngest rows go back to waiting, one at a time.
    PREEMPT = 3

    @classmethod
    def of(cls, available_bytes: int, reserve_bytes: int) -> Pressure:
        """Return the level at which so much is left."""
        if available_bytes >= reserve_bytes:
            return cls.NONE
        if available_bytes >= reserve_bytes / 2:
            return cls.EVICT
        return cls.REFUSE if available_bytes >= reserve_bytes / 4 else cls.PREEMPT


class MemoryGuard:
    """Keep a reserve of the machine's memory free; used by the engine thread between forwards.

    The budgets of KV and prefixes are set once; this is for what other programs take later. The
    row that came first always goes on, so that whatever memory does, something advances. A
    reserve of 0 watches nothing.
    """

    def __init__(
        self,
        available_bytes: Callable[[], int],
        reserve_bytes: int,
        *,
        release_memory: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._available_bytes = available_bytes
        self._reserve_bytes = reserve_bytes
        self._release_memory = release_memory
        self._clock = clock
        self._looked_s = -_INTERVAL_S
        self._free_bytes = 0
        self._has_acted = True
        self.level = Pressure.NONE
        self.num_refused = 0

    @property
    def state(self) -> MemoryPressure:
        """Return what a status page says."""
        return MemoryPressure(
            level=_NAMES[self.level],
            free_bytes=self._free_bytes,
            reserve_bytes=self._reserve_bytes,
            num_refused=self.num_refused,
        )

    def check_room(self) -> None:
        """Raise `OutOfMemoryError` while memory is too short for another request."""
        self._look()
        if self.level >= Pressure.REFUSE:
            self.num_refused += 1
            raise OutOfMemoryError(
                f"this machine is short of memory: {self._free_bytes >> 20} MiB are free, and "
                f"{self._reserve_bytes >> 20} MiB are to stay so (--memory-reserve-mb)",
                retry_after_s=_RETRY_AFTER_S,
            )

    def relieve(self, scheduler: Scheduler, prefixes: Prefixes) -> None:
        """Look at the memory, at most four times a second, and do what its level asks for."""
        self._look()
        if self._has_acted:
            return
        self._has_acted = True
        scheduler.is_short_of_memory = self.level >= Pressure.REFUSE
        if self.level >= Pressure.PREEMPT:
            scheduler.preempt_last()
        if self.level >= Pressure.EVICT:
            prefixes.evict(self._reserve_bytes - self._free_bytes)
            self._release_memory()

    def _look(self) -> None:
        """Find out how much is free, if it is time to."""
        now = self._clock()
        if self._reserve_bytes and now - self._looked_s >= _INTERVAL_S:
            self._looked_s = now
            self._has_acted = False
            self._set_level(self._available_bytes())

    def _set_level(self, free_bytes: int) -> None:
        level = Pressure.of(free_bytes, self._reserve_bytes)
        if level < self.level:
            # Going down takes a little more than going up did.
            level = min(self.level, Pressure.of(int(free_bytes / _RECOVERY), self._reserve_bytes))
        if level != self.level:
            logger.warning(
                "memory: %d MiB are free of a reserve of %d MiB; %s",
                free_bytes >> 20,
                self._reserve_bytes >> 20,
                _WORDS[level],
            )
        self.level, self._free_bytes = level, free_bytes


_NAMES: dict[Pressure, PressureName] = {
    Pressure.NONE: "none",
    Pressure.EVICT: "evict",
    Pressure.REFUSE: "refuse",
    Pressure.PREEMPT: "preempt",
}
_WORDS = {
    Pressure.NONE: "nothing is to be done",
    Pressure.EVICT: "prefixes are evicted",
    Pressure.REFUSE: "prefixes are evicted and new requests refused",
    Pressure.PREEMPT: "prefixes are evicted, new requests refused and rows preempted",
}
