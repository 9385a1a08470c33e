"""Run the model: prefill chunks into private caches, and one forward a step for the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from vllm_mlx.engine.core.grammar_rows import TokenMasks
from vllm_mlx.engine.core.logprobs import Logprobs, TokenLogprob
from vllm_mlx.engine.core.scheduler import PrefillChunk
from vllm_mlx.engine.core.sequence import Sequence as TokenSequence
from vllm_mlx.engine.kv.layout import BatchView, KVLayout
from vllm_mlx.engine.kv.stock_caches import cache_arrays, merge_rows, split_rows
from vllm_mlx.engine.run.grammar_mask import apply_masks
from vllm_mlx.engine.run.logit_adjustment import LogitAdjuster, PlacedRow
from vllm_mlx.engine.run.sampler import MIN_TEMPERATURE, Draw, RowSampling, draw
from vllm_mlx.engine.run.scoring import DrawScores, score_prompt

#: How rows without any noise are drawn.
_GREEDY = RowSampling(temperature=0.0)
#: Most logits of a prompt that are computed at once: 128 MiB in float32.
MAX_SCORED_LOGITS = 1 << 25


class DrawnToken(NamedTuple):
    """Hold what one row drew in one step."""

    token: int
    #: The row's logits held NaN or infinities, so the token means nothing.
    is_broken: bool = False
    #: Where the request asked.
    logprob: TokenLogprob | None = None


@dataclass(slots=True)
class _InFlight:
    view: BatchView
    logits: mx.array
    draw: Draw | None = None
    #: `[R]`: each row's best logit, which is finite unless the row is broken.
    peaks: mx.array | None = None
    scores: DrawScores | None = None


class Runner:
    """Own the forward in flight; used by the engine thread.

    A step is `collect` (waits), then `forward`, then `sample`, then `prefill`: the forward of
    step n+1 is dispatched only after the tokens of step n were read. Dispatched earlier, each
    layer's keys would still be held by work in flight and MLX would copy them whole instead of
    writing in place. What the host does between `forward` and `sample` overlaps the device.
    """

    def __init__(
        self, model: Callable[..., mx.array], layout: KVLayout, *, vocab_size: int
    ) -> None:
        self._model = model
        self._layout = layout
        self._max_scored_tokens = max(1, MAX_SCORED_LOGITS // vocab_size)
        self._adjuster = LogitAdjuster()
        self._in_flight: _InFlight | None = None

    def collect(self) -> dict[str, DrawnToken]:
        """Wait for the tokens of the forward in flight; by row id. Opens the drained window."""
        in_flight, self._in_flight = self._in_flight, None
        if in_flight is None or in_flight.draw is None or in_flight.peaks is None:
            return {}
        tokens = in_flight.draw.read()
        is_sound = np.isfinite(np.array(in_flight.peaks)).tolist()
        scores = in_flight.scores.read(tokens) if in_flight.scores is not None else {}
        return {
            row.row_id: DrawnToken(
                tokens[row.index], not is_sound[row.index], scores.get(row.index)
            )
            for row in in_flight.view.rows
        }

    def forward(self, sequences: Sequence[TokenSequence]) -> None:
        """Dispatch one decode forward for these rows; closes the drained window."""
        if not sequences:
            self._adjuster.forget()
            return
        view = self._layout.begin_step([(s.id, s.num_computed) for s in sequences])
        by_id = {s.id: s for s in sequences}
        inputs = [0] * view.num_rows
        for row in view.rows:
            inputs[row.index] = by_id[row.row_id].last_token
        tokens = mx.array(inputs, dtype=mx.int32)[:, None]
        logits = self._model(tokens, cache=self._layout.layer_caches)[:, -1, :]
        mx.async_eval(logits)
        for sequence in sequences:
            sequence.num_computed += 1
        self._in_flight = _InFlight(view, logits)

    def sample(
        self,
        sequences: Sequence[TokenSequence],
        eos_token_ids: frozenset[int],
        masks: TokenMasks | None = None,
    ) -> None:
        """Dispatch the drawing of one token, which its mask allows, for each row that wants one."""
        in_flight = self._in_flight
        if in_flight is None:
            return
        rows: list[RowSampling | None] = [None] * in_flight.view.num_rows
        by_id = {s.id: s for s in sequences if not s.is_finished}
        live = [
            (row.index, by_id[row.row_id]) for row in in_flight.view.rows if row.row_id in by_id
        ]
        for index, sequence in live:
            rows[index] = row_sampling(sequence, eos_token_ids)
        adjusted = self._adjuster.adjust(in_flight.logits, live)
        in_flight.draw = draw(apply_masks(adjusted, live, masks), rows)
        # The maximum carries NaN, +inf and a row of nothing but -inf; one pass, and read together
        # with the tokens.
        in_flight.peaks = mx.max(in_flight.logits, axis=-1).astype(mx.float32)
        in_flight.scores = _scores(in_flight.logits, in_flight.draw.tokens, live)
        scored = in_flight.scores.arrays if in_flight.scores is not None else []
        mx.async_eval(in_flight.draw.arrays, in_flight.peaks, scored)

    def prefill(self, chunk: PrefillChunk) -> Logprobs | None:
        """Dispatch one chunk of a prompt into the row's private caches.

        Logits are not computed, but for a request that asks for those of its prompt: then this
        waits for the device and returns the log-probability of each token after a position of
        the chunk.
        """
        sequence = chunk.sequence
        caches = self._layout.private_caches(sequence.id)
        if sequence.wants_prompt_logprobs:
            return self._prefill_scored(chunk, caches)
        tokens = mx.array(sequence.tokens_between(chunk.start, chunk.stop), dtype=mx.int32)
        self._model(tokens[None], cache=caches)
        mx.async_eval(cache_arrays(caches))
        sequence.num_computed = chunk.stop
        return None

    def prefill_together(self, chunks: Sequence[PrefillChunk]) -> bool:
        """Dispatch short chunks at the same position in one forward, padded on the right.

        Returns False, with nothing done, where this model's state does not allow it.
        """
        fresh = self._layout.new_caches()
        rows = [self._layout.private_caches(chunk.sequence.id) for chunk in chunks]
        if not merge_rows(rows, fresh):
            return False
        size = max(chunk.size for chunk in chunks)
        padding = [size - chunk.size for chunk in chunks]
        tokens = [
            [*chunk.sequence.tokens_between(chunk.start, chunk.stop), *([0] * pad)]
            for chunk, pad in zip(chunks, padding, strict=True)
        ]
        self._model(mx.array(tokens, dtype=mx.int32), cache=fresh)
        mx.async_eval(cache_arrays(fresh))
        split_rows(fresh, rows, padding)
        for chunk in chunks:
            chunk.sequence.num_computed = chunk.stop
        return True

    def _prefill_scored(self, chunk: PrefillChunk, caches: list[Any]) -> Logprobs | None:
        """Compute a chunk in pieces whose logits are small, each read before the next."""
        sequence = chunk.sequence
        parts = []
        for start in range(chunk.start, chunk.stop, self._max_scored_tokens):
            stop = min(start + self._max_scored_tokens, chunk.stop)
            tokens = mx.array(sequence.tokens_between(start, stop), dtype=mx.int32)
            logits = self._model(tokens[None], cache=caches)[0]
            targets = sequence.tokens_between(start + 1, stop + 1)
            parts.append(score_prompt(logits, targets, sequence.sampling.prompt_logprobs or 0))
            mx.eval(cache_arrays(caches))
            sequence.num_computed = sequence.num_prompt_scored = stop
        return Logprobs.joined(parts)

    def abandon(self) -> None:
        """Forget the forward in flight, after the device failed."""
        self._in_flight = None
        self._adjuster.forget()


def _scores(logits: mx.array, tokens: mx.array, rows: Sequence[PlacedRow]) -> DrawScores | None:
    """Return the lazy log-probabilities of the rows that ask for them; None if none does."""
    asking = [
        (index, sequence.sampling.logprobs)
        for index, sequence in rows
        if sequence.sampling.logprobs is not None
    ]
    if not asking:
        return None
    return DrawScores(logits, tokens, [row for row, _ in asking], [top for _, top in asking])


def row_sampling(sequence: TokenSequence, eos_token_ids: frozenset[int]) -> RowSampling:
    """Return how the sequence's next token is to be drawn; its noise position is its count."""
    params = sequence.sampling
    if params.temperature < MIN_TEMPERATURE and sequence.forced_token is None:
        banned = sequence.banned_token_ids(eos_token_ids)
        return RowSampling(temperature=0.0, banned=banned) if banned else _GREEDY
    return RowSampling(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        seed=sequence.seed,
        position=len(sequence.output),
        banned=sequence.banned_token_ids(eos_token_ids),
        forced=sequence.forced_token,
    )
