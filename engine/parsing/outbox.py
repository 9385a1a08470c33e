"""Collect what was parsed as events, each run of one kind as one event."""

from __future__ import annotations

from enum import Enum, auto

from vllm_mlx.engine.parsing.events import (
    ContentDelta,
    Event,
    ReasoningDelta,
    ToolArgumentsDelta,
    ToolCallEnd,
    ToolCallStart,
)


class Mode(Enum):
    """Say what the text outside calls is."""

    CONTENT = auto()
    REASONING = auto()


class Outbox:
    """Turn parsed text into events; owns the numbering and the state of the calls of one stream."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._parts: list[str] = []
        #: What `_parts` are: text of a mode, or a call's arguments (None).
        self._kind: Mode | None = None
        #: How many calls were started.
        self.num_calls = 0
        #: Whether the last call is still open.
        self.is_open = False
        #: Whether the arguments of the open call are whole.
        self.is_whole = False
        #: The modes that text was written in.
        self.written: set[Mode] = set()

    def text(self, mode: Mode, text: str) -> None:
        """Add text outside calls."""
        if text:
            self._add(mode, text)
            self.written.add(mode)

    def start(self, name: str, call_id: str) -> None:
        """Open a call."""
        assert not self.is_open, "a call is open"
        self._flush()
        self._events.append(ToolCallStart(self.num_calls, call_id, name))
        self.num_calls += 1
        self.is_open, self.is_whole = True, False

    def arguments(self, text: str) -> None:
        """Add JSON text to the arguments of the open call."""
        if text:
            self._add(None, text)

    def end(self) -> None:
        """Close the open call, as complete if its arguments are whole."""
        assert self.is_open, "no call is open"
        self._flush()
        self._events.append(ToolCallEnd(self.num_calls - 1, self.is_whole))
        self.is_open = False

    def take(self) -> list[Event]:
        """Return the events since the last time."""
        if self._parts:
            self._flush()
        events, self._events = self._events, []
        return events

    def _add(self, kind: Mode | None, text: str) -> None:
        if kind is not self._kind and self._parts:
            self._flush()
        self._kind = kind
        self._parts.append(text)

    def _flush(self) -> None:
        if not self._parts:
            return
        text = "".join(self._parts)
        self._parts.clear()
        if self._kind is Mode.CONTENT:
            self._events.append(ContentDelta(text))
        elif self._kind is Mode.REASONING:
            self._events.append(ReasoningDelta(text))
        else:
            self._events.append(ToolArgumentsDelta(self.num_calls - 1, text))
