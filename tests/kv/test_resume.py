"""How far stored blocks can be resumed, and where a prompt departs from what is stored."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from vllm_mlx.engine.core.outputs import pack_tokens
from vllm_mlx.engine.kv.block_hash import BlockHasher
from vllm_mlx.engine.kv.departure import departure
from vllm_mlx.engine.kv.prefix_tree import PrefixTree
from vllm_mlx.engine.kv.resume import ResumeRule

KV, WINDOW, STATE = "kv", "window", "state"


def parts(*blocks: str) -> list[frozenset[str]]:
    """Return the parts of blocks, each spelt as its letters: k, w, s."""
    names = {"k": KV, "w": WINDOW, "s": STATE}
    return [frozenset(names[letter] for letter in block) for block in blocks]


@pytest.mark.parametrize(
    ("kinds", "window", "blocks", "expected"),
    [
        ((KV,), None, ("k", "k", "k"), 3),
        ((KV,), None, ("k", "", "k"), 1),
        # Of windows of five tokens, the last two blocks of four are needed.
        ((KV, WINDOW), 5, ("k", "kw", "kw"), 3),
        ((KV, WINDOW), 5, ("kw", "kw", "k", "kw"), 2),
        ((KV, WINDOW), 5, ("kw", "k", "kw"), 1),
        ((WINDOW,), 4, ("", "", "w"), 3),
        ((KV, STATE), None, ("k", "ks", "k"), 2),
        ((KV, STATE), None, ("k", "k", "k"), 0),
        ((KV, WINDOW, STATE), 4, ("k", "ks", "kw"), 0),
        ((KV, WINDOW, STATE), 4, ("k", "kws", "k"), 2),
    ],
)
def test_a_prefix_ends_where_every_layer_can_go_on(
    kinds: tuple[str, ...], window: int | None, blocks: tuple[str, ...], expected: int
) -> None:
    """Full attention needs every block, windows the last ones, recurrent layers the very last."""
    rule = ResumeRule(4, frozenset(kinds), window)
    given = parts(*blocks)
    depth = rule.resumable(given)
    assert depth == expected
    assert all(rule.needed(index, depth) <= given[index] for index in range(depth))


@dataclass(frozen=True)
class Payload:
    """Hold what a stored block does of tokens."""

    tokens: bytes


def tree_of(*prompts: list[int], size: int = 4) -> PrefixTree[Payload]:
    """Return a tree that holds the whole blocks of prompts."""
    tree: PrefixTree[Payload] = PrefixTree()
    for prompt in prompts:
        parent = None
        for index, name in enumerate(BlockHasher(b"", size).extend(prompt)):
            tokens = pack_tokens(prompt[index * size : (index + 1) * size])
            tree.insert(name, parent, Payload(tokens), 1)
            parent = name
    return tree


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ([1, 2, 3, 4, 5, 6, 9, 9], 6),
        ([1, 2, 3, 4, 5, 6, 7, 7], 7),
        ([1, 2, 9, 9, 5, 6, 7, 8], 2),
        ([9, 9, 9, 9], 0),
        # What is stored ends there: nothing to depart from.
        ([1, 2, 3, 4, 5, 6, 7, 8, 9, 9, 9, 9], None),
    ],
)
def test_the_first_token_that_differs_is_found(prompt: list[int], expected: int | None) -> None:
    """Of all that goes on from the last common block, the one with most in common counts."""
    tree = tree_of([1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 5, 0, 0, 0], [8, 8, 8, 8])
    matched = tree.match(BlockHasher(b"", 4).extend(prompt))
    start = 4 * len(matched)
    assert departure(tree, matched, prompt[start : start + 4]) == expected
