"""How often one client may ask: a token bucket for each, in a table of bounded size."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

from vllm_mlx.engine.errors import RateLimitedError

_MINUTE_S = 60.0

#: Clients that are remembered; the one that has been silent longest goes first.
MAX_CLIENTS = 10_000


class RateLimiter:
    """Let each client in `per_minute` times a minute, that many at once at most; 0 does not limit.

    Event loop only. A forgotten client starts afresh, so the table's bound can only favour it.
    """

    def __init__(
        self,
        per_minute: int,
        *,
        max_clients: int = MAX_CLIENTS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._per_minute = per_minute
        self._max_clients = max_clients
        self._clock = clock
        #: What each client may still ask, and when that was so; the longest silent come first.
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    @property
    def num_clients(self) -> int:
        """Count the clients that are remembered."""
        return len(self._buckets)

    def check(self, client: str) -> None:
        """Count one request of `client`; raise `RateLimitedError` when it has none left."""
        if not self._per_minute:
            return
        now = self._clock()
        tokens, seen = self._buckets.pop(client, (float(self._per_minute), now))
        tokens = min(self._per_minute, tokens + (now - seen) * self._per_minute / _MINUTE_S)
        is_allowed = tokens >= 1
        self._buckets[client] = (tokens - is_allowed, now)
        while len(self._buckets) > self._max_clients:
            self._buckets.popitem(last=False)
        if not is_allowed:
            raise RateLimitedError(
                f"this client has asked more than {self._per_minute} times a minute",
                retry_after_s=(1 - tokens) * _MINUTE_S / self._per_minute,
            )
