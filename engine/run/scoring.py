"""Look up log-probabilities of tokens in the model's own distribution."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from vllm_mlx.engine.core.logprobs import Logprobs, TokenLogprob
from vllm_mlx.engine.errors import RowFailedError

#: Positions of a prompt that are normalised at a time, in float32.
_SLICE = 64


class DrawScores:
    """Hold the log-probabilities of one step's draw, for the rows that ask: lazy until `read`.

    `indices` are their places in `logits` `[R, V]`, `nums_top` how many alternatives each wants,
    `tokens` `[R]` what the draw expects to draw. Evaluated on the thread that made it.
    """

    def __init__(
        self,
        logits: mx.array,
        tokens: mx.array,
        indices: Sequence[int],
        nums_top: Sequence[int],
    ) -> None:
        self._indices = indices
        self._nums_top = nums_top
        rows = mx.array(list(indices))
        self._logits = logits[rows].astype(mx.float32)
        self._total = mx.logsumexp(self._logits, axis=-1, keepdims=True)
        self._tokens = tokens[rows]
        self._values = _values_of(self._logits, self._total, self._tokens)
        self._top = _top_of(self._logits, self._total, max(nums_top))

    @property
    def arrays(self) -> list[mx.array]:
        """Return what to hand to `mx.async_eval` so that `read` finds it computed."""
        return [self._tokens, self._values, *self._top]

    def read(self, tokens: Sequence[int]) -> dict[int, TokenLogprob]:
        """Return the entries of the tokens that were drawn in the end, by place in the batch."""
        drawn = np.array([tokens[index] for index in self._indices])
        values = self._values
        if not np.array_equal(drawn, np.array(self._tokens)):
            # Some row was drawn again: see `Draw`.
            values = _values_of(self._logits, self._total, mx.array(drawn))
        top_ids, top_values = np.array(self._top[0]).tolist(), np.array(self._top[1]).tolist()
        return {
            index: TokenLogprob(
                token, value, tuple(zip(ids[:num_top], best[:num_top], strict=True))
            )
            for index, token, value, ids, best, num_top in zip(
                self._indices,
                drawn.tolist(),
                np.array(values).tolist(),
                top_ids,
                top_values,
                self._nums_top,
                strict=True,
            )
        }


def score_prompt(logits: mx.array, targets: Sequence[int], num_top: int) -> Logprobs:
    """Return the log-probability of each position's next token, `targets`, and alternatives.

    `logits` is `[T, V]`. Waits for the device, slice by slice, so that the transient stays small
    beside the logits. Raises RowFailedError where the logits are not numbers.
    """
    parts = []
    for start in range(0, len(targets), _SLICE):
        part = logits[start : start + _SLICE].astype(mx.float32)
        ids = np.array(targets[start : start + _SLICE], dtype=np.int32)
        total = mx.logsumexp(part, axis=-1, keepdims=True)
        values = _values_of(part, total, mx.array(ids))
        top_ids, top_values = _top_of(part, total, num_top)
        mx.eval(total, values, top_ids, top_values)
        if not np.isfinite(np.array(total)).all():
            raise RowFailedError(not_numbers("prompt"))
        parts.append(
            Logprobs(
                top_ids.shape[-1],
                ids.astype("<i4").tobytes(),
                np.array(values).astype("<f4").tobytes(),
                bytes(4 * len(ids)),
                np.array(top_ids).astype("<i4").tobytes(),
                np.array(top_values).astype("<f4").tobytes(),
            )
        )
    return Logprobs.joined(parts) or Logprobs(num_top)


def not_numbers(place: str) -> str:
    """Return the message for a row whose logits are NaN or infinite."""
    return (
        f"the model computed NaN or infinite logits for this {place}, so no token can be drawn; "
        "the weights may be damaged, or overflow in this dtype (try --dtype float32)"
    )


def _values_of(logits: mx.array, total: mx.array, tokens: mx.array) -> mx.array:
    """Return the log-probability of one token a row, `[R]`."""
    return (mx.take_along_axis(logits, tokens[:, None], axis=-1) - total)[:, 0]


def _top_of(logits: mx.array, total: mx.array, count: int) -> tuple[mx.array, mx.array]:
    """Return the ids and log-probabilities of the `count` likeliest tokens, best first."""
    count = min(count, logits.shape[-1])
    if count == 0:
        empty = mx.zeros((logits.shape[0], 0))
        return empty.astype(mx.int32), empty
    ids = mx.argpartition(logits, -count, axis=-1)[:, -count:]
    values = mx.take_along_axis(logits, ids, axis=-1)
    order = mx.argsort(-values, axis=-1)
    return (
        mx.take_along_axis(ids, order, axis=-1),
        mx.take_along_axis(values, order, axis=-1) - total,
    )
