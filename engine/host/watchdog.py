"""Notice an engine that computes one step without end, and tell it from one that is stopped."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

import psutil

#: How often to look; a shorter limit is looked at this many times.
_LOOK_S = 1.0
_LOOKS = 8

_STOPPED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)


class WatchedClient(Protocol):
    """Name what the watchdog needs of who holds the requests open at a process."""

    #: Counts the process's messages; each means that it has got to the end of a step.
    num_heard: int

    @property
    def num_open(self) -> int:
        """Count the requests that have not ended."""
        ...

    def ask_stats(self) -> object:
        """Ask the process for its statistics, unless they are asked for already."""
        ...


class StepWatchdog:
    """Watch one engine process from outside, which works whatever lock its own threads hold.

    It answers between two steps, so an answer means that a step has ended: with requests open and
    silence all the while, it is asked. Time in which it was stopped (SIGSTOP, a debugger), or this
    process was, does not count. Event loop only.
    """

    def __init__(
        self,
        client: WatchedClient,
        limit_s: float,
        is_stopped: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare; one step may take `limit_s`, 0 for any time."""
        self._client = client
        self._limit_s = limit_s
        self._is_stopped = is_stopped
        self._clock = clock

    async def wait_hung(self) -> None:
        """Return when a step has taken too long; or never."""
        if not self._limit_s:
            await asyncio.Event().wait()
        pause_s = min(_LOOK_S, self._limit_s / _LOOKS)
        heard = self._client.num_heard
        silent_s, looked = 0.0, self._clock()
        while silent_s < self._limit_s:
            await asyncio.sleep(pause_s)
            now = self._clock()
            # Much more than was asked for passes only when this process itself did not run.
            passed_s, looked = min(now - looked, 2 * pause_s), now
            if not self._client.num_open or self._client.num_heard != heard:
                heard, silent_s = self._client.num_heard, 0.0
            elif not self._is_stopped():
                silent_s += passed_s
                self._client.ask_stats()


def is_stopped(pid: int) -> bool:
    """Say whether a process has been stopped, and would go on if it were let."""
    try:
        return psutil.Process(pid).status() in _STOPPED
    except psutil.Error:
        return False
