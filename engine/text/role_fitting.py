"""Other ways to say the same chat, for templates that refuse the roles as they came; pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Message = Mapping[str, Any]

#: Roles of which two messages in a row can be one.
_MERGEABLE = frozenset({"system", "user", "assistant"})

_BETWEEN = "\n\n"


def role_fittings(messages: Sequence[Message]) -> Iterator[list[Message]]:
    """Yield the chat as it is, and then ever less like it came; each different form once.

    First messages of one role in a row become one, then system messages behind the first become
    the user's, and at last the first one becomes part of the user's. Nothing moves from its place,
    so that a longer chat still begins as the shorter one did.
    """
    seen: list[list[Message]] = []
    for fit in (_same, _merged, _one_system, _no_system):
        fitted = fit(messages)
        if fitted not in seen:
            seen.append(fitted)
            yield fitted


def with_systems_shown(
    messages: Sequence[Message], *, takes_system: bool, takes_late_system: bool
) -> Sequence[Message]:
    """Return the chat with the system messages that a template would drop as the user's.

    With `takes_system` those before the first other message become one.
    """
    if takes_late_system:
        return messages
    if not takes_system:
        return [_as_user(message) for message in messages]
    num_leading = 0
    while num_leading < len(messages) and messages[num_leading]["role"] == "system":
        num_leading += 1
    rest = [_as_user(message) for message in messages[num_leading:]]
    return [*_merged(messages[:num_leading]), *rest]


def _same(messages: Sequence[Message]) -> list[Message]:
    return list(messages)


def _merged(messages: Sequence[Message]) -> list[Message]:
    """Join messages of one role that follow one another; answers of tools stay apart."""
    found: list[Message] = []
    for message in messages:
        role = message["role"]
        if found and role in _MERGEABLE and found[-1]["role"] == role:
            found[-1] = _joined(found[-1], message)
        else:
            found.append(message)
    return found


def _one_system(messages: Sequence[Message]) -> list[Message]:
    merged = _merged(messages)
    return _merged(merged[:1] + [_as_user(message) for message in merged[1:]])


def _no_system(messages: Sequence[Message]) -> list[Message]:
    return _merged([_as_user(message) for message in messages])


def _as_user(message: Message) -> Message:
    return {**message, "role": "user"} if message["role"] == "system" else message


def _joined(first: Message, second: Message) -> Message:
    """Return one message of two; texts are joined by an empty line, calls come in their order."""
    joined = {**first, **second}
    for key in ("content", "reasoning_content"):
        texts = [message[key] for message in (first, second) if message.get(key)]
        if texts:
            joined[key] = _BETWEEN.join(texts)
    calls = [*(first.get("tool_calls") or ()), *(second.get("tool_calls") or ())]
    if calls:
        joined["tool_calls"] = calls
    return joined
