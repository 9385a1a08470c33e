"""Keep the KV of prefixes in RAM, so that no later request computes them again."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import mlx.core as mx

from vllm_mlx.engine.core.sequence import Sequence as TokenSequence
from vllm_mlx.engine.core.sequence import SequenceStatus
from vllm_mlx.engine.core.stats import PrefixStats
from vllm_mlx.engine.kv.block_codec import Block, BlockCodec, num_blocks
from vllm_mlx.engine.kv.block_hash import BlockHasher, Namespace
from vllm_mlx.engine.kv.prefix_tree import Node, PrefixTree
from vllm_mlx.engine.kv.stock_caches import cache_arrays

logger = logging.getLogger(__name__)

#: Tokens between captured states of recurrent layers; the end of a prompt is captured besides.
CHECKPOINT_GRID = 2048


class RowCaches(Protocol):
    """Give a row's state as stock caches."""

    def private_caches(self, row_id: str) -> list[Any]:
        """Return the caches of a row that prefills."""
        ...

    def extract(self, row_id: str, num_tokens: int) -> list[Any]:
        """Return stock caches that view a row of the batch; valid in the drained window only."""
        ...


@dataclass(slots=True)
class _Row:
    """Keep what was captured of one sequence until its blocks are stored."""

    hasher: BlockHasher
    windows: dict[int, tuple[mx.array, ...]] = field(default_factory=dict)
    states: dict[int, tuple[mx.array | None, ...]] = field(default_factory=dict)
    #: Blocks that this row is computing and others may wait for.
    pending: set[bytes] = field(default_factory=set)
    #: Somebody waits: store after every chunk.
    is_awaited: bool = False


class PrefixStore:
    """Own the stored blocks; implements `Prefixes`. Used by the engine thread.

    Blocks are copied out of a row's private caches before it joins the batch, and out of its slot
    before it leaves, both in the drained window and evaluated at once. `max_bytes` bounds the
    RAM; `on_evict` hears of blocks that leave it.
    """

    def __init__(
        self,
        namespace: Namespace,
        codec: BlockCodec,
        rows: RowCaches,
        *,
        max_bytes: int,
        on_evict: Callable[[Node[Block]], None] | None = None,
    ) -> None:
        self.block_size = codec.block_size
        self.checkpoint_grid = CHECKPOINT_GRID if codec.has_state else None
        self._root = namespace.digest
        self._codec = codec
        self._layout = rows
        self._max_bytes = max_bytes
        self._tree: PrefixTree[Block] = PrefixTree(on_evict=on_evict)
        self._rows: dict[str, _Row] = {}
        self._hit_tokens = 0
        self._query_tokens = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of all stored blocks."""
        return self._tree.num_bytes

    @property
    def tree(self) -> PrefixTree[Block]:
        """Return the tree, for tests and tools."""
        return self._tree

    def stats(self) -> PrefixStats:
        """Return a snapshot of what is held and what was found."""
        return PrefixStats(
            num_blocks=len(self._tree),
            num_bytes=self._tree.num_bytes,
            max_bytes=self._max_bytes,
            hit_tokens=self._hit_tokens,
            query_tokens=self._query_tokens,
            num_evicted=self._tree.stats.num_evicted,
        )

    def must_wait(self, sequence: TokenSequence) -> bool:
        """Say whether a prefilling row is computing the next block that this one would find."""
        hashes = self._hashes(sequence)
        found = len(self._tree.match(hashes))
        if found == len(hashes):
            return False
        wanted = hashes[found]
        for row_id, row in self._rows.items():
            if row_id != sequence.id and wanted in row.pending:
                row.is_awaited = True
                return True
        return False

    def restore(self, sequence: TokenSequence) -> int:
        """Fill the row's private caches with the longest stored prefix that can be resumed."""
        row = self._row(sequence)
        hashes = self._hashes(sequence)
        nodes = self._resumable(self._tree.match(hashes))
        num_tokens = len(nodes) * self.block_size
        row.pending = set(hashes[len(nodes) :])
        if sequence.num_preemptions == 0:
            self._query_tokens += len(sequence.prompt)
            self._hit_tokens += num_tokens
        if nodes:
            self._tree.touch(nodes)
            caches = self._layout.private_caches(sequence.id)
            self._codec.restore([node.payload for node in nodes], caches)
            mx.async_eval(cache_arrays(caches))
        return num_tokens

    def after_chunk(self, sequence: TokenSequence) -> None:
        """Capture windows and state that the next chunk would replace; store if one waits."""
        row = self._row(sequence)
        caches = self._layout.private_caches(sequence.id)
        if self._codec.window is not None:
            self._capture_windows(sequence, row, caches)
        self._capture_state(sequence, row, caches)
        if row.is_awaited:
            self._insert(sequence, row, caches)

    def after_step(self, sequence: TokenSequence) -> None:
        """Capture the state of a running row at the end of a block, replacing the last one."""
        if self._codec.has_state and sequence.num_computed % self.block_size == 0:
            row = self._row(sequence)
            caches = self._layout.extract(sequence.id, sequence.num_computed)
            row.states = {sequence.num_computed: self._codec.cut_state(caches)}
            mx.eval([a for a in row.states[sequence.num_computed] if a is not None])

    def save(self, sequence: TokenSequence) -> None:
        """Store the row's complete blocks from wherever it is."""
        if sequence.num_computed < self.block_size:
            return
        row = self._row(sequence)
        if sequence.status is SequenceStatus.PREFILLING:
            caches = self._layout.private_caches(sequence.id)
        else:
            caches = self._layout.extract(sequence.id, sequence.num_computed)
            if self._codec.window is not None:
                self._capture_windows(sequence, row, caches)
        self._insert(sequence, row, caches)
        row.pending.clear()
        row.is_awaited = False

    def forget(self, sequence: TokenSequence) -> None:
        """Drop what is kept for a sequence that has left."""
        self._rows.pop(sequence.id, None)

    def evict_to(self, num_bytes: int) -> int:
        """Evict until at most `num_bytes` are held; return the bytes freed."""
        return self._tree.evict_to(num_bytes)

    def clear(self) -> int:
        """Evict everything; return how many blocks went."""
        return self._tree.clear()

    def _row(self, sequence: TokenSequence) -> _Row:
        if sequence.id not in self._rows:
            self._rows[sequence.id] = _Row(BlockHasher(self._root, self.block_size))
        return self._rows[sequence.id]

    def _hashes(self, sequence: TokenSequence) -> list[bytes]:
        """Return the hashes of the blocks that prefill would compute whole."""
        whole = sequence.prefill_target // self.block_size
        return self._row(sequence).hasher.extend(sequence.tokens)[:whole]

    def _resumable(self, nodes: list[Node[Block]]) -> list[Node[Block]]:
        """Cut a matched chain at the deepest block where every layer can resume."""
        for depth in range(len(nodes), 0, -1):
            if self._codec.has_state and nodes[depth - 1].payload.state is None:
                continue
            if self._codec.window is not None:
                kept = min(self._codec.window, depth * self.block_size)
                needed = num_blocks(kept, self.block_size)
                if any(node.payload.window is None for node in nodes[depth - needed : depth]):
                    continue
            return nodes[:depth]
        return []

    def _capture_windows(self, sequence: TokenSequence, row: _Row, caches: Sequence[Any]) -> None:
        captured = []
        for index in range(sequence.num_computed // self.block_size - 1, -1, -1):
            if index in row.windows:
                break
            window = self._codec.cut_window(caches, index * self.block_size)
            if window is None:
                break
            row.windows[index] = window
            captured += list(window)
        mx.async_eval(*captured)

    def _capture_state(self, sequence: TokenSequence, row: _Row, caches: Sequence[Any]) -> None:
        if self._codec.has_state and sequence.num_computed % self.block_size == 0:
            row.states[sequence.num_computed] = self._codec.cut_state(caches)

    def _insert(self, sequence: TokenSequence, row: _Row, caches: Sequence[Any]) -> None:
        """Add the complete blocks that are not there, and what was captured to those that are."""
        whole = sequence.num_computed // self.block_size
        hashes = row.hasher.extend(sequence.tokens)[:whole]
        fresh: list[Block] = []
        for index, block_hash in enumerate(hashes):
            window = row.windows.get(index)
            state = row.states.get((index + 1) * self.block_size)
            node = self._tree.get(block_hash)
            if node is not None:
                self._complete(node, window, state)
                continue
            block = Block(self._codec.cut_kv(caches, index * self.block_size), window, state)
            parent = hashes[index - 1] if index else None
            if self._tree.insert(block_hash, parent, block, block.num_bytes) is None:
                break
            fresh.append(block)
        mx.eval([array for block in fresh for array in block.arrays()])
        row.pending.difference_update(hashes)
        self._tree.evict_to(self._max_bytes)

    def _complete(
        self,
        node: Node[Block],
        window: tuple[mx.array, ...] | None,
        state: tuple[mx.array | None, ...] | None,
    ) -> None:
        held = node.payload
        if (held.window is None and window) or (held.state is None and state):
            node.payload = Block(held.kv, held.window or window, held.state or state)
            self._tree.resize(node, node.payload.num_bytes)
