"""Which chunks share a forward: short ones at the same position, of like length."""

from __future__ import annotations

import random

from support.fakes import make_sequence

from vllm_mlx.engine.core.prefill_groups import MAX_GROUPED_TOKENS, MAX_PADDING, group_chunks
from vllm_mlx.engine.core.scheduler import PrefillChunk


def chunk(name: str, start: int, size: int) -> PrefillChunk:
    """Return a chunk of a sequence that is long enough for it."""
    return PrefillChunk(make_sequence(name, start + size + 1), start, start + size)


def names(groups: list[list[PrefillChunk]]) -> list[list[str]]:
    """Return the groups by name."""
    return [[member.sequence.id for member in group] for group in groups]


def test_short_chunks_of_like_length_share_a_forward() -> None:
    """A burst of similar prompts is one forward."""
    chunks = [chunk("a", 0, 40), chunk("b", 0, 44), chunk("c", 0, 38)]
    assert names(group_chunks(chunks)) == [["b", "a", "c"]]


def test_chunks_at_other_positions_of_unlike_length_or_long_ones_stay_apart() -> None:
    """None of them would gain: padding costs, and a long chunk fills the device alone."""
    chunks = [chunk("a", 0, 40), chunk("b", 64, 40), chunk("c", 0, 8), chunk("d", 0, 300)]
    assert names(group_chunks(chunks)) == [["d"], ["a"], ["c"], ["b"]]


def test_single_tokens_are_not_grouped() -> None:
    """A window takes a single token in another way than several."""
    assert len(group_chunks([chunk("a", 0, 1), chunk("b", 0, 1)])) == 2


def test_groups_of_random_chunks_hold_the_rules_and_lose_nothing() -> None:
    """Every chunk is in exactly one group, and padding stays within its bound."""
    rng = random.Random(0)
    for _ in range(200):
        chunks = [chunk(str(n), rng.choice([0, 0, 64]), rng.randint(1, 200)) for n in range(12)]
        groups = group_chunks(chunks)
        assert sorted(c.sequence.id for g in groups for c in g) == sorted(map(str, range(12)))
        for group in groups:
            if len(group) > 1:
                assert len({member.start for member in group}) == 1
                assert group[0].size == max(member.size for member in group)
                assert group[0].size <= MAX_GROUPED_TOKENS
                padded = group[0].size * len(group)
                assert padded <= MAX_PADDING * sum(member.size for member in group)
