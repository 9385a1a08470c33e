"""What mlx-lm generates for one row alone with its own processors and samplers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx_lm.sample_utils
import numpy as np
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.sample_utils import make_logits_processors, make_sampler
from support.engines import TIE, tiny_model

from vllm_mlx.engine.core.request import SamplingParams
from vllm_mlx.engine.run.sampler import noise_key

#: As many tokens as a penalty may look back: all.
_ALL = 1 << 20

Processor = Callable[[mx.array, mx.array], mx.array]


@dataclass
class LibraryRow:
    """Hold one row's tokens and, for each, what it was drawn from."""

    tokens: list[int] = field(default_factory=list)
    #: Log-probabilities `[V]` of the model itself, before anything was changed.
    logprobs: list[np.ndarray] = field(default_factory=list)
    #: How far the drawn token's score was above the next; a tie where it is tiny.
    gaps: list[float] = field(default_factory=list)

    def first_difference(self, tokens: Sequence[int]) -> int | None:
        """Return where `tokens` depart from this row other than at a tie; None if nowhere."""
        for index, (got, want) in enumerate(zip(tokens, self.tokens, strict=False)):
            if got != want:
                return None if self.gaps[index] < TIE else index
        return None

    def num_comparable(self, tokens: Sequence[int]) -> int:
        """Count the leading tokens that are equal: what follows a tie is another text."""
        pairs = enumerate(zip(tokens, self.tokens, strict=False))
        return next((i for i, (got, want) in pairs if got != want), len(tokens))


def library_row(kind: str, prompt: Sequence[int], params: SamplingParams) -> LibraryRow:
    """Generate `params.max_tokens` tokens with `generate_step`, one row, no batch.

    Hot rows use the library's sampler with its last step, which draws from a global random
    state, replaced by the same draw with the engine's noise.
    """
    model, _ = tiny_model(kind)
    found = LibraryRow()
    steps = generate_step(
        mx.array(prompt),
        model,
        max_tokens=params.max_tokens,
        sampler=_sampler(params, found),
        logits_processors=[_recorder(found), *_processors(params, len(prompt))],
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mlx_lm.sample_utils, "categorical_sampling", _seeded_draw(params, found))
        for token, _ in steps:
            found.tokens.append(int(token))
    return found


def _recorder(found: LibraryRow) -> Processor:
    def record(_: mx.array, logits: mx.array) -> mx.array:
        row = logits.astype(mx.float32)
        found.logprobs.append(np.array(row - mx.logsumexp(row, axis=-1, keepdims=True))[0])
        return logits

    return record


def _processors(params: SamplingParams, prompt_len: int) -> list[Processor]:
    everything = make_logits_processors(
        logit_bias=dict(params.logit_bias),
        repetition_penalty=params.repetition_penalty,
        repetition_context_size=_ALL,
    )
    of_output = make_logits_processors(
        presence_penalty=params.presence_penalty,
        presence_context_size=_ALL,
        frequency_penalty=params.frequency_penalty,
        frequency_context_size=_ALL,
    )

    def on_output(process: Processor) -> Processor:
        return lambda tokens, logits: process(tokens[prompt_len:], logits)

    return [*everything, *map(on_output, of_output)]


def _sampler(params: SamplingParams, found: LibraryRow) -> Callable[[mx.array], mx.array]:
    if params.temperature > 0:
        return make_sampler(
            temp=params.temperature, top_p=params.top_p, min_p=params.min_p, top_k=params.top_k
        )

    def greedy(logprobs: mx.array) -> mx.array:
        found.gaps.append(_gap(logprobs))
        return mx.argmax(logprobs, axis=-1)

    return greedy


def _seeded_draw(
    params: SamplingParams, found: LibraryRow
) -> Callable[[mx.array, float], mx.array]:
    def draw(logprobs: mx.array, temperature: float) -> mx.array:
        key = mx.array(noise_key(params.seed or 0, len(found.gaps)), dtype=mx.uint32)
        noise = mx.random.gumbel((logprobs.shape[-1],), key=key)
        scores = logprobs * (1.0 / temperature) + noise
        found.gaps.append(_gap(scores))
        return mx.argmax(scores, axis=-1)

    return draw


def _gap(scores: mx.array) -> float:
    best = np.sort(np.array(scores).reshape(-1))[-2:]
    return float(best[1] - best[0])


def settings_of(params: SamplingParams) -> dict[str, Any]:
    """Return the fields of `params` as keywords."""
    return {name: getattr(params, name) for name in params.__struct_fields__}
