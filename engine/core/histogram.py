"""Count how long things took, in buckets, so that counts of many places can be added; pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import msgspec

#: Upper bounds of the time between two tokens of one row, in seconds.
TOKEN_GAP_BOUNDS_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.015, 0.025, 0.04, 0.06, 0.1),
    *(0.15, 0.25, 0.4, 0.6, 1.0, 2.5, 5.0, 10.0, 25.0),
)


class HistogramCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Hold what a histogram has counted: one count a bucket, the last for all above the bounds."""

    counts: tuple[int, ...] = ()
    #: Of all values.
    total: float = 0.0

    def since(self, earlier: HistogramCounts | None) -> HistogramCounts:
        """Return what came after `earlier`, a snapshot of the same histogram; None is its start."""
        if earlier is None or not earlier.counts:
            return self
        pairs = zip(self.counts, earlier.counts, strict=True)
        return HistogramCounts(
            counts=tuple(now - before for now, before in pairs), total=self.total - earlier.total
        )


class Histogram:
    """Own the counts of one histogram; each bound belongs to the bucket below it."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self._counts = [0] * (len(self.bounds) + 1)
        self._total = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self._counts[bisect_left(self.bounds, value)] += 1
        self._total += value

    def add(self, counts: HistogramCounts) -> None:
        """Add what another histogram with these bounds has counted."""
        for index, count in enumerate(counts.counts):
            self._counts[index] += count
        self._total += counts.total

    def snapshot(self) -> HistogramCounts:
        """Return what was counted until now."""
        return HistogramCounts(counts=tuple(self._counts), total=self._total)
