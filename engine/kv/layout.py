"""The interface between the engine and a KV layout: what a row's stored state must be able to do.

A row is known by its request id. Its life: `start` (reserve bytes, private prefill caches),
`private_caches` (while prefilling), `join` (adopt what was prefilled into the batch), then for
every decode step `reserve_next` and `begin_step`, and finally `remove`. `roll_back` shortens it.

Everything but `private_caches` and the forward itself happens in the *drained window*: between
reading the tokens of one forward and launching the next, when no forward is in flight. Only
then may arrays be written in place without MLX copying them whole.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec


class KVSpace(Protocol):
    """Answer the scheduler's questions about bytes, and do what it decides; mlx-free to import."""

    @property
    def allocated_bytes(self) -> int:
        """Bytes held by rows of the batch and reserved for rows that prefill."""
        ...

    def can_start(self, num_tokens: int) -> bool:
        """Say whether a new row of `num_tokens` fits beside everything that is allocated."""
        ...

    def start(self, row_id: str, num_tokens: int) -> None:
        """Reserve bytes for a new row and give it private prefill caches."""
        ...

    def can_join(self, row_id: str, num_tokens: int) -> bool:
        """Say whether the prefilled row fits into the batch with room for `num_tokens`."""
        ...

    def join(self, row_id: str, num_tokens: int) -> None:
        """Adopt the prefilled row, whose capacity must hold `num_tokens`, into the batch."""
        ...

    def can_grow(self, row_id: str, num_tokens: int) -> bool:
        """Say whether the row can hold `num_tokens`, moving it if it must."""
        ...

    def grow(self, row_id: str, num_tokens: int) -> None:
        """Make sure that the row has room for `num_tokens`."""
        ...

    def remove(self, row_id: str) -> None:
        """Free the row, wherever in its life it is."""
        ...

    def tidy(self) -> None:
        """Give back room that left rows no longer need; called when nothing waits to join."""
        ...


class BatchRow(msgspec.Struct, frozen=True):
    """Place one row of a forward: its index in the batch arrays and its position."""

    row_id: str
    #: Index in the forward's batch dimension.
    index: int
    #: Position of the token that the forward reads, counted from 0.
    position: int


@dataclass(frozen=True, slots=True)
class BatchView:
    """Describe one forward's batch: dead rows included, so `num_rows >= len(rows)`."""

    rows: tuple[BatchRow, ...]
    num_rows: int


class Evictable(Protocol):
    """Hold bytes in the KV budget that rows may take back."""

    @property
    def num_bytes(self) -> int:
        """Bytes held."""
        ...

    def evict_to(self, num_bytes: int) -> int:
        """Give back until at most `num_bytes` are held; return the bytes freed."""
        ...

    def release_held(self) -> bool:
        """Let what is held for waiting rows be given back too; return whether anything was."""
        ...


class KVLayout(KVSpace, Protocol):
    """Hold the KV (and other state) of all rows on the device."""

    def new_caches(self) -> list[Any]:
        """Return new stock caches, one per layer, that belong to no row."""
        ...

    def private_caches(self, row_id: str) -> list[Any]:
        """Return the row's own stock caches, one per layer, for prefill."""
        ...

    def extract(self, row_id: str, num_tokens: int) -> list[Any]:
        """Return stock caches that view a row of the batch; valid in the drained window only."""
        ...

    def begin_step(self, positions: Seq[tuple[str, int]]) -> BatchView:
        """Fix the batch of the next forward from (row id, position of its input token)."""
        ...

    @property
    def layer_caches(self) -> list[Any]:
        """Return the objects to pass to the model as `cache` for the batch forward."""
        ...

    def roll_back(self, row_id: str, num_tokens: int) -> None:
        """Keep only the row's first `num_tokens` tokens."""
        ...
