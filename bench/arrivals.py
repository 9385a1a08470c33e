"""When requests are sent: schedules of an open loop, and both loops' drivers."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable, Iterator

#: Gives the event loop's own time back to a driver: `perform(item, scheduled_at)`.
Perform = Callable[[int, float], Awaitable[None]]

ARRIVALS = ("poisson", "constant")


def schedule(rate: float, arrival: str, burstiness: float, rng: random.Random) -> Iterator[float]:
    """Yield the offsets in seconds at which an open loop sends, without end; the first is 0.

    `constant` sends every 1/rate seconds. `poisson` draws the gaps from a gamma distribution of
    mean 1/rate and shape `burstiness`: 1 is a Poisson process, below it requests come in bursts,
    above it they come more evenly.
    """
    at = 0.0
    while True:
        yield at
        if arrival == "constant":
            at += 1 / rate
        else:
            at += rng.gammavariate(burstiness, 1 / (rate * burstiness))


async def closed_loop(
    items: Iterable[int], concurrency: int, perform: Perform, stop_at: float | None
) -> None:
    """Keep `concurrency` items running until all are done; begin none after `stop_at`."""
    loop = asyncio.get_running_loop()
    remaining = iter(items)

    async def work() -> None:
        for item in remaining:
            if stop_at is not None and loop.time() >= stop_at:
                return
            await perform(item, loop.time())

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(work())


async def open_loop(
    items: Iterable[int], offsets: Iterator[float], perform: Perform, stop_at: float | None
) -> None:
    """Begin each item at its time, however many still run; begin none after `stop_at`."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    async with asyncio.TaskGroup() as group:
        for item in items:
            due = began + next(offsets)
            if stop_at is not None and due >= stop_at:
                return
            await asyncio.sleep(max(0.0, due - loop.time()))
            group.create_task(_performed(perform, item, due))


async def _performed(perform: Perform, item: int, due: float) -> None:
    await perform(item, due)
