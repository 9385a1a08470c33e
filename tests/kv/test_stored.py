"""How much of a prompt is stored, told from the index alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_mlx.engine.core.outputs import pack_tokens
from vllm_mlx.engine.kv.block_hash import BlockHasher, Namespace
from vllm_mlx.engine.kv.disk_format import StoredRun, StoredTensor
from vllm_mlx.engine.kv.disk_tier import DiskTier
from vllm_mlx.engine.kv.resume import ResumeRule
from vllm_mlx.engine.kv.stored import StoredPrefixes

SIZE = 4
NAMESPACE = Namespace(weights="w", kv_dtype="float32", block_size=SIZE)
TOKENS = list(range(12))


def store(tier: DiskTier, *kinds: tuple[str, ...]) -> None:
    """Store the first blocks of `TOKENS` with these parts."""
    hashes = BlockHasher(NAMESPACE.digest, SIZE).extend(TOKENS)[: len(kinds)]
    run = StoredRun(
        namespace=NAMESPACE,
        parent=None,
        hashes=tuple(hashes),
        tokens=pack_tokens(TOKENS[: SIZE * len(kinds)]),
        tensors=tuple(
            StoredTensor(f"{index}/{kind}/0", "uint8", (2,), b"ab")
            for index, parts in enumerate(kinds)
            for kind in parts
        ),
    )
    assert tier.write(run)


@pytest.mark.parametrize(
    ("estimate", "stored", "expected"),
    [
        (("kv",), (("kv",), ("kv",)), 8),
        # The estimate knows of state that no stored block has: not to be relied on.
        (("kv", "state"), (("kv",), ("kv",)), 0),
        (("kv", "state"), (("kv", "state"), ("kv",)), 4),
        # It does not know of it, but a block has it: then all that matters have it.
        (("kv",), (("kv", "state"), ("kv",)), 4),
        (("kv",), (("kv",), ("kv", "state")), 8),
    ],
)
def test_only_what_can_certainly_be_resumed_counts(
    tmp_path: Path, estimate: tuple[str, ...], stored: tuple[tuple[str, ...], ...], expected: int
) -> None:
    """A wrong estimate never makes something count that the engine would compute."""
    tier = DiskTier.open(tmp_path / "store", None)
    store(tier, *stored)
    prefixes = StoredPrefixes(tier, NAMESPACE, ResumeRule(SIZE, frozenset(estimate)))
    assert prefixes.count(TOKENS) == expected
    assert prefixes.is_whole(TOKENS[:8]) == ("state" in stored[1] or "state" not in stored[0])
    assert not prefixes.is_whole(TOKENS)
    tier.close()
