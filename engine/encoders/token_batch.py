"""The tokens of several texts side by side, as arrays with padding behind the shorter ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from vllm_mlx.engine.encoders.tokenizing import EncodedText


@dataclass(frozen=True)
class TokenBatch:
    """Hold the arrays of one forward; the MLX thread only."""

    #: `[rows, longest]`.
    token_ids: mx.array
    type_ids: mx.array
    #: `[rows, longest]`, True for tokens that are not padding.
    mask: mx.array
    #: No row has padding.
    is_even: bool


def token_batch(texts: Sequence[EncodedText], *, pad_token_id: int, has_types: bool) -> TokenBatch:
    """Put texts side by side; without `has_types` a model tells no first and second texts apart."""
    lengths = [len(text.token_ids) for text in texts]
    longest = max(lengths)
    tokens = np.full((len(texts), longest), pad_token_id, dtype=np.int32)
    types = np.zeros((len(texts), longest), dtype=np.int32)
    for row, text in enumerate(texts):
        tokens[row, : lengths[row]] = text.token_ids
        if has_types:
            types[row, : lengths[row]] = text.type_ids
    mask = np.arange(longest)[None, :] < np.array(lengths)[:, None]
    return TokenBatch(
        mx.array(tokens), mx.array(types), mx.array(mask), is_even=min(lengths) == longest
    )
