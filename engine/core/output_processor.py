"""Turn each row's drawn tokens into text, match stop strings, and gather what clients are sent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from vllm_mlx.engine.core.outputs import RowOutput, pack_tokens
from vllm_mlx.engine.core.sequence import Finish, Sequence
from vllm_mlx.engine.core.stop import StopMatcher


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
    #: Not yet sent.
    text: str = ""
    token_ids: list[int] = field(default_factory=list)


class OutputProcessor:
    """Own the text side of every open row; used by the engine thread.

    A row's own failure (its detokenizer raises) is raised from `take`, for the engine to end that
    row only.
    """

    def __init__(self, make_decoder: Callable[[], TokenDecoder]) -> None:
        self._make_decoder = make_decoder
        self._rows: dict[str, _RowText] = {}

    def open(self, sequence: Sequence) -> None:
        """Begin a row."""
        stop = sequence.sampling.stop
        matcher = StopMatcher(stop) if stop else None
        self._rows[sequence.id] = _RowText(self._make_decoder(), matcher)

    def take(self, sequence: Sequence) -> None:
        """Take the row's newest token; sets `sequence.finish` where a stop string completes.

        A stop string that completes in the very token that ended the row otherwise wins over
        `length`, so that the text never holds it.
        """
        row = self._rows[sequence.id]
        token = sequence.output[-1]
        row.token_ids.append(token)
        if sequence.finish is not None and sequence.finish.reason == "stop":
            return
        self._feed(sequence, row, row.decoder.add(token))

    def _feed(self, sequence: Sequence, row: _RowText, text: str) -> None:
        if row.matcher is None or sequence.must_go_on:
            row.text += text
            return
        match = row.matcher.feed(text)
        row.text += match.text
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
            row.text += row.matcher.flush()

    @staticmethod
    def _stopped_by_string(sequence: Sequence) -> bool:
        return sequence.finish is not None and isinstance(sequence.finish.stop_reason, str)

    @staticmethod
    def _output(sequence: Sequence, row: _RowText) -> RowOutput:
        finish = sequence.finish
        output = RowOutput(
            request_id=sequence.id,
            text=row.text,
            token_ids=pack_tokens(row.token_ids),
            finish_reason=finish.reason if finish else None,
            stop_reason=finish.stop_reason if finish else None,
            error=finish.error if finish else None,
            num_prompt_tokens=len(sequence.prompt),
            num_cached_tokens=sequence.num_cached,
            num_completion_tokens=len(sequence.output),
        )
        row.text = ""
        row.token_ids = []
        return output
