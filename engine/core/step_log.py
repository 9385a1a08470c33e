"""Log one line a step, while somebody wants to watch the engine work."""

from __future__ import annotations

import logging
from collections.abc import Callable

from vllm_mlx.engine.logs import STEP, STEPS_LOGGER

logger = logging.getLogger(STEPS_LOGGER)


class StepLog:
    """Own what is to be said of the step at hand; used by the engine thread."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began = 0.0
        self._num_decoded = 0
        self._num_prefilled = 0
        self._num_hits = 0

    def begin(self) -> None:
        """Note when the step began."""
        self._began = self._clock()
        self._num_decoded = self._num_prefilled = self._num_hits = 0

    def planned(self, *, num_decoded: int, num_prefilled: int, num_hits: int) -> None:
        """Note how many tokens the step computes of running rows and of prompts.

        `num_hits` counts those that rows which start now need not have computed.
        """
        self._num_decoded = num_decoded
        self._num_prefilled = num_prefilled
        self._num_hits = num_hits

    def end(self, number: int, *, num_waiting: int, num_running: int) -> None:
        """Log the line, if lines are wanted."""
        if not logger.isEnabledFor(STEP):
            return
        ms = (self._clock() - self._began) * 1e3
        fields = {
            "step": number,
            "waiting": num_waiting,
            "running": num_running,
            "scheduled_tokens": self._num_decoded + self._num_prefilled,
            "prefill_tokens": self._num_prefilled,
            "prefix_hit_tokens": self._num_hits,
            "ms": round(ms, 1),
        }
        logger.log(
            STEP,
            "step %d: waiting %d, running %d, scheduled tokens %d (prefill %d), "
            "prefix hits %d, %.1f ms",
            *fields.values(),
            extra={"fields": fields},
        )
