"""Split server-sent events out of raw bytes, however these were cut."""

from __future__ import annotations

import dataclasses

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclasses.dataclass(frozen=True, slots=True)
class SseEvent:
    """Hold one event: its type (`message` where the stream names none) and its data."""

    name: str
    data: bytes


class SseSplitter:
    """Gather bytes until an event is whole; the result does not depend on how they were cut.

    Lines end with LF, CRLF or CR, as the standard of the format says; nothing else splits them,
    since JSON may hold any other separator. One splitter serves one stream.
    """

    def __init__(self) -> None:
        self._pending = b""
        self._data: list[bytes] = []
        self._name = ""
        self._is_first = True

    def feed(self, block: bytes) -> list[SseEvent]:
        """Return the events that `block` completes."""
        text = self._pending + block if self._pending else block
        held = b""
        if b"\r" in text:
            # A CR at the end may be half of a CRLF.
            if text.endswith(b"\r"):
                text, held = text[:-1], b"\r"
            text = text.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *lines, rest = text.split(b"\n")
        self._pending = rest + held
        events = []
        for line in lines:
            event = self._line(line)
            if event is not None:
                events.append(event)
        return events

    def flush(self) -> list[SseEvent]:
        """Return the event that the stream's end cut off, if its data had come."""
        rest, self._pending = self._pending.rstrip(b"\r"), b""
        ends = (self._line(rest), self._line(b""))
        return [event for event in ends if event is not None]

    def _line(self, line: bytes) -> SseEvent | None:
        if self._is_first:
            self._is_first = False
            line = line.removeprefix(_BYTE_ORDER_MARK)
        if not line:
            return self._dispatch()
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"data":
            self._data.append(value)
        elif field == b"event":
            self._name = value.decode("utf-8", "replace")
        return None

    def _dispatch(self) -> SseEvent | None:
        name, self._name = self._name, ""
        if not self._data:
            return None
        data = self._data[0] if len(self._data) == 1 else b"\n".join(self._data)
        self._data = []
        return SseEvent(name or "message", data)
