"""Say how much of a prompt is stored on SSD, without a model and without an engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from vllm_mlx.engine.kv.block_hash import BlockHasher, Namespace
from vllm_mlx.engine.kv.disk_tier import DiskTier
from vllm_mlx.engine.kv.resume import ResumeRule


class StoredPrefixes:
    """Look prompts of one model up in the SSD tier; owns nothing."""

    def __init__(self, tier: DiskTier, namespace: Namespace, rule: ResumeRule) -> None:
        """Look up by `rule`, which may be an estimate from a config.json."""
        self._tier = tier
        self._root = namespace.digest
        self._rule = rule

    def count(self, tokens: Sequence[int]) -> int:
        """Return how many tokens of a prompt an engine would certainly not compute.

        Parts that the rule or any stored block has are asked for, so that a wrong estimate costs
        a needless look by the engine, and never a prefix that is taken for stored.
        """
        return self._count(tokens, self._rule.kinds)

    def is_whole(self, blocks: Sequence[int]) -> bool:
        """Say whether whole blocks that an engine has just stored are all there.

        The last one has all parts that the model's blocks can have, so no estimate is needed.
        """
        return self._count(blocks, frozenset()) == len(blocks)

    def _count(self, tokens: Sequence[int], kinds: frozenset[str]) -> int:
        hashes = BlockHasher(self._root, self._rule.block_size).extend(tokens)
        stored = self._tier.kinds(hashes)
        rule = dataclasses.replace(self._rule, kinds=kinds.union(*stored))
        return rule.resumable(stored) * self._rule.block_size
