"""One prompt: the messages of a request, and how its first and last words are changed."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

Message = Mapping[str, Any]

#: What a user says next in a conversation whose prompt has no more turns of its own.
FOLLOW_UPS = (
    "Please give one more example.",
    "Say that again in simpler words.",
    "What would be a good argument against it?",
    "Which part of this matters most, and why?",
    "Now sum it all up in two sentences.",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompt:
    """Hold what one conversation starts with."""

    id: str
    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    #: None asks for as many as the run does.
    max_tokens: int | None = None
    #: Fields of this prompt's request; win over the run's.
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    #: What the user says in the turns after the first.
    follow_ups: tuple[str, ...] = ()

    def begins_with(self, text: str) -> Prompt:
        """Return the prompt with `text` before the first message's own."""
        first, *rest = self.messages
        changed = _with_text(first, lambda own: f"{text} {own}", at_end=False)
        return dataclasses.replace(self, messages=(changed, *rest))

    def ends_with(self, text: str) -> Prompt:
        """Return the prompt with `text` after the last message's own."""
        *rest, last = self.messages
        changed = _with_text(last, lambda own: f"{own} {text}", at_end=True)
        return dataclasses.replace(self, messages=(*rest, changed))

    def with_system_prefix(self, text: str) -> Prompt:
        """Return the prompt with `text` before its system message, or as a new one."""
        if self.messages[0].get("role") == "system":
            return self.begins_with(text)
        system = {"role": "system", "content": text}
        return dataclasses.replace(self, messages=(system, *self.messages))

    def follow_up(self, turn: int) -> str:
        """Return what the user says in `turn`, counted from 1."""
        if turn <= len(self.follow_ups):
            return self.follow_ups[turn - 1]
        return FOLLOW_UPS[(turn - 1 - len(self.follow_ups)) % len(FOLLOW_UPS)]


def user_prompt(prompt_id: str, text: str) -> Prompt:
    """Return a prompt of one user message."""
    return Prompt(id=prompt_id, messages=({"role": "user", "content": text},))


def first_turn(prompt: Prompt) -> Prompt:
    """Return the prompt cut before its first answer; later user messages become follow-ups."""
    for index, message in enumerate(prompt.messages):
        if message.get("role") == "assistant" and index > 0:
            later = [m for m in prompt.messages[index:] if m.get("role") == "user"]
            return dataclasses.replace(
                prompt,
                messages=prompt.messages[:index],
                follow_ups=tuple(str(m.get("content")) for m in later),
            )
    return prompt


def _with_text(message: Message, change: Any, *, at_end: bool) -> Message:
    content = message.get("content")
    if isinstance(content, str) or content is None:
        return {**message, "content": change(content or "")}
    parts = list(content)
    places = range(len(parts) - 1, -1, -1) if at_end else range(len(parts))
    for place in places:
        if isinstance(parts[place], Mapping) and isinstance(parts[place].get("text"), str):
            parts[place] = {**parts[place], "text": change(parts[place]["text"])}
            return {**message, "content": parts}
    new = {"type": "text", "text": change("").strip()}
    return {**message, "content": [*parts, new] if at_end else [new, *parts]}


def cycled(prompts: Sequence[Prompt], index: int) -> Prompt:
    """Return the prompt of the request `index`: each in turn."""
    return prompts[index % len(prompts)]
