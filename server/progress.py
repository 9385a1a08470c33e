"""What the engine says of its open requests, asked sparingly however many want to know."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from vllm_mlx.engine.core.stats import EngineStats
from vllm_mlx.engine.errors import EngineUnavailableError
from vllm_mlx.server.engine_port import EnginePort

#: How old a snapshot may be for those who watch; many silent streams share one question.
_WATCH_AGE_S = 1.0

#: How long a snapshot is waited for: the engine answers between two steps, and a step may be long.
_ANSWER_TIMEOUT_S = 5.0

#: How long those wait for a fresh answer who take an older one just as well.
_GLANCE_S = 0.01


class ProgressReader:
    """Read the engine's statistics for those who watch requests; event loop only."""

    def __init__(self, engine: EnginePort, clock: Callable[[], float]) -> None:
        self._engine = engine
        self._clock = clock
        self._lock = asyncio.Lock()
        self._newest: EngineStats | None = None
        self._read_at = float("-inf")

    async def snapshot(self, max_age_s: float = 0.0) -> EngineStats | None:
        """Return what the engine said at most `max_age_s` ago, or None if it does not answer."""
        asked_at = self._clock()
        async with self._lock:
            # Whoever waited for another's question takes its answer if it was asked late enough.
            if self._read_at < asked_at - max_age_s:
                self._read_at = self._clock()
                try:
                    async with asyncio.timeout(_ANSWER_TIMEOUT_S):
                        self._newest = await self._engine.stats()
                except (TimeoutError, EngineUnavailableError):
                    self._newest = None
            return self._newest

    async def glance(self) -> EngineStats | None:
        """Return the newest that is known within a moment, with its age; None without an engine.

        The engine answers between two steps, which may be long; unasked, it tells once a second.
        """
        try:
            return await self._engine.stats(_GLANCE_S)
        except EngineUnavailableError:
            return None

    async def marks(self, row_ids: Sequence[str]) -> tuple[tuple[int, int], ...] | None:
        """Return prompt and completion tokens done by each row; None when nobody knows.

        They change whenever a row moves on: waiting in the queue is no progress, and computing
        prompt tokens is, though no text comes of it.
        """
        stats = await self.snapshot(_WATCH_AGE_S)
        if stats is None:
            return None
        done = {
            request.request_id: (request.num_prefilled_tokens, request.num_completion_tokens)
            for request in stats.requests
        }
        return tuple(done.get(row_id, (0, 0)) for row_id in row_ids)
