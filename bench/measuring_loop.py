"""An event loop that knows when bytes arrived, and how long it looked away.

A burst of answers is read one socket after the other, and what is read last would seem to have
come late. The selector therefore notes the time at which it returned: whatever is read in that
turn of the loop had arrived by then.
"""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Callable


class StampedSelector(selectors.DefaultSelector):
    """Note when each `select` returned, and how long the loop worked between two of them."""

    def __init__(self) -> None:
        super().__init__()
        self.woke_at = time.monotonic()
        #: Longest time between waking and looking again, since the turns were last forgotten.
        self.longest_turn_s = 0.0
        self._turn_began = self.woke_at

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Wait for sockets as the base class does."""
        turn_s = time.monotonic() - self._turn_began
        self.longest_turn_s = max(self.longest_turn_s, turn_s)
        ready = super().select(timeout)
        self.woke_at = self._turn_began = time.monotonic()
        return ready

    def forget_turns(self) -> None:
        """Begin to look for the longest turn anew, now."""
        self.longest_turn_s = 0.0
        self._turn_began = time.monotonic()


class MeasuringLoop(asyncio.SelectorEventLoop):
    """Run asyncio on a `StampedSelector`; `time()` and the stamps are one monotonic clock."""

    def __init__(self) -> None:
        self._stamps = StampedSelector()
        super().__init__(self._stamps)

    def arrived_at(self) -> float:
        """Return the time by which what is read in this turn of the loop had arrived."""
        return self._stamps.woke_at

    def take_longest_turn_s(self) -> float:
        """Return the longest time that the loop did not look at its sockets; start anew."""
        longest = self._stamps.longest_turn_s
        self._stamps.forget_turns()
        return longest


def arrival_clock(loop: asyncio.AbstractEventLoop) -> Callable[[], float]:
    """Return what tells when the bytes being read arrived; on another kind of loop, the time."""
    return loop.arrived_at if isinstance(loop, MeasuringLoop) else loop.time
