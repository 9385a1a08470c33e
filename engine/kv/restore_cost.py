"""Predict whether blocks are had sooner by reading or by computing them, from both so far."""

from __future__ import annotations

import statistics
from collections import deque

#: Assumed until a restore was measured.
FIRST_READ_BYTES_PER_S = 500e6
#: A restore of less says more of a disk's latency than of its rate.
MIN_MEASURED_BYTES = 4 << 20
#: A chunk of less says more of a forward's fixed cost than of its tokens'.
MIN_MEASURED_TOKENS = 32
#: Chunks that are closer than this to each other say nothing of how the cost grows.
_MIN_DISTANCE_TOKENS = 512
#: So many of the newest measurements count.
_NUM_SAMPLES = 32


class RestoreCost:
    """Learn how long computing and reading prompt tokens takes; used by the engine thread.

    Both are measured from end to end, with whatever else ran meanwhile. A token costs more the
    more tokens it attends to: its time is taken as a line over its position, found with medians
    (Theil and Sen's estimator), so that a chunk which compiled kernels does not count for a
    thousand that did not.
    """

    def __init__(self) -> None:
        #: Middle position of a chunk, and its seconds a token.
        self._chunks: deque[tuple[float, float]] = deque(maxlen=_NUM_SAMPLES)
        self._bytes_per_s: deque[float] = deque(maxlen=_NUM_SAMPLES)

    def computed(self, start: int, num_tokens: int, seconds: float) -> None:
        """Learn from a chunk of `num_tokens` whose first is at position `start`."""
        if num_tokens >= MIN_MEASURED_TOKENS and seconds > 0:
            self._chunks.append((start + num_tokens / 2, seconds / num_tokens))

    def restored(self, num_bytes: int, seconds: float) -> None:
        """Learn from blocks that came back from disk to the device."""
        if num_bytes >= MIN_MEASURED_BYTES and seconds > 0:
            self._bytes_per_s.append(num_bytes / seconds)

    def compute_s(self, start: int, num_tokens: int) -> float | None:
        """Predict the seconds of computing so many tokens; None before anything was computed."""
        if not self._chunks:
            return None
        slope = self._slope()
        base = statistics.median(cost - slope * position for position, cost in self._chunks)
        middle = start + num_tokens / 2
        # Far from what was measured a line says little; tokens are never nearly free.
        least = statistics.median(cost for _, cost in self._chunks) / 4
        return num_tokens * max(least, base + slope * middle)

    def restore_s(self, num_bytes: int) -> float:
        """Predict the seconds of reading so many bytes."""
        rates = self._bytes_per_s
        return num_bytes / (statistics.median(rates) if rates else FIRST_READ_BYTES_PER_S)

    def is_worthwhile(self, start: int, num_tokens: int, num_bytes: int) -> bool:
        """Say whether reading is predicted to be faster; true while nothing was computed yet."""
        compute_s = self.compute_s(start, num_tokens)
        return compute_s is None or self.restore_s(num_bytes) < compute_s

    def _slope(self) -> float:
        """Return how much longer a token takes for each position further on, never below 0."""
        chunks = list(self._chunks)
        slopes = [
            (cost - other_cost) / (position - other_position)
            for index, (position, cost) in enumerate(chunks)
            for other_position, other_cost in chunks[:index]
            if abs(position - other_position) >= _MIN_DISTANCE_TOKENS
        ]
        return max(0.0, statistics.median(slopes)) if slopes else 0.0
