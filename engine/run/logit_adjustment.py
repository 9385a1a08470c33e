"""Change the logits of rows that ask for it: biases, and penalties for tokens that have come."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, repeat

import mlx.core as mx
import numpy as np

from vllm_mlx.engine.core.sequence import Sequence as TokenSequence

#: A row of the batch: its index there, and its sequence.
PlacedRow = tuple[int, TokenSequence]


@dataclass(frozen=True, slots=True)
class _Setting:
    """Hold what stays as it is while the same rows stand in the same places."""

    rows: tuple[PlacedRow, ...]
    #: Where biases are added and what; None without any.
    biases: tuple[mx.array, mx.array, mx.array] | None
    #: The rows with penalties, and their places in the batch.
    penalised: tuple[TokenSequence, ...]
    places: mx.array
    #: `[P, 1]` float32; None where no row has one.
    repetition: mx.array | None
    presence: mx.array | None
    frequency: mx.array | None

    def is_for(self, rows: Sequence[PlacedRow]) -> bool:
        """Say whether it was made for these rows in these places."""
        return len(rows) == len(self.rows) and all(
            place == other_place and sequence is other
            for (place, sequence), (other_place, other) in zip(rows, self.rows, strict=True)
        )


class LogitAdjuster:
    """Own the count of each token in the rows that have penalties; used by the engine thread.

    The counts lie on the device, one row of the vocabulary for each such row, and every drawn
    token is added to them by one scatter for all rows. They are made of the sequence's tokens
    alone: a row that joined late, or comes back after preemption, is counted anew.

    The order and the arithmetic are those of mlx-lm's processors (`make_logits_processors`) and
    of vLLM: biases, repetition (prompt and output), then presence and frequency (output only).
    """

    def __init__(self) -> None:
        self._setting: _Setting | None = None
        self._counted: dict[TokenSequence, int] = {}
        #: `[P, V]` float32: how often each token is in the output.
        self._counts: mx.array | None = None
        #: `[P, V]` bool: whether each token is in the prompt.
        self._in_prompt: mx.array | None = None

    def adjust(self, logits: mx.array, rows: Sequence[PlacedRow]) -> mx.array:
        """Return the logits `[R, V]` that tokens are to be drawn from; lazy.

        `rows` are the live ones. Where none asks for anything the logits come back as they are;
        otherwise in float32, the rows that do not ask with the values that they had.
        """
        asking = [row for row in rows if row[1].sampling.adjusts_logits]
        if not asking:
            self.forget()
            return logits
        if self._setting is None or not self._setting.is_for(asking):
            self._setting = _setting_of(asking)
        setting = self._setting
        adjusted = logits.astype(mx.float32)
        if setting.biases is not None:
            rows_at, tokens, values = setting.biases
            adjusted = adjusted.at[rows_at, tokens].add(values)
        if not setting.penalised:
            self._forget_counts()
            return adjusted
        self._count(setting.penalised, logits.shape[-1])
        if len(setting.penalised) == logits.shape[0]:
            # The places are in ascending order, so these are all rows as they stand.
            return self._penalise(adjusted, setting)
        adjusted[setting.places] = self._penalise(adjusted[setting.places], setting)
        return adjusted

    def _penalise(self, logits: mx.array, setting: _Setting) -> mx.array:
        counts, in_prompt = self._counts, self._in_prompt
        assert counts is not None
        assert in_prompt is not None
        if setting.repetition is not None:
            factor = setting.repetition
            scaled = mx.where(logits < 0, logits * factor, logits / factor)
            logits = mx.where(in_prompt | (counts > 0), scaled, logits)
        if setting.presence is not None:
            logits = logits - mx.where(counts > 0, setting.presence, 0.0)
        if setting.frequency is not None:
            logits = logits - counts * setting.frequency
        return logits

    def _count(self, sequences: tuple[TokenSequence, ...], vocab_size: int) -> None:
        """Bring the counts up to date: rows that came, rows that left, and the newest tokens."""
        known = list(self._counted)
        if len(known) != len(sequences) or any(
            a is not b for a, b in zip(known, sequences, strict=True)
        ):
            self._regroup(known, sequences, vocab_size)
        assert all(self._counted[s] <= len(s.output) for s in sequences), "a row grew shorter"
        fresh = [s.output[self._counted[s] :] for s in sequences]
        if any(fresh):
            assert self._counts is not None
            self._counts = self._counts.at[_indices(fresh)].add(1.0)
        self._counted = {s: len(s.output) for s in sequences}

    def _regroup(
        self,
        known: list[TokenSequence],
        sequences: tuple[TokenSequence, ...],
        vocab_size: int,
    ) -> None:
        """Put the rows of the arrays in the order of `sequences`; those that came are appended."""
        came = [sequence for sequence in sequences if sequence not in self._counted]
        place = {sequence: index for index, sequence in enumerate((*known, *came))}
        order = mx.array([place[sequence] for sequence in sequences])
        # On the host: not every backend scatters booleans.
        prompts = np.zeros((len(came), vocab_size), dtype=np.bool_)
        for row, sequence in zip(prompts, came, strict=True):
            row[sequence.prompt] = True
        counts, in_prompt = mx.zeros((len(came), vocab_size), mx.float32), mx.array(prompts)
        if self._counts is not None and self._in_prompt is not None:
            counts = mx.concatenate([self._counts, counts])
            in_prompt = mx.concatenate([self._in_prompt, in_prompt])
        self._counts, self._in_prompt = counts[order], in_prompt[order]
        self._counted = {s: self._counted.get(s, 0) for s in sequences}

    def forget(self) -> None:
        """Let go of all rows, which have left or whose counts are not to be trusted any more."""
        self._setting = None
        self._forget_counts()

    def _forget_counts(self) -> None:
        self._counted = {}
        self._counts = self._in_prompt = None


def _setting_of(rows: Sequence[PlacedRow]) -> _Setting:
    penalised = [row for row in rows if row[1].sampling.has_penalties]
    params = [sequence.sampling for _, sequence in penalised]
    return _Setting(
        rows=tuple(rows),
        biases=_biases(rows),
        penalised=tuple(sequence for _, sequence in penalised),
        places=mx.array(np.array([place for place, _ in penalised], dtype=np.int32)),
        repetition=_column([p.repetition_penalty for p in params], 1.0),
        presence=_column([p.presence_penalty for p in params], 0.0),
        frequency=_column([p.frequency_penalty for p in params], 0.0),
    )


def _biases(rows: Sequence[PlacedRow]) -> tuple[mx.array, mx.array, mx.array] | None:
    lists = [sequence.sampling.logit_bias for _, sequence in rows]
    if not any(lists):
        return None
    places = np.repeat([place for place, _ in rows], [len(pairs) for pairs in lists])
    pairs = np.array(list(chain.from_iterable(lists)), dtype=np.float64)
    return (
        mx.array(places.astype(np.int32)),
        mx.array(pairs[:, 0].astype(np.int32)),
        mx.array(pairs[:, 1].astype(np.float32)),
    )


def _column(values: Sequence[float], neutral: float) -> mx.array | None:
    if all(value == neutral for value in values):
        return None
    return mx.array(np.array(values, dtype=np.float32))[:, None]


def _indices(tokens: Sequence[Sequence[int]]) -> tuple[mx.array, mx.array]:
    """Return the rows and columns of every token, for a scatter."""
    rows = list(chain.from_iterable(repeat(row, len(ids)) for row, ids in enumerate(tokens)))
    columns = list(chain.from_iterable(tokens))
    return (
        mx.array(np.array(rows, dtype=np.int32)),
        mx.array(np.array(columns, dtype=np.int32)),
    )
