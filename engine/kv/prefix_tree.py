"""A radix tree over block hashes, with reference counts and least-recently-used leaves; pure.

A block's hash names its whole prefix, so a dictionary of nodes with parent links is the tree:
matching walks a hash chain from the root until a node is missing. Payloads are handles that the
tree only hands around; it counts their bytes.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Payload = TypeVar("Payload")


@dataclass(slots=True, eq=False)
class Node(Generic[Payload]):
    """Hold one block: its place in the tree, its payload, and how it is used."""

    hash: bytes
    parent: Node[Payload] | None
    payload: Payload
    num_bytes: int
    #: Blocks from the root to here, this one included.
    depth: int
    num_children: int = 0
    #: Users that must find it here: restores under way.
    num_references: int = 0
    #: Tick of the last use; never smaller than a child's.
    last_used: int = 0
    num_hits: int = 0


@dataclass(slots=True)
class TreeStats:
    """Count what a tree did."""

    num_inserted: int = 0
    num_evicted: int = 0
    evicted_bytes: int = 0


@dataclass(slots=True)
class PrefixTree(Generic[Payload]):
    """Own the nodes; used by the engine thread.

    A node is evicted only without children and references, so what is left is always whole
    prefixes. `on_evict` hears of each node as it goes.
    """

    on_evict: Callable[[Node[Payload]], None] | None = None
    stats: TreeStats = field(default_factory=TreeStats)
    num_bytes: int = 0
    _nodes: dict[bytes, Node[Payload]] = field(default_factory=dict)
    #: (last use, hash) of nodes that were leaves once; stale entries are skipped when met.
    _leaves: list[tuple[int, bytes]] = field(default_factory=list)
    _tick: int = 0

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, block_hash: object) -> bool:
        return block_hash in self._nodes

    def __iter__(self) -> Iterator[Node[Payload]]:
        return iter(self._nodes.values())

    def get(self, block_hash: bytes) -> Node[Payload] | None:
        """Return the node of a hash, without counting it as used."""
        return self._nodes.get(block_hash)

    def match(self, hashes: Sequence[bytes]) -> list[Node[Payload]]:
        """Return the nodes of the longest stored prefix of a hash chain, root first."""
        found = []
        for block_hash in hashes:
            node = self._nodes.get(block_hash)
            if node is None:
                break
            found.append(node)
        return found

    def touch(self, nodes: Sequence[Node[Payload]], *, is_hit: bool = True) -> None:
        """Count a use of a chain, as `match` returned it."""
        self._tick += 1
        for node in nodes:
            node.last_used = self._tick
            node.num_hits += is_hit
        if nodes:
            self._note_leaf(nodes[-1])

    def insert(
        self, block_hash: bytes, parent: bytes | None, payload: Payload, num_bytes: int
    ) -> Node[Payload] | None:
        """Add a block under its parent (None: a first block); return None if it is not added.

        It is not if it is there already, or if its parent is not: a block without what comes
        before it is of no use.
        """
        if block_hash in self._nodes:
            return None
        above = self._nodes.get(parent) if parent is not None else None
        if parent is not None and above is None:
            return None
        self._tick += 1
        node = Node(block_hash, above, payload, num_bytes, depth=above.depth + 1 if above else 1)
        self._nodes[block_hash] = node
        self.num_bytes += num_bytes
        self.stats.num_inserted += 1
        if above is not None:
            above.num_children += 1
        step: Node[Payload] | None = node
        while step is not None:
            step.last_used = self._tick
            step = step.parent
        self._note_leaf(node)
        return node

    def resize(self, node: Node[Payload], num_bytes: int) -> None:
        """Count other bytes for a node, whose payload has changed."""
        self.num_bytes += num_bytes - node.num_bytes
        node.num_bytes = num_bytes

    def acquire(self, nodes: Sequence[Node[Payload]]) -> None:
        """Keep a chain from being evicted."""
        for node in nodes:
            node.num_references += 1

    def release(self, nodes: Sequence[Node[Payload]]) -> None:
        """Let go of a chain that was acquired."""
        for node in nodes:
            assert node.num_references > 0, "released more often than acquired"
            node.num_references -= 1
            self._note_leaf(node)

    def evict_to(self, num_bytes: int) -> int:
        """Evict the least recently used leaves until at most `num_bytes` are held; return freed."""
        before = self.num_bytes
        while self.num_bytes > num_bytes:
            node = self._pop_leaf()
            if node is None:
                break
            self._remove(node)
        return before - self.num_bytes

    def discard(self, hashes: Sequence[bytes]) -> int:
        """Drop a chain from its end, as far as nothing else continues it or holds it.

        Returns how many nodes went; `on_evict` does not hear of them, since their content is bad.
        """
        num_gone = 0
        for node in reversed(self.match(hashes)):
            if node.num_children or node.num_references:
                break
            self._unlink(node)
            num_gone += 1
        return num_gone

    def clear(self) -> int:
        """Evict everything that is not referenced; return how many nodes went."""
        before = len(self._nodes)
        self.evict_to(0)
        return before - len(self._nodes)

    def check_integrity(self) -> None:
        """Raise AssertionError if counts, links or order contradict each other."""
        children: dict[bytes, int] = {}
        for node in self._nodes.values():
            if node.parent is not None:
                assert self._nodes.get(node.parent.hash) is node.parent, "an orphan"
                assert node.parent.depth == node.depth - 1, "a wrong depth"
                assert node.parent.last_used >= node.last_used, "a parent older than its child"
                children[node.parent.hash] = children.get(node.parent.hash, 0) + 1
        assert all(
            node.num_children == children.get(node.hash, 0) for node in self._nodes.values()
        ), "wrong counts of children"
        assert self.num_bytes == sum(node.num_bytes for node in self._nodes.values()), "bytes"
        noted = {(used, block_hash) for used, block_hash in self._leaves}
        assert all(
            (node.last_used, node.hash) in noted
            for node in self._nodes.values()
            if not node.num_children and not node.num_references
        ), "a leaf that could never be evicted"

    def _note_leaf(self, node: Node[Payload]) -> None:
        if not node.num_children and not node.num_references:
            heapq.heappush(self._leaves, (node.last_used, node.hash))
        if len(self._leaves) > 64 + 4 * len(self._nodes):
            self._leaves = [
                (n.last_used, n.hash)
                for n in self._nodes.values()
                if not n.num_children and not n.num_references
            ]
            heapq.heapify(self._leaves)

    def _pop_leaf(self) -> Node[Payload] | None:
        while self._leaves:
            used, block_hash = heapq.heappop(self._leaves)
            node = self._nodes.get(block_hash)
            if (
                node is not None
                and node.last_used == used
                and not node.num_children
                and not node.num_references
            ):
                return node
        return None

    def _unlink(self, node: Node[Payload]) -> None:
        del self._nodes[node.hash]
        self.num_bytes -= node.num_bytes
        if node.parent is not None:
            node.parent.num_children -= 1
            self._note_leaf(node.parent)

    def _remove(self, node: Node[Payload]) -> None:
        self._unlink(node)
        self.stats.num_evicted += 1
        self.stats.evicted_bytes += node.num_bytes
        if self.on_evict is not None:
            self.on_evict(node)
