"""Find the tokens that every later request which goes on from a chat begins with; pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vllm_mlx.engine.core.common_prefix import common_length

#: What a next message may begin with: its first character may merge with what stands before it,
#: so that one word would not show where the common part ends.
PLACEHOLDERS = ("Alpha", "bravo", "\n\nCharlie", "  4", " ")

#: Roles after which it is the model's turn: a chat that ends with one is a whole request.
_ASKING_ROLES = frozenset({"user", "tool"})

Message = Mapping[str, Any]


def is_whole_request(messages: Sequence[Message]) -> bool:
    """Say whether the model is to answer a chat as it is, rather than wait for the user."""
    return bool(messages) and messages[-1]["role"] in _ASKING_ROLES


def open_prefix(
    messages: Sequence[Message], encode: Callable[[Sequence[Message]], list[int]]
) -> list[int]:
    """Return the tokens shared by all chats that go on from `messages` with a user's message.

    `encode` renders and encodes a chat as a request would be, tools included. Raises what it does.
    The last token in common is left out: which one it is may depend on what follows it.
    """
    first, *others = (
        encode([*messages, {"role": "user", "content": text}]) for text in PLACEHOLDERS
    )
    shared = min(common_length(first, other) for other in others)
    return first[: max(0, shared - 1)]
