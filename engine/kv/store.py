"""Keep the KV of prefixes in RAM, over an SSD tier, so that no request computes them again."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import mlx.core as mx

from vllm_mlx.engine.core.outputs import pack_tokens
from vllm_mlx.engine.core.prefixes import Clearing
from vllm_mlx.engine.core.sequence import Sequence as TokenSequence
from vllm_mlx.engine.core.sequence import SequenceStatus
from vllm_mlx.engine.core.stats import CacheHitType, PrefixStats
from vllm_mlx.engine.kv.block_codec import Block, BlockCodec
from vllm_mlx.engine.kv.block_hash import BlockHasher, Namespace
from vllm_mlx.engine.kv.departure import departure
from vllm_mlx.engine.kv.disk_format import namespace_folder
from vllm_mlx.engine.kv.disk_writer import RunStream
from vllm_mlx.engine.kv.prefix_tree import Node, PrefixTree
from vllm_mlx.engine.kv.resume import ResumeRule
from vllm_mlx.engine.kv.spill import Spill
from vllm_mlx.engine.kv.stock_caches import cache_arrays

logger = logging.getLogger(__name__)

#: Tokens between captured states of recurrent layers; the end of a prompt is captured besides.
CHECKPOINT_GRID = 2048
#: How long a step that has nothing else to do waits for the disk.
_DISK_WAIT_S = 0.002
#: How long closing may take, handing over what is not stored yet and then writing the last of it.
_CLOSE_FLUSH_S = 3.0
_CLOSE_WRITE_S = 0.5


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
    #: Blocks on their way from disk, and the nodes that must not be evicted until they are used.
    restore: RunStream | None = None
    restore_began_s: float = 0.0
    restored_bytes: int = 0
    was_restored: bool = False
    held: list[Node[Block]] = field(default_factory=list)
    #: When the last chunk ended.
    chunk_ended_s: float | None = None


class PrefixStore:
    """Own the stored blocks; implements `Prefixes`. Used by the engine thread.

    Blocks are copied out of a row's private caches before it joins the batch, and out of its slot
    before it leaves, both in the drained window and evaluated at once. `max_bytes` bounds the
    RAM. With a `spill`, hot blocks go to SSD when they are evicted, when the engine is idle and
    when it closes, and come back while the row that needs them still waits.
    """

    def __init__(
        self,
        namespace: Namespace,
        codec: BlockCodec,
        rows: RowCaches,
        *,
        max_bytes: int,
        spill: Spill | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.block_size = codec.block_size
        self.checkpoint_grid = CHECKPOINT_GRID if codec.has_state else None
        self._namespace = namespace
        self._root = namespace.digest
        self._codec = codec
        self._rule = ResumeRule(codec.block_size, codec.kinds, codec.window)
        self._layout = rows
        self._max_bytes = max_bytes
        self._spill = spill
        self._clock = clock
        self._tree: PrefixTree[Block] = PrefixTree(on_evict=self._evicted)
        #: Ends of chains that may hold blocks to store, newest last.
        self._unstored: deque[bytes] = deque()
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
            block_size=self.block_size,
            namespace=namespace_folder(self._root),
            label=self._namespace.label,
            disk=self._spill.stats() if self._spill is not None else None,
        )

    def must_wait(self, sequence: TokenSequence) -> bool:
        """Say whether the row's next block is being computed by another, or read from disk."""
        row = self._row(sequence)
        hashes = self._hashes(sequence)
        if row.restore is not None:
            return self._load(row)
        found = len(self._tree.match(hashes))
        if found < len(hashes):
            for row_id, other in self._rows.items():
                if row_id != sequence.id and hashes[found] in other.pending:
                    other.is_awaited = True
                    return True
            if self._spill is not None and not row.was_restored:
                return self._begin_restore(row, hashes)
        return False

    def wait(self) -> None:
        """Wait a moment for the disk; called when a step has nothing else to do."""
        time.sleep(_DISK_WAIT_S)

    def restore(self, sequence: TokenSequence) -> int:
        """Fill the row's private caches with the longest stored prefix that can be resumed."""
        row = self._row(sequence)
        hashes = self._hashes(sequence)
        matched = self._tree.match(hashes)
        nodes = matched[: self._rule.resumable([node.payload.kinds for node in matched])]
        num_tokens = len(nodes) * self.block_size
        row.pending = set(hashes[len(nodes) :])
        row.chunk_ended_s = self._clock()
        if sequence.num_preemptions == 0:
            if not sequence.request.is_warm:
                self._query_tokens += len(sequence.prompt)
                self._hit_tokens += num_tokens
            sequence.cache_hit_type = _hit_type(nodes, len(hashes))
            self._explain(sequence, hashes, matched)
        if nodes:
            self._tree.touch(nodes)
            self._note_unstored(nodes[-1].hash)
            caches = self._layout.private_caches(sequence.id)
            self._codec.restore([node.payload for node in nodes], caches)
            mx.async_eval(cache_arrays(caches))
        self._let_go(row)
        return num_tokens

    def after_chunk(self, sequence: TokenSequence, num_tokens: int) -> None:
        """Capture windows and state that the next chunk would replace; store if one waits."""
        row = self._row(sequence)
        self._learn_rate(row, sequence.num_computed - num_tokens, num_tokens)
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
        row = self._row(sequence)
        row.pending.clear()
        row.is_awaited = False
        if sequence.num_computed < self.block_size:
            return
        if sequence.status is SequenceStatus.PREFILLING:
            caches = self._layout.private_caches(sequence.id)
        else:
            caches = self._layout.extract(sequence.id, sequence.num_computed)
            if self._codec.window is not None:
                self._capture_windows(sequence, row, caches)
        self._insert(sequence, row, caches)

    def discard(self, sequence: TokenSequence) -> None:
        """Drop the row's blocks from RAM, where they were stored when it joined the batch."""
        self._tree.discard(self._row(sequence).hasher.extend(sequence.tokens))

    def forget(self, sequence: TokenSequence) -> None:
        """Drop what is kept for a sequence that has left."""
        row = self._rows.pop(sequence.id, None)
        if row is not None:
            self._let_go(row)

    def persist(self) -> bool:
        """Hand one run of hot blocks to the SSD tier; return whether there is more to do.

        A disk that is behind is waited for, a moment at each call.
        """
        if self._spill is None:
            return False
        while self._unstored:
            if self._spill.is_behind:
                self.wait()
                return True
            node = self._tree.get(self._unstored[-1])
            hot = self._deepest_hot(node)
            if hot is not None and not self._spill.is_stored(hot):
                if not self._spill.store(hot, max_runs=1):
                    self._unstored.pop()
                return bool(self._unstored)
            self._unstored.pop()
        return False

    def flush(self, timeout_s: float) -> bool:
        """Store every hot block and wait until it is on disk; return whether it is in time."""
        if self._spill is None:
            return True
        deadline = self._clock() + timeout_s
        while self.persist():
            if self._clock() >= deadline:
                return False
        return self._spill.flush(max(0.0, deadline - self._clock()))

    def close(self) -> None:
        """Store every hot block, wait a few seconds for the disk, and let go of it."""
        if self._spill is not None:
            self.flush(_CLOSE_FLUSH_S)
            self._spill.close(_CLOSE_WRITE_S)

    def release_held(self) -> bool:
        """Let go of blocks held for waiting rows; return whether there were any."""
        held = [row for row in self._rows.values() if row.held]
        for row in held:
            self._tree.release(row.held)
            row.held = []
        return bool(held)

    def evict_to(self, num_bytes: int) -> int:
        """Evict until at most `num_bytes` are held; return the bytes freed."""
        return self._tree.evict_to(num_bytes)

    def evict(self, num_bytes: int) -> int:
        """Evict about so many bytes that are not in use; return how many went."""
        return self.evict_to(max(0, self._tree.num_bytes - num_bytes))

    def clear(self, *, ram: bool = True, ssd: bool = False) -> Clearing:
        """Remove everything that is not in use; hot blocks that leave RAM alone go to SSD."""
        num_blocks, num_runs = 0, None
        if ssd:
            self._unstored.clear()
            self._tree.on_evict = None
        if ram:
            num_blocks = self._tree.clear()
        if ssd and self._spill is not None:
            self._spill.forget_stored()
            num_runs = self._spill.clear()
        self._tree.on_evict = self._evicted
        return Clearing(num_blocks, num_runs)

    def _row(self, sequence: TokenSequence) -> _Row:
        if sequence.id not in self._rows:
            self._rows[sequence.id] = _Row(BlockHasher(self._root, self.block_size))
        return self._rows[sequence.id]

    def _hashes(self, sequence: TokenSequence) -> list[bytes]:
        """Return the hashes of the blocks that prefill would compute whole."""
        whole = sequence.prefill_target // self.block_size
        return self._row(sequence).hasher.extend(sequence.tokens)[:whole]

    def _begin_restore(self, row: _Row, hashes: Sequence[bytes]) -> bool:
        """Begin to read what the disk has beyond RAM, if that is worthwhile; say whether it is."""
        assert self._spill is not None
        row.was_restored = True
        in_ram = [node.payload.kinds for node in self._tree.match(hashes)]
        on_disk = self._spill.kinds(hashes)
        both = [
            (in_ram[i] if i < len(in_ram) else frozenset())
            | (on_disk[i] if i < len(on_disk) else frozenset())
            for i in range(max(len(in_ram), len(on_disk)))
        ]
        depth = self._rule.resumable(both)
        gained = depth - self._rule.resumable(in_ram)
        if gained <= 0:
            return False
        num_bytes = gained * self._codec.block_bytes
        start = (depth - gained) * self.block_size
        if not self._spill.is_worthwhile(start, gained * self.block_size, num_bytes):
            return False
        wanted = [self._rule.needed(i, depth) for i in range(depth)]
        missing = [
            kinds - (in_ram[i] if i < len(in_ram) else frozenset())
            for i, kinds in enumerate(wanted)
        ]
        row.restore = self._spill.begin_restore(hashes[:depth], missing)
        row.restore_began_s, row.restored_bytes = self._clock(), 0
        self._hold(row, self._tree.match(hashes[:depth]))
        return True

    def _load(self, row: _Row) -> bool:
        """Take one run that was read into the tree; say whether there is more to wait for."""
        assert self._spill is not None
        assert row.restore is not None
        run = row.restore.next_run()
        if run is not None:
            # Blocks that were not wanted are not among those that came.
            parents = dict(zip(run.hashes, (run.parent, *run.hashes), strict=False))
            for block_hash, block in self._spill.load(run):
                self._put(row, block_hash, parents[block_hash], block)
            row.restored_bytes += run.num_bytes
        if row.restore.is_done:
            self._spill.restored(row.restored_bytes, self._clock() - row.restore_began_s)
            row.restore = None
        return row.restore is not None

    def _explain(
        self, sequence: TokenSequence, hashes: Sequence[bytes], matched: Sequence[Node[Block]]
    ) -> None:
        """Note where a prompt departs from what is stored, while logging for debugging."""
        if not logger.isEnabledFor(logging.DEBUG) or len(matched) == len(hashes):
            return
        start = len(matched) * self.block_size
        block = sequence.tokens_between(start, start + self.block_size)
        sequence.departs_at = departure(self._tree, matched, block)
        logger.debug(
            "request %s: %d of %d prompt tokens are stored; %s",
            sequence.id,
            start,
            len(sequence.prompt),
            "nothing stored goes on from there"
            if sequence.departs_at is None
            else f"the nearest stored prefix differs from token {sequence.departs_at} on",
        )

    def _put(self, row: _Row, block_hash: bytes, parent: bytes | None, block: Block) -> None:
        node = self._tree.get(block_hash)
        if node is not None:
            self._complete(node, block.window, block.state)
            return
        node = self._tree.insert(block_hash, parent, block, block.num_bytes)
        if node is not None:
            self._hold(row, [node])

    def _hold(self, row: _Row, nodes: list[Node[Block]]) -> None:
        self._tree.acquire(nodes)
        row.held += nodes

    def _let_go(self, row: _Row) -> None:
        if row.restore is not None:
            row.restore.cancel()
            row.restore = None
        self._tree.release(row.held)
        row.held = []

    def _learn_rate(self, row: _Row, start: int, num_tokens: int) -> None:
        now = self._clock()
        if self._spill is not None and row.chunk_ended_s is not None:
            self._spill.computed(start, num_tokens, now - row.chunk_ended_s)
        row.chunk_ended_s = now

    def _note_unstored(self, block_hash: bytes) -> None:
        if self._spill is not None and (not self._unstored or self._unstored[-1] != block_hash):
            self._unstored.append(block_hash)

    def _deepest_hot(self, node: Node[Block] | None) -> Node[Block] | None:
        assert self._spill is not None
        while node is not None and not self._spill.is_hot(node):
            node = node.parent
        return node

    def _evicted(self, node: Node[Block]) -> None:
        if self._spill is not None and self._spill.is_hot(node):
            self._spill.store(node)

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
            start = index * self.block_size
            tokens = pack_tokens(sequence.tokens_between(start, start + self.block_size))
            block = Block(tokens, self._codec.cut_kv(caches, start), window, state)
            parent = hashes[index - 1] if index else None
            if self._tree.insert(block_hash, parent, block, block.num_bytes) is None:
                break
            fresh.append(block)
            if start >= sequence.num_cached and not sequence.output:
                sequence.num_stored += self.block_size
        mx.eval([array for block in fresh for array in block.arrays()])
        if hashes:
            self._note_unstored(hashes[-1])
        row.pending.difference_update(hashes)
        if sequence.request.is_warm:
            # As good as used twice: it is to be stored, however short it is.
            self._tree.touch(self._tree.match(hashes))
        self._tree.evict_to(self._max_bytes)

    def _complete(
        self,
        node: Node[Block],
        window: tuple[mx.array, ...] | None,
        state: tuple[mx.array | None, ...] | None,
    ) -> None:
        held = node.payload
        if (held.window is None and window) or (held.state is None and state):
            node.payload = Block(held.tokens, held.kv, held.window or window, held.state or state)
            self._tree.resize(node, node.payload.num_bytes)


def _hit_type(nodes: Sequence[Node[Block]], num_wanted: int) -> CacheHitType:
    if not nodes:
        return "miss"
    goes_on = nodes[-1].num_children > 0
    if len(nodes) == num_wanted:
        return "supersequence" if goes_on else "exact"
    return "lcp" if goes_on else "prefix"
