"""Who is let in: nobody before the model answers, and no more than the queue holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_mlx.engine.errors import EngineUnavailableError, InvalidRequestError, OverloadedError
from vllm_mlx.server.engine_port import EngineCondition

#: How often a client should look again while a model loads, where the engine does not say.
LOADING_RETRY_S = 5.0

#: Weight of the newest request in the moving average of how long requests take.
_NEWEST_WEIGHT = 0.2
_MAX_RETRY_S = 60.0


class Admission:
    """Bound the prompts that wait: their number, and their tokens together.

    `num_open` says how many rows are open now, waiting and running. Owns the table of the rows
    that have answered nothing yet. Event loop only.
    """

    def __init__(
        self, max_rows: int, max_queue: int, max_queue_tokens: int, num_open: Callable[[], int]
    ) -> None:
        """Let in `max_rows` that run and `max_queue` that wait, with so many prompt tokens."""
        self._max_rows = max_rows
        self._max_queue = max_queue
        self._max_queue_tokens = max_queue_tokens
        self._num_open = num_open
        self._mean_s: float | None = None
        #: Prompt tokens of each row that has answered nothing yet.
        self._unanswered: dict[str, int] = {}
        self._num_tokens = 0

    @property
    def num_waiting_tokens(self) -> int:
        """Count the prompt tokens of the rows that have answered nothing yet."""
        return self._num_tokens

    def check(self, num_rows: int, param: str = "prompt") -> None:
        """Raise `OverloadedError` when `num_rows` more do not fit now.

        Raises `InvalidRequestError`, naming `param`, for a request with more answers than would
        ever fit.
        """
        limit = self._max_rows + self._max_queue
        if num_rows > limit:
            raise InvalidRequestError(
                f"{num_rows} answers in one request; this server takes at most {limit}",
                param=param,
            )
        num_open = self._num_open()
        if num_open + num_rows > limit:
            waiting = max(0, num_open - self._max_rows)
            raise OverloadedError(
                f"the queue is full: {waiting} requests wait and at most {self._max_queue} may",
                retry_after_s=self._retry_after_s(waiting),
            )

    def check_tokens(self, num_tokens: int) -> None:
        """Raise `OverloadedError` when prompts of so many tokens do not fit now.

        A prompt for which no other waits always fits: whether it ever can is said elsewhere.
        """
        waiting = self._num_tokens
        if waiting and waiting + num_tokens > self._max_queue_tokens:
            raise OverloadedError(
                f"the queue is full: prompts of {waiting} tokens wait, this request has "
                f"{num_tokens}, and at most {self._max_queue_tokens} may wait",
                retry_after_s=self._retry_after_s(len(self._unanswered)),
            )

    def wait(self, row_id: str, num_tokens: int) -> None:
        """Count a row's prompt among those that wait."""
        self._unanswered[row_id] = num_tokens
        self._num_tokens += num_tokens

    def answered(self, row_id: str) -> None:
        """Count a row's prompt no longer; one that is not counted is ignored."""
        self._num_tokens -= self._unanswered.pop(row_id, 0)

    def has_answered(self, row_id: str) -> bool:
        """Say whether a row's prompt is counted no longer."""
        return row_id not in self._unanswered

    def record(self, seconds: float) -> None:
        """Learn from a row that took `seconds` from start to end."""
        mean = seconds if self._mean_s is None else self._mean_s
        self._mean_s = mean + _NEWEST_WEIGHT * (seconds - mean)

    def _retry_after_s(self, waiting: int) -> float:
        """Guess when one place is free: the rows that run finish evenly spread over their time."""
        mean = self._mean_s if self._mean_s is not None else 1.0
        return min(_MAX_RETRY_S, mean * (1 + waiting) / self._max_rows)


def not_ready_error(condition: EngineCondition, what: str = "model") -> EngineUnavailableError:
    """Make the error that a model route answers with while `what`, its engine, is not ready."""
    progress = describe_progress(condition)
    if condition.phase in ("loading", "restarting"):
        message = f"the {what} is {condition.phase}{progress}; try again later"
    elif condition.phase == "ready":
        message = "the model is loading: tokenizer; try again later"
    elif condition.phase == "draining":
        message = "the server is shutting down"
    else:
        reason = f": {condition.error.message}" if condition.error is not None else ""
        message = f"the engine has {condition.phase}{reason}"
    retry_after_s = condition.retry_after_s or LOADING_RETRY_S
    return EngineUnavailableError(message, retry_after_s=retry_after_s)


def describe_progress(condition: EngineCondition) -> str:
    """Say in words how far loading is, or nothing where nothing is known."""
    if not condition.stage:
        return ""
    percent = f" {condition.fraction:.0%}" if condition.fraction is not None else ""
    return f": {condition.stage}{percent}"


def progress_fields(condition: EngineCondition) -> dict[str, Any]:
    """Return the machine-readable side of `not_ready_error`, added to the error object."""
    fields: dict[str, Any] = {"phase": condition.phase}
    if condition.stage:
        fields |= {"stage": condition.stage, "progress": condition.fraction}
    return fields
