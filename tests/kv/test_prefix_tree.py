"""The prefix tree: matching, references, eviction order, and random operations."""

from __future__ import annotations

import random

import pytest

from vllm_mlx.engine.kv.block_hash import BlockHasher, Namespace, block_hash
from vllm_mlx.engine.kv.prefix_tree import Node, PrefixTree

ROOT = Namespace(weights="w", kv_dtype="float32", block_size=4).digest


def chain(*blocks: int) -> list[bytes]:
    """Return the hash chain of blocks that each repeat one token."""
    tokens = [token for block in blocks for token in [block] * 4]
    return BlockHasher(ROOT, 4).extend(tokens)


def store(tree: PrefixTree[str], *blocks: int, size: int = 10) -> list[bytes]:
    """Insert a chain of blocks."""
    hashes = chain(*blocks)
    for index, name in enumerate(hashes):
        tree.insert(name, hashes[index - 1] if index else None, f"{blocks[: index + 1]}", size)
    return hashes


def names(nodes: list[Node[str]]) -> list[str]:
    """Return the payloads of nodes."""
    return [node.payload for node in nodes]


def test_a_hash_names_everything_before_its_block() -> None:
    """The same tokens after other tokens, or in another namespace, are another block."""
    other = Namespace(weights="v", kv_dtype="float32", block_size=4).digest
    assert chain(1, 2)[1] != chain(3, 2)[1]
    assert chain(1)[0] != BlockHasher(other, 4).extend([1] * 4)[0]
    assert block_hash(ROOT, [1, 2], b"image") != block_hash(ROOT, [1, 2])


@pytest.mark.parametrize(
    "change",
    [
        {"weights": "v"},
        {"adapter": "a"},
        {"kv_dtype": "bfloat16"},
        {"block_size": 8},
        {"format_version": 99},
        {"libraries": ("mlx 1",)},
    ],
)
def test_whatever_changes_kv_changes_the_namespace(change: dict[str, object]) -> None:
    """Nothing is shared between models, adapters, dtypes, block sizes, formats or libraries."""
    base: dict[str, object] = {"weights": "w", "kv_dtype": "float32"}
    assert Namespace(**base).digest != Namespace(**{**base, **change}).digest  # type: ignore[arg-type]


def test_a_label_is_no_part_of_the_namespace() -> None:
    """The same weights under another name share their blocks."""
    first = Namespace(weights="w", kv_dtype="float32", label="a")
    assert first.digest == Namespace(weights="w", kv_dtype="float32", label="b").digest


def test_hashing_as_tokens_come_equals_hashing_them_at_once() -> None:
    """Only complete blocks are hashed, each once."""
    hasher = BlockHasher(ROOT, 4)
    tokens = list(range(11))
    seen = [len(hasher.extend(tokens[:n])) for n in range(12)]
    assert seen == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2]
    assert hasher.hashes == BlockHasher(ROOT, 4).extend(tokens)


def test_match_returns_the_longest_stored_prefix() -> None:
    """Matching ends at the first missing block, however much follows."""
    tree: PrefixTree[str] = PrefixTree()
    store(tree, 1, 2, 3)
    assert names(tree.match(chain(1, 2, 9, 3))) == ["(1,)", "(1, 2)"]
    assert tree.match(chain(9, 2, 3)) == []


def test_shared_prefixes_are_stored_once() -> None:
    """Two conversations that begin alike share their blocks."""
    tree: PrefixTree[str] = PrefixTree()
    store(tree, 1, 2, 3)
    store(tree, 1, 2, 4)
    assert (len(tree), tree.num_bytes) == (4, 40)


def test_a_block_without_its_parent_is_not_stored() -> None:
    """It could never be reached."""
    tree: PrefixTree[str] = PrefixTree()
    hashes = chain(1, 2)
    assert tree.insert(hashes[1], hashes[0], "orphan", 10) is None
    assert len(tree) == 0


def test_the_least_recently_used_leaf_goes_first_and_a_parent_only_after_its_children() -> None:
    """What is left after any eviction is whole prefixes."""
    gone: list[str] = []
    tree: PrefixTree[str] = PrefixTree(on_evict=lambda node: gone.append(node.payload))
    old = store(tree, 1, 2)
    store(tree, 1, 3)
    store(tree, 5)
    tree.touch(tree.match(old))
    tree.evict_to(20)
    assert gone == ["(1, 3)", "(5,)"]
    tree.evict_to(0)
    assert gone[2:] == ["(1, 2)", "(1,)"]


def test_a_referenced_chain_stays_until_it_is_released() -> None:
    """Eviction leaves what a restore is reading, and can take it afterwards."""
    tree: PrefixTree[str] = PrefixTree()
    nodes = tree.match(store(tree, 1, 2))
    tree.acquire(nodes)
    assert tree.evict_to(0) == 0
    tree.release(nodes)
    assert tree.evict_to(0) == 20


def test_a_discarded_chain_goes_as_far_as_nothing_else_continues_it() -> None:
    """Bad blocks go without a word to the eviction hook; what others share stays."""
    gone: list[str] = []
    tree: PrefixTree[str] = PrefixTree(on_evict=lambda node: gone.append(node.payload))
    bad = store(tree, 1, 2, 3)
    store(tree, 1, 4)
    assert tree.discard(bad) == 2
    assert (names(tree.match(bad)), gone, tree.num_bytes) == (["(1,)"], [], 20)
    tree.check_integrity()


def run_random(rounds: int, seed: int) -> None:
    """Do random operations and compare with a plain dictionary of chains."""
    rng = random.Random(seed)
    evicted: set[bytes] = set()
    tree: PrefixTree[str] = PrefixTree(on_evict=lambda node: evicted.add(node.hash))
    model: dict[bytes, int] = {}
    held: list[list[Node[str]]] = []
    for number in range(rounds):
        blocks = tuple(rng.randrange(3) for _ in range(rng.randint(1, 6)))
        action = rng.random()
        if action < 0.4:
            size = rng.randint(1, 20)
            for index, name in enumerate(chain(*blocks)):
                model.setdefault(name, size)
                del index
            store(tree, *blocks, size=size)
        elif action < 0.6:
            found = tree.match(chain(*blocks))
            assert [n.hash for n in found] == [h for h in chain(*blocks) if h in model][
                : len(found)
            ]
            tree.touch(found)
        elif action < 0.7:
            nodes = tree.match(chain(*blocks))
            tree.acquire(nodes)
            held.append(nodes)
        elif action < 0.85 and held:
            tree.release(held.pop(rng.randrange(len(held))))
        else:
            evicted.clear()
            tree.evict_to(rng.randrange(0, 400))
            assert not any(node.hash in evicted for nodes in held for node in nodes)
            for name in evicted:
                del model[name]
        if number % 50 == 0:
            tree.check_integrity()
            assert {node.hash: node.num_bytes for node in tree} == model
    for nodes in held:
        tree.release(nodes)
    tree.check_integrity()
    tree.clear()
    assert (len(tree), tree.num_bytes) == (0, 0)


def test_random_operations_keep_the_tree_whole() -> None:
    """Inserts, matches, holds, releases and evictions agree with a plain model."""
    run_random(5_000, seed=0)


@pytest.mark.slow
def test_many_random_operations_keep_the_tree_whole() -> None:
    """The same for a hundred thousand rounds."""
    run_random(100_000, seed=1)
