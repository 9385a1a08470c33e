"""Compute BERT and (XLM-)RoBERTa encoders: token ids to one vector a token.

After Devlin et al. 2018 (https://arxiv.org/abs/1810.04805) and Liu et al. 2019
(https://arxiv.org/abs/1907.11692): post-norm blocks, learned absolute positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from vllm_mlx.engine.encoders.operations import Operations
from vllm_mlx.engine.encoders.token_batch import TokenBatch


@dataclass(frozen=True)
class Product:
    """Multiply by a matrix `[out, in]` and add a bias."""

    weight: mx.array
    bias: mx.array

    def __call__(self, x: mx.array) -> mx.array:
        """Return `[..., out]`."""
        return mx.addmm(self.bias, x, self.weight.T)


@dataclass(frozen=True)
class Norm:
    """Normalise each vector to mean 0 and variance 1, then scale and shift it."""

    weight: mx.array
    bias: mx.array
    eps: float

    def __call__(self, x: mx.array) -> mx.array:
        """Return an array of the same shape."""
        return mx.fast.layer_norm(x, self.weight, self.bias, self.eps)


@dataclass(frozen=True)
class Embeddings:
    """Add up the vectors of token, position and token type; each table is `[ids, hidden]`."""

    words: mx.array
    positions: mx.array
    types: mx.array
    norm: Norm
    first_position: int

    def __call__(self, token_ids: mx.array, type_ids: mx.array) -> mx.array:
        """Return `[rows, length, hidden]`; padding must come behind the tokens."""
        length = token_ids.shape[1]
        positions = self.positions[self.first_position : self.first_position + length]
        return self.norm(self.words[token_ids] + positions + self.types[type_ids])


@dataclass(frozen=True)
class Block:
    """Attend over all tokens of a row, then transform each."""

    #: Query, key and value of all heads in one product.
    qkv: Product
    out: Product
    attention_norm: Norm
    up: Product
    down: Product
    norm: Norm
    num_heads: int
    operations: Operations

    def __call__(self, x: mx.array, mask: mx.array | None) -> mx.array:
        """Return the next hidden states; `mask` is True where a key may be attended to."""
        rows, length, size = x.shape
        heads = self.qkv(x).reshape(rows, length, 3, self.num_heads, -1)
        queries, keys, values = heads.transpose(2, 0, 3, 1, 4)
        attended = self.operations.attend(queries, keys, values, mask)
        attended = attended.transpose(0, 2, 1, 3).reshape(rows, length, size)
        x = self.attention_norm(x + self.out(attended))
        return self.norm(x + self.down(self.operations.activation(self.up(x))))


@dataclass(frozen=True)
class Encoder:
    """Compute one vector for each token of each row; the MLX thread only."""

    embeddings: Embeddings
    blocks: tuple[Block, ...]

    def __call__(self, batch: TokenBatch) -> mx.array:
        """Return `[rows, length, hidden]`; the vectors of padding mean nothing."""
        x = self.embeddings(batch.token_ids, batch.type_ids)
        mask = None if batch.is_even else batch.mask[:, None, None, :]
        for block in self.blocks:
            x = block(x, mask)
        return x


@dataclass(frozen=True)
class Classifier:
    """Compute the labels' logits of each row; the MLX thread only.

    BERT's pooler and classifier are the same computation as RoBERTa's head, under other names.
    """

    encoder: Encoder
    dense: Product
    out: Product

    def __call__(self, batch: TokenBatch) -> mx.array:
        """Return `[rows, labels]`."""
        hidden = self.encoder(batch)
        return self.out(mx.tanh(self.dense(hidden[:, 0])))
