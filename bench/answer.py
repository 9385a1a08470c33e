"""Hold what a server answered to one request, as its events or its body told it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(slots=True)
class ToolCallText:
    """Gather one tool call: its name and the pieces of its arguments."""

    name: str = ""
    pieces: list[str] = dataclasses.field(default_factory=list)

    @property
    def arguments(self) -> str:
        """Return the arguments' JSON text as far as it came."""
        return "".join(self.pieces)


@dataclasses.dataclass(slots=True)
class Answer:
    """Gather one answer; written by an endpoint's reader, read when the request has ended.

    Counts are None where the server does not say. `finish_reason` is in the words of the chat
    API, whichever endpoint it came from.
    """

    content_pieces: list[str] = dataclasses.field(default_factory=list)
    reasoning_pieces: list[str] = dataclasses.field(default_factory=list)
    tool_calls: dict[int, ToolCallText] = dataclasses.field(default_factory=dict)
    finish_reason: str | None = None
    #: The endpoint's own end mark came: `[DONE]`, `message_stop` and the like.
    has_end_mark: bool = False
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    #: Text of the error that the server reported in the stream.
    error: str | None = None
    request_id: str | None = None

    @property
    def content(self) -> str:
        """Return the visible text."""
        return "".join(self.content_pieces)

    @property
    def reasoning(self) -> str:
        """Return the reasoning text."""
        return "".join(self.reasoning_pieces)

    @property
    def has_output(self) -> bool:
        """Return whether anything was generated that a client can see."""
        return bool(self.content_pieces or self.reasoning_pieces or self.tool_calls)

    def add_content(self, text: object) -> bool:
        """Append visible text; return whether there was any."""
        return _append(self.content_pieces, text)

    def add_reasoning(self, text: object) -> bool:
        """Append reasoning text; return whether there was any."""
        return _append(self.reasoning_pieces, text)

    def add_tool_call(self, index: int, name: object, arguments: object) -> bool:
        """Append to the tool call at `index`; return whether anything came."""
        call = self.tool_calls.setdefault(index, ToolCallText())
        if isinstance(name, str):
            call.name += name
        return _append(call.pieces, arguments) or bool(name)


def _append(pieces: list[str], text: object) -> bool:
    if not isinstance(text, str) or not text:
        return False
    pieces.append(text)
    return True


def error_text(error: object) -> str:
    """Return the message of an error object, whatever its shape."""
    if isinstance(error, Mapping):
        inner = error.get("error")
        if isinstance(inner, (Mapping, str)) and inner:
            return error_text(inner)
        for key in ("message", "detail", "type"):
            if isinstance(error.get(key), str) and error[key]:
                return str(error[key])
    return error if isinstance(error, str) else str(error)


def count(value: object) -> int | None:
    """Return a token count from JSON, None for what is not one."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return int(value)


def mapping(value: object) -> Mapping[str, Any]:
    """Return a JSON object, an empty one in place of anything else."""
    return value if isinstance(value, Mapping) else {}
