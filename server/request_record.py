"""What became of each HTTP request's rows, gathered from its arrival until it is logged."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from vllm_mlx.engine.core.outputs import FinishReason, RowOutput, RowTimings
from vllm_mlx.server.metrics import ServerMetrics


@dataclass
class RowRecord:
    """Hold what one row has cost and how it ended; tokens count once its answer has begun."""

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_completion_tokens: int = 0
    #: From the request's arrival to the row's first token.
    ttft_s: float | None = None
    #: None while it is open; a row that its client left is an `abort`.
    finish_reason: FinishReason | None = None
    timings: RowTimings = field(default_factory=RowTimings)

    @property
    def tpot_s(self) -> float | None:
        """Return the mean time of a token after the first; None without a second one."""
        if self.timings.decode_s is None or self.num_completion_tokens < 2:
            return None
        return self.timings.decode_s / (self.num_completion_tokens - 1)


@dataclass
class RequestRecord:
    """Hold what one HTTP request has asked of the engine; empty for one that asked nothing."""

    started_s: float = 0.0
    rows: dict[str, RowRecord] = field(default_factory=dict)

    def latest(self, read: Callable[[RowRecord], float | None]) -> float | None:
        """Return the largest of what `read` reads off the rows; None if there is none."""
        return max(_known(map(read, self.rows.values())), default=None)

    def total(self, read: Callable[[RowRecord], int]) -> int:
        """Return the sum of what `read` reads off the rows."""
        return sum(map(read, self.rows.values()))


class RequestRecords:
    """Own the records of the HTTP requests that are open, and count what happens. Event loop only.

    What runs without an HTTP request, such as the warming of prefixes, is not recorded.
    """

    def __init__(self, metrics: ServerMetrics, clock: Callable[[], float] = time.monotonic) -> None:
        self._metrics = metrics
        self._clock = clock
        self._open: dict[str, RequestRecord] = {}

    def open(self, request_id: str) -> RequestRecord:
        """Begin a request's record."""
        record = RequestRecord(self._clock())
        self._open[request_id] = record
        return record

    def close(
        self, request_id: str, *, route: str, method: str, status: int, error_code: str | None
    ) -> str:
        """Count a request that is over, and return its outcome in a word."""
        record = self._open.pop(request_id)
        outcome = _outcome(record, status, error_code)
        self._metrics.request_ended(route, method, status, outcome, error_code)
        return outcome

    def progressed(self, request_id: str, row_id: str, output: RowOutput) -> None:
        """Note what a row has come to."""
        record = self._open.get(request_id)
        if record is None:
            return
        row = record.rows.setdefault(row_id, RowRecord())
        if output.num_completion_tokens == 0 and output.finish_reason not in ("stop", "length"):
            return
        if output.num_completion_tokens and row.ttft_s is None:
            row.ttft_s = self._clock() - record.started_s
            self._metrics.first_token(row.ttft_s)
        self._metrics.tokens(
            prompt=output.num_prompt_tokens - row.num_prompt_tokens,
            cached=output.num_cached_tokens - row.num_cached_tokens,
            completion=output.num_completion_tokens - row.num_completion_tokens,
        )
        row.num_prompt_tokens = output.num_prompt_tokens
        row.num_cached_tokens = output.num_cached_tokens
        row.num_completion_tokens = output.num_completion_tokens

    def ended(self, request_id: str, row_id: str, output: RowOutput) -> None:
        """Note a row's end; `output` is its last one, without a reason if its client left."""
        record = self._open.get(request_id)
        if record is None:
            return
        row = record.rows.setdefault(row_id, RowRecord())
        row.finish_reason = output.finish_reason or "abort"
        if output.timings is not None:
            row.timings = output.timings
        self._metrics.row_ended(
            row.finish_reason,
            e2e_s=self._clock() - record.started_s,
            tpot_s=row.tpot_s,
            timings=row.timings,
            num_prompt_tokens=row.num_prompt_tokens,
            num_completion_tokens=row.num_completion_tokens,
        )


def _outcome(record: RequestRecord, status: int, error_code: str | None) -> str:
    """Say in a word how a request ended; an error after a stream had begun has the status 200."""
    if status == 499:
        return "client_closed"
    if 400 <= status < 500:
        return "refused"
    if status >= 500 or error_code is not None:
        return "error"
    if any(row.finish_reason == "abort" for row in record.rows.values()):
        return "aborted"
    return "success"


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]
