"""Run the model: prefill chunks into private caches, and one forward a step for the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx

from vllm_mlx.engine.core.scheduler import PrefillChunk
from vllm_mlx.engine.core.sequence import Sequence as TokenSequence
from vllm_mlx.engine.kv.layout import BatchView, KVLayout
from vllm_mlx.engine.kv.stock_caches import cache_arrays
from vllm_mlx.engine.run.sampler import Draw, RowSampling, draw


@dataclass(slots=True)
class _InFlight:
    view: BatchView
    logits: mx.array
    draw: Draw | None = None


class Runner:
    """Own the forward in flight; used by the engine thread.

    A step is `collect` (waits), then `forward`, then `sample`, then `prefill`: the forward of
    step n+1 is dispatched only after the tokens of step n were read. Dispatched earlier, each
    layer's keys would still be held by work in flight and MLX would copy them whole instead of
    writing in place. What the host does between `forward` and `sample` overlaps the device.
    """

    def __init__(self, model: Callable[..., mx.array], layout: KVLayout) -> None:
        self._model = model
        self._layout = layout
        self._in_flight: _InFlight | None = None

    def collect(self) -> dict[str, int]:
        """Wait for the tokens of the forward in flight; by row id. Opens the drained window."""
        in_flight, self._in_flight = self._in_flight, None
        if in_flight is None or in_flight.draw is None:
            return {}
        tokens = in_flight.draw.read()
        return {row.row_id: tokens[row.index] for row in in_flight.view.rows}

    def forward(self, sequences: Sequence[TokenSequence]) -> None:
        """Dispatch one decode forward for these rows; closes the drained window."""
        if not sequences:
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

    def sample(self, sequences: Sequence[TokenSequence], eos_token_ids: frozenset[int]) -> None:
        """Dispatch the drawing of one token for each row that still wants one."""
        in_flight = self._in_flight
        if in_flight is None:
            return
        rows: list[RowSampling | None] = [None] * in_flight.view.num_rows
        by_id = {s.id: s for s in sequences if not s.is_finished}
        for row in in_flight.view.rows:
            sequence = by_id.get(row.row_id)
            if sequence is not None:
                rows[row.index] = row_sampling(sequence, eos_token_ids)
        in_flight.draw = draw(in_flight.logits, rows)
        mx.async_eval(in_flight.draw.arrays)

    def prefill(self, chunk: PrefillChunk) -> None:
        """Dispatch one chunk of a prompt into the row's private caches; logits are not computed."""
        sequence = chunk.sequence
        caches = self._layout.private_caches(sequence.id)
        tokens = mx.array(sequence.tokens_between(chunk.start, chunk.stop), dtype=mx.int32)
        self._model(tokens[None], cache=caches)
        mx.async_eval(cache_arrays(caches))
        sequence.num_computed = chunk.stop

    def abandon(self) -> None:
        """Forget the forward in flight, after the device failed."""
        self._in_flight = None


def row_sampling(sequence: TokenSequence, eos_token_ids: frozenset[int]) -> RowSampling:
    """Return how the sequence's next token is to be drawn; its noise position is its count."""
    params = sequence.sampling
    return RowSampling(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        seed=sequence.seed,
        position=len(sequence.output),
        banned=sequence.banned_token_ids(eos_token_ids),
    )
