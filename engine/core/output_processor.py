"""Turn each row's drawn tokens into text, match stop strings, and gather what clients are sent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from vllm_mlx.engine.core.logprobs import Logprobs, TokenLogprob
from vllm_mlx.engine.core.outputs import RowOutput, pack_tokens
from vllm_mlx.engine.core.sequence import Finish, Sequence
from vllm_mlx.engine.core.stop import StopMatcher
from vllm_mlx.engine.core.thinking import ThinkingTracker


class TokenDecoder(Protocol):
    """Decode one row's tokens as they come."""

    def add(self, token_id: int) -> str:
        """Take one token and return the new text that no later token can change."""
        ...

    def flush(self) -> str:
        """Return what is left at the end."""
        ...


@dataclass(slots=True)
class _RowText:
    decoder: TokenDecoder
    matcher: StopMatcher | None
    #: Special tokens that are text.
    shown: dict[int, str]
    #: None where reasoning is not told apart.
    tracker: ThinkingTracker | None
    #: Not yet sent.
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    #: Characters that the decoder has given, and of those, how many are text to be sent.
    num_decoded: int = 0
    num_released: int = 0
    #: Of tokens whose text is not all released, with where it ends; their offset is its start.
    held_logprobs: list[tuple[TokenLogprob, int]] = field(default_factory=list)
    prompt_logprobs: list[Logprobs] = field(default_factory=list)

    def decode(self, token_id: int) -> str:
        """Return the text that a token adds."""
        shown = self.shown.get(token_id)
        if shown is None:
            return self.decoder.add(token_id)
        # What is held of a character can never be completed across a special token.
        return self.decoder.flush() + shown

    def release(self, text: str) -> None:
        """Add text that is safe to send."""
        self.text += text
        self.num_released += len(text)


class OutputProcessor:
    """Own the text side of every open row; used by the engine thread.

    A row's own failure (its detokenizer raises) is raised from `take`, for the engine to end that
    row only.

    **Log-probabilities** go with the text of their tokens. A token's text is what the decoder
    returned for it: nothing for a special token, and nothing for one that only begins a
    character. Its entry is sent with the output that holds the last character of that text, or
    as soon as all text before it is sent if it has none. So every generated token has one, the
    token that ends the sequence included, but for a stop string: of the tokens that the match cut
    off, those are left out of whose text nothing is sent. The row ends there, and what is sent
    does not depend on how the outputs were cut.
    """

    def __init__(self, make_decoder: Callable[[], TokenDecoder]) -> None:
        self._make_decoder = make_decoder
        self._rows: dict[str, _RowText] = {}

    def open(self, sequence: Sequence) -> None:
        """Begin a row; sets `sequence.forced_token` where its reasoning is to end at once."""
        params = sequence.sampling
        matcher = StopMatcher(params.stop) if params.stop else None
        tracker = ThinkingTracker(params.thinking) if params.thinking is not None else None
        shown = dict(params.shown_tokens)
        self._rows[sequence.id] = _RowText(self._make_decoder(), matcher, shown, tracker)
        if tracker is not None:
            sequence.forced_token = tracker.forced_token

    def add_prompt_logprobs(self, sequence: Sequence, start: int, part: Logprobs) -> None:
        """Take those of the tokens after position `start`; they go out with the first output."""
        row = self._rows[sequence.id]
        if start == 0:
            # A row that was preempted before the last part begins again.
            row.prompt_logprobs.clear()
        row.prompt_logprobs.append(part)

    def take(self, sequence: Sequence, logprob: TokenLogprob | None = None) -> None:
        """Take the row's newest token; sets `sequence.finish` where a stop string completes.

        Sets `sequence.forced_token` to what the row's budget of reasoning leaves it to draw next.
        A stop string that completes in the very token that ended the row otherwise wins over
        `length`, so that the text never holds it.
        """
        row = self._rows[sequence.id]
        token = sequence.output[-1]
        row.token_ids.append(token)
        is_end = sequence.finish is not None and sequence.finish.reason == "stop"
        text = "" if is_end else row.decode(token)
        if row.tracker is not None and not is_end:
            row.tracker.take(token, text)
            sequence.forced_token = row.tracker.forced_token
        if logprob is not None:
            row.held_logprobs.append((logprob.at(row.num_decoded), row.num_decoded + len(text)))
        if not is_end:
            self._feed(sequence, row, text)

    def _feed(self, sequence: Sequence, row: _RowText, text: str) -> None:
        row.num_decoded += len(text)
        if row.matcher is None or sequence.must_go_on:
            row.release(text)
            return
        match = row.matcher.feed(text)
        row.release(match.text)
        if match.stop is not None:
            sequence.finish = Finish("stop", match.stop)

    def report(self, sequence: Sequence) -> RowOutput | None:
        """Return what is due to be sent for a row: nothing, a delta, or the final output.

        The final output closes the row.
        """
        row = self._rows[sequence.id]
        if sequence.finish is None:
            is_due = len(row.token_ids) >= sequence.request.stream_interval
            return self._output(sequence, row) if is_due else None
        if not self._stopped_by_string(sequence):
            self._flush(sequence, row)
        del self._rows[sequence.id]
        return self._output(sequence, row)

    def _flush(self, sequence: Sequence, row: _RowText) -> None:
        """Release what the decoder and the matcher still hold; the row is over."""
        assert sequence.finish is not None
        if sequence.finish.reason == "error":
            return
        self._feed(sequence, row, row.decoder.flush())
        if row.matcher is not None and not self._stopped_by_string(sequence):
            row.release(row.matcher.flush())

    @staticmethod
    def _stopped_by_string(sequence: Sequence) -> bool:
        return sequence.finish is not None and isinstance(sequence.finish.stop_reason, str)

    def _released_logprobs(self, sequence: Sequence, row: _RowText) -> Logprobs | None:
        if not row.held_logprobs:
            return None
        is_cut = self._stopped_by_string(sequence)
        released, held = [], []
        for entry, end in row.held_logprobs:
            if end <= row.num_released or (is_cut and entry.offset < row.num_released):
                released.append(entry)
            else:
                held.append((entry, end))
        row.held_logprobs = held
        return Logprobs.pack(released) if released else None

    def _output(self, sequence: Sequence, row: _RowText) -> RowOutput:
        finish = sequence.finish
        prompt_logprobs = None
        if not sequence.wants_prompt_logprobs:
            prompt_logprobs = Logprobs.joined(row.prompt_logprobs)
            row.prompt_logprobs = []
        output = RowOutput(
            request_id=sequence.id,
            text=row.text,
            token_ids=pack_tokens(row.token_ids),
            logprobs=self._released_logprobs(sequence, row),
            prompt_logprobs=prompt_logprobs,
            finish_reason=finish.reason if finish else None,
            stop_reason=finish.stop_reason if finish else None,
            error=finish.error if finish else None,
            num_prompt_tokens=len(sequence.prompt),
            num_cached_tokens=sequence.num_cached,
            num_stored_tokens=sequence.num_stored,
            num_completion_tokens=len(sequence.output),
            num_reasoning_tokens=row.tracker.num_tokens if row.tracker is not None else 0,
            departs_at=sequence.departs_at,
            timings=sequence.timings() if finish else None,
        )
        row.text = ""
        row.token_ids = []
        return output
