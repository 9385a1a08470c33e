"""Drive the formats over one stream of text: reasoning, content and calls in their order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum, auto
from functools import partial

from vllm_mlx.engine.parsing.events import Event
from vllm_mlx.engine.parsing.markers import MAX_MARKER_SPACE, MarkerSet, marker_set, space_before
from vllm_mlx.engine.parsing.outbox import Mode, Outbox
from vllm_mlx.engine.parsing.reader import WHITE_SPACE, CutError, MismatchError, Reader, Steps
from vllm_mlx.engine.parsing.reasoning_format import ReasoningFormat
from vllm_mlx.engine.parsing.scan import Scan
from vllm_mlx.engine.parsing.schema import ToolSet
from vllm_mlx.engine.parsing.tool_format import ToolFormat


class _Lead(Enum):
    """Say what becomes of the white space that a run of text begins with."""

    #: The run begins the stream: the space is text like any other.
    TEXT = auto()
    #: The run follows a marker and continues text: the space is kept if text follows.
    BETWEEN = auto()
    #: The run follows a marker and begins the text.
    DROPPED = auto()


class StreamParser:
    """Parse one stream of text into events; make one for each stream, with `make_parser`.

    White space next to a marker belongs to the marker, up to 64 characters; between two parts of
    content that a call separates, what stands before the call does and what stands behind stays.

    Not thread-safe.
    """

    def __init__(
        self,
        formats: Sequence[type[ToolFormat]],
        reasoning: ReasoningFormat | None,
        tools: ToolSet,
        *,
        in_reasoning: bool = False,
    ) -> None:
        self._reader = Reader()
        self._outbox = Outbox()
        self._scan = Scan(self._reader, self._outbox, tools, self._put_text)
        self._reasoning = reasoning or _framing(formats)
        self._by_trigger: dict[str, list[type[ToolFormat]]] = {}
        self._by_anchor: dict[str, list[type[ToolFormat]]] = {}
        for leaf in _leaves(formats):
            for trigger in leaf.triggers:
                self._by_trigger.setdefault(trigger, []).append(leaf)
            for trigger in leaf.anchored:
                self._by_anchor.setdefault(trigger, []).append(leaf)
        self._mode = Mode.REASONING if in_reasoning else Mode.CONTENT
        self._lead = _Lead.DROPPED if in_reasoning else _Lead.TEXT
        self._is_run_written = False
        self._stray: tuple[str, ...] = ()
        self._markers = _Markers(
            (*self._by_trigger, *self._reasoning.markers, *self._reasoning.dropped)
        )
        self._is_finished = False
        self._steps = self._parse()
        next(self._steps)

    @property
    def in_reasoning(self) -> bool:
        """Say whether what has been read ends within reasoning."""
        return self._mode is Mode.REASONING

    def feed(self, text: str) -> list[Event]:
        """Take the next piece of the text and return the events that it decides."""
        assert not self._is_finished, "the text has ended"
        if not text:
            return []
        reader = self._reader
        if reader.quiet is not None and reader.quiet(text):
            reader.sink(text)
            return self._outbox.take()
        reader.quiet = None
        reader.append(text)
        next(self._steps)
        return self._outbox.take()

    def finish(self) -> list[Event]:
        """Say that the text has ended and return the last events."""
        assert not self._is_finished, "the text has ended"
        self._is_finished = self._reader.closed = True
        next(self._steps, None)
        return self._outbox.take()

    def _parse(self) -> Steps[None]:
        """Read the whole stream."""
        yield
        while True:
            self._is_run_written = False
            marker = yield from self._anchor()
            if marker is not None and (yield from self._call(marker, self._by_anchor)):
                continue
            marker = yield from self._text()
            while marker is not None and not (yield from self._marker(marker)):
                marker = yield from self._text()
            if marker is None:
                return

    def _anchor(self) -> Steps[str | None]:
        """Return the anchored trigger that comes next, None if none does; uses up no text then."""
        reader = self._reader
        if not self._by_anchor or self._mode is not Mode.CONTENT:
            return None
        reader.mark = reader.pos
        try:
            for _ in range(MAX_MARKER_SPACE):
                if (yield from reader.peek()) not in WHITE_SPACE:
                    break
                reader.pos += 1
            found = yield from reader.accept(*self._by_anchor)
        except CutError:
            found = None
        if found is None:
            reader.pos, reader.mark = reader.mark, None
        return found

    def _text(self) -> Steps[str | None]:
        """Emit text up to the next marker and use up the marker; None at the end of the stream.

        The mark is left at the white space before the marker.
        """
        reader = self._reader
        reasoning = self._reasoning
        markers = self._markers[self._stray]
        quiet = _quiet(markers)
        sink = partial(self._outbox.text, self._mode)
        while True:
            index, marker = markers.find(reader.text, reader.pos, closed=reader.closed)
            if marker in reasoning.dropped and marker is not None:
                self._put(index)
                reader.pos += len(marker)
                continue
            self._put(space_before(reader.text, reader.pos, index) if markers.markers else index)
            if marker is not None:
                reader.mark, reader.pos = reader.pos, index + len(marker)
                return marker
            if reader.closed:
                if self._is_run_written or self._lead is _Lead.TEXT:
                    self._put(index)
                return None
            if reader.pos == len(reader.text) and self._is_run_written:
                reader.quiet, reader.sink = quiet, sink
            yield

    def _marker(self, marker: str) -> Steps[bool]:
        """Read what `marker` begins; False if it is plain text, whose first character is out.

        The reader's mark is at the white space before the marker and its cursor behind it.
        """
        reader = self._reader
        reasoning = self._reasoning
        assert reader.mark is not None, "a marker was read without a mark"
        size = reader.pos - reader.mark
        if marker in self._by_trigger and (yield from self._call(marker, self._by_trigger)):
            return True
        if marker in reasoning.markers:
            try:
                mode = yield from reasoning.enter(marker, reader)
            except MismatchError:
                reader.pos = reader.mark + size
            else:
                self._begin_run(mode)
                return True
        elif marker in self._stray:
            self._begin_run(self._mode)
            return True
        reader.pos, reader.mark = reader.mark, None
        self._put(reader.pos + size - len(marker) + 1)
        return False

    def _call(self, marker: str, formats: dict[str, list[type[ToolFormat]]]) -> Steps[bool]:
        """Try the formats of `marker`; False if it begins no call, with the cursor at the mark."""
        reader, scan = self._reader, self._scan
        assert reader.mark is not None, "a marker was read without a mark"
        size = reader.pos - reader.mark
        for tool_format in formats[marker]:
            reader.pos = reader.mark + size
            stray: tuple[str, ...] = ()
            scan.begin(marker, tool_format.new_id)
            try:
                yield from tool_format.parse(scan)
            except MismatchError as error:
                if scan.is_settled:
                    yield from self._break_off(
                        tool_format.closers, is_cut=isinstance(error, CutError)
                    )
                    stray = tool_format.closers if scan.has_calls else ()
            if not scan.is_settled:
                continue
            is_over = self._mode is Mode.REASONING and tool_format.ends_reasoning
            self._begin_run(Mode.CONTENT if is_over else self._mode, stray)
            if scan.is_behind_text:
                self._lead = _Lead.TEXT
            return True
        reader.pos = reader.mark + (0 if formats is self._by_anchor else size)
        if formats is self._by_anchor:
            reader.mark = None
        return False

    def _break_off(self, closers: tuple[str, ...], *, is_cut: bool) -> Steps[None]:
        """Leave a block of calls that went wrong behind one of its calls, or in it."""
        reader, outbox = self._reader, self._outbox
        if outbox.is_open and not outbox.is_whole and not is_cut:
            # What cannot be understood stays in the arguments: it is no answer to show.
            markers = marker_set(*closers)
            found = None
            while found is None:
                end, found = markers.find(reader.text, reader.pos, closed=reader.closed)
                outbox.arguments(reader.text[reader.pos : end])
                reader.pos = end + len(found or "")
                if found is None and reader.closed:
                    break
                if found is None:
                    yield
            outbox.end()
            return
        if outbox.is_open:
            outbox.end()
            is_candidate = False
        else:
            is_candidate = self._scan.is_candidate
        if is_cut and not is_candidate:
            # The ends of calls, cut off themselves.
            reader.pos = len(reader.text)
        elif reader.mark is not None:
            reader.pos = reader.mark

    def _begin_run(self, mode: Mode, stray: tuple[str, ...] = ()) -> None:
        """Go on with text of `mode` behind a marker."""
        self._reader.mark = None
        self._stray = stray
        is_continued = mode in self._outbox.written and (mode is Mode.CONTENT or self._mode is mode)
        self._mode = mode
        self._lead = _Lead.BETWEEN if is_continued else _Lead.DROPPED

    def _put(self, end: int) -> None:
        """Emit the text from the cursor up to `end`."""
        start, self._reader.pos = self._reader.pos, end
        self._put_text(start, end)

    def _put_text(self, start: int, end: int) -> None:
        """Emit a part of the text; the cursor stays."""
        text = self._reader.text[start:end]
        if not self._is_run_written and self._lead is _Lead.DROPPED:
            text = text.lstrip(WHITE_SPACE)
        if text:
            self._outbox.text(self._mode, text)
            self._is_run_written = True


class _Markers(dict[tuple[str, ...], MarkerSet]):
    """Give the set of a stream's markers with those added that are the key."""

    def __init__(self, markers: tuple[str, ...]) -> None:
        self._always = markers

    def __missing__(self, more: tuple[str, ...]) -> MarkerSet:
        found = self[more] = marker_set(*self._always, *more)
        return found


def _quiet(markers: MarkerSet) -> Callable[[str], bool]:
    """Return what says of a piece of text that no part of it may belong to a marker."""
    if not markers.markers:
        return bool
    begins_in = markers.begins_in
    return lambda text: text[-1] not in WHITE_SPACE and not begins_in(text)


def _framing(formats: Sequence[type[ToolFormat]]) -> ReasoningFormat:
    """Return what reads the frame of the answer where reasoning is not asked for."""
    return next((f.framing() for f in formats if f.framing is not None), ReasoningFormat())


def _leaves(formats: Sequence[type[ToolFormat]]) -> list[type[ToolFormat]]:
    """Return `formats` with those that stand for others replaced by these, each once."""
    found: dict[type[ToolFormat], None] = {}
    for tool_format in formats:
        found.update(dict.fromkeys(_leaves(tool_format.members) or [tool_format]))
    return list(found)
