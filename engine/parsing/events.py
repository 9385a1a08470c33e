"""What a parser says of the text that it has read, as frozen events."""

from __future__ import annotations

import msgspec


class ReasoningDelta(msgspec.Struct, frozen=True, gc=False):
    """Carry more of the model's reasoning."""

    text: str


class ContentDelta(msgspec.Struct, frozen=True, gc=False):
    """Carry more of the answer that the user sees."""

    text: str


class ToolCallStart(msgspec.Struct, frozen=True, gc=False):
    """Open call number `index`; its name is complete and will not be taken back."""

    index: int
    id: str
    name: str


class ToolArgumentsDelta(msgspec.Struct, frozen=True, gc=False):
    """Carry more of the JSON text of a call's arguments."""

    index: int
    text: str


class ToolCallEnd(msgspec.Struct, frozen=True, gc=False):
    """Close call number `index`.

    `complete` says that its arguments are one whole JSON object. They are not where the text
    ended within the call or broke the rules of its format.
    """

    index: int
    complete: bool


Event = ReasoningDelta | ContentDelta | ToolCallStart | ToolArgumentsDelta | ToolCallEnd
