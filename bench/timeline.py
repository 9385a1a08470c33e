"""Record when the bytes of one request came and what they said; pure, on any clock."""

from __future__ import annotations

import dataclasses

from vllm_mlx.bench.answer import Answer, error_text
from vllm_mlx.bench.endpoints import Endpoint
from vllm_mlx.bench.sse import SseEvent, SseSplitter

#: Most bytes of an error's body that are kept.
_MAX_ERROR_BYTES = 65536
_MAX_MESSAGE_CHARS = 300


@dataclasses.dataclass(frozen=True, slots=True)
class Failure:
    """Say why a request counts as failed.

    `kind` is `connect`, `timeout`, `cut` (the stream ended early), `http_<status>`, `error` (the
    server reported one in the stream), `invalid` (not an answer of this API) or `empty`.
    """

    kind: str
    message: str


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """Say which request of a run this is."""

    #: Order of sending within a repetition.
    index: int
    prompt_id: str
    conversation: int = 0
    #: 0 is the first.
    turn: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """Hold what was measured of one request; all times are seconds on the run's clock."""

    place: Place
    #: When an open loop wanted to send it; equals `started_at` in a closed loop.
    scheduled_at: float
    started_at: float
    #: How long opening a connection took; 0 on one that was open.
    connect_s: float
    first_byte_at: float | None
    ended_at: float
    #: Arrival of each event that carried output; empty when the answer was not streamed.
    event_times: tuple[float, ...]
    #: Arrival of the event that carried the finish reason.
    finished_at: float | None
    answer: Answer
    status: int | None
    failure: Failure | None
    #: Most tokens asked for.
    max_tokens: int

    @property
    def is_ok(self) -> bool:
        """Return whether the request counts as answered."""
        return self.failure is None

    @property
    def completion_tokens(self) -> int:
        """Return the tokens generated: the server's count, or that of events without one."""
        counted = self.answer.completion_tokens
        return len(self.event_times) if counted is None else counted


class RequestRecorder:
    """Turn the arrivals of one request's bytes into a record.

    Every method takes the arrival time, which was taken before anything was parsed; nothing
    here reads a clock. Owned by whoever sends the request.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        place: Place,
        *,
        scheduled_at: float,
        is_streamed: bool,
        max_tokens: int,
    ) -> None:
        self.place = place
        self.connect_s = 0.0
        self._endpoint = endpoint
        self._is_streamed = is_streamed
        self._max_tokens = max_tokens
        self._scheduled_at = scheduled_at
        self._started_at = scheduled_at
        self._first_byte_at: float | None = None
        self._event_times: list[float] = []
        self._finished_at: float | None = None
        self._answer = Answer()
        self._status: int | None = None
        self._failure: Failure | None = None
        self._splitter = SseSplitter()
        self._body: list[bytes] = []
        self._is_events = False

    def started(self, at: float) -> None:
        """Note that sending begins; the last call counts, so that a retry starts anew."""
        self._started_at = at

    def head(self, status: int, content_type: str, at: float) -> None:
        """Note the response's head."""
        self._first_byte_at = at
        self._status = status
        is_ok = 200 <= status < 300
        self._is_events = self._is_streamed and is_ok and "json" not in content_type

    def body(self, block: bytes, at: float) -> None:
        """Take the next bytes of the body."""
        if not self._is_events:
            self._body.append(block)
            return
        for event in self._splitter.feed(block):
            self._event(event, at)

    def failed(self, kind: str, message: str) -> None:
        """Note why the request failed; the first reason stays."""
        if self._failure is None:
            self._failure = Failure(kind, " ".join(message.split())[:_MAX_MESSAGE_CHARS])

    def ended(self, at: float) -> RequestRecord:
        """Return the record, `at` being when the last byte came or the request was given up."""
        if self._is_events:
            for event in self._splitter.flush():
                self._event(event, at)
        elif self._failure is None and self._status is not None:
            self._read_body(b"".join(self._body))
        if self._failure is None:
            self._judge()
        return RequestRecord(
            place=self.place,
            scheduled_at=self._scheduled_at,
            started_at=self._started_at,
            connect_s=self.connect_s,
            first_byte_at=self._first_byte_at,
            ended_at=at,
            event_times=tuple(self._event_times),
            finished_at=self._finished_at,
            answer=self._answer,
            status=self._status,
            failure=self._failure,
            max_tokens=self._max_tokens,
        )

    def _event(self, event: SseEvent, at: float) -> None:
        answer = self._answer
        try:
            if self._endpoint.read_event(answer, event.name, event.data):
                self._event_times.append(at)
        except (ValueError, TypeError, AttributeError) as error:
            # The last two: JSON of another shape than the API's.
            self.failed("invalid", f"an event that is not this API's: {error}")
            return
        if self._finished_at is None and answer.finish_reason is not None:
            self._finished_at = at

    def _read_body(self, body: bytes) -> None:
        assert self._status is not None
        if not 200 <= self._status < 300:
            self.failed(f"http_{self._status}", _body_error(body[:_MAX_ERROR_BYTES]))
            return
        try:
            self._endpoint.read_whole(self._answer, body)
        except (ValueError, TypeError, AttributeError) as error:
            self.failed("invalid", f"a body that is not this API's: {error}")

    def _judge(self) -> None:
        answer = self._answer
        if answer.error is not None:
            self.failed("error", answer.error)
        elif self._status is None:
            self.failed("cut", "no response came")
        elif answer.finish_reason is None and not answer.has_end_mark:
            self.failed("cut", "the stream ended without a finish reason or an end mark")
        elif not answer.has_output:
            self.failed("empty", "the answer has no text, reasoning or tool call")


def _body_error(body: bytes) -> str:
    import msgspec

    try:
        return error_text(msgspec.json.decode(body))
    except msgspec.DecodeError:
        return body.decode("utf-8", "replace") or "an empty body"
