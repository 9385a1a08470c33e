"""Bounds on what a request body holds, so that checking it costs little whoever sends it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm_mlx.engine.errors import InvalidRequestError

#: Most messages of one chat.
MAX_MESSAGES = 4096

#: Most values of one body, at all depths together; token lists and prompts have their own limits.
MAX_VALUES = 65_536

#: Most brackets and commas of a body that is decoded at all. Those within strings count, too: it
#: is a bound of decoding time and memory, far above what texts that fit a context have.
MAX_BRACKETS = 500_000
MAX_COMMAS = 4_000_000

#: Bodies over so many bytes are checked off the event loop.
LARGE_BODY_BYTES = 16 * 1024

#: Top-level lists that hold nothing to check but token ids and texts.
_LISTS_WITH_OWN_LIMITS = frozenset({"prompt", "tokens"})


def check_marks(raw: bytes) -> None:
    """Raise `InvalidRequestError` for a body of more parts than are decoded."""
    if raw.count(b"[") + raw.count(b"{") > MAX_BRACKETS:
        raise InvalidRequestError(
            f"the request body has over {MAX_BRACKETS} opening brackets, the most that are read"
        )
    if raw.count(b",") > MAX_COMMAS:
        raise InvalidRequestError(
            f"the request body has over {MAX_COMMAS} commas, the most that are read"
        )


def check_counts(fields: Mapping[str, Any]) -> None:
    """Raise `InvalidRequestError` for a body of more messages or values than are checked."""
    messages = fields.get("messages")
    if isinstance(messages, list) and len(messages) > MAX_MESSAGES:
        raise InvalidRequestError(
            f"messages has {len(messages)} entries; at most {MAX_MESSAGES} are accepted",
            param="messages",
        )
    for name, value in fields.items():
        num_values = _num_values(value) if name not in _LISTS_WITH_OWN_LIMITS else 0
        if num_values > MAX_VALUES:
            raise InvalidRequestError(
                f"{name[:64]} holds over {MAX_VALUES} values, the most that are accepted",
                param=name[:64],
            )
    if len(fields) > MAX_VALUES:
        raise InvalidRequestError(
            f"the request body has {len(fields)} fields; at most {MAX_VALUES} are accepted"
        )


def _num_values(value: Any) -> int:
    """Count the values inside `value`; once there are too many, some number above the limit."""
    num_values = 0
    waiting = [value]
    while waiting and num_values <= MAX_VALUES:
        container = waiting.pop()
        if not isinstance(container, (dict, list)):
            continue
        num_values += 1 + len(container)
        if num_values <= MAX_VALUES:
            inner = container.values() if isinstance(container, dict) else container
            waiting += [part for part in inner if isinstance(part, (dict, list))]
    return num_values
