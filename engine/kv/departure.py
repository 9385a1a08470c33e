"""Say where a prompt departs from the stored prefix that is nearest to it; pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from vllm_mlx.engine.core.common_prefix import common_length
from vllm_mlx.engine.core.outputs import unpack_tokens
from vllm_mlx.engine.kv.prefix_tree import Node, PrefixTree


class HasTokens(Protocol):
    """Hold a block's tokens."""

    @property
    def tokens(self) -> bytes:
        """Return the token ids, packed."""
        ...


Payload = TypeVar("Payload", bound=HasTokens)


def departure(
    tree: PrefixTree[Payload], matched: Sequence[Node[Payload]], tokens: Sequence[int]
) -> int | None:
    """Return the first token that differs from the stored prefix with the most tokens in common.

    `matched` are the nodes that the tree has of the prompt's blocks, `tokens` those of the block
    after them. None if nothing stored goes on from there. Looks at every node: for debugging.
    """
    last = matched[-1] if matched else None
    following = [unpack_tokens(node.payload.tokens) for node in tree if node.parent is last]
    if not following:
        return None
    before = len(matched) * len(following[0])
    return before + max(common_length(tokens, other) for other in following)
