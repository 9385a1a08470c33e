"""What a tool format reads with: the text, the request's tools, and the calls it writes."""

from __future__ import annotations

import re
from collections.abc import Callable

from vllm_mlx.engine.parsing.json_value import ValueScanner
from vllm_mlx.engine.parsing.literals import JSON, Dialect, unescape
from vllm_mlx.engine.parsing.outbox import Outbox
from vllm_mlx.engine.parsing.reader import MismatchError, Reader, Steps
from vllm_mlx.engine.parsing.schema import ANYTHING, SchemaNode, ToolSet

#: Longest name that is waited for.
_MAX_NAME = 256


class UnknownNameError(MismatchError):
    """Report a call to something that is not among the request's tools."""


class Scan:
    """Offer one format's steps the reader, the tools, and the way to write calls.

    The reader's mark stands where a call may begin: at the trigger, or behind the last call. From
    there on the text is kept until `start` accepts a call or a `MismatchError` gives it back.
    """

    def __init__(
        self, reader: Reader, outbox: Outbox, tools: ToolSet, put: Callable[[int, int], None]
    ) -> None:
        self.reader = reader
        self.outbox = outbox
        self.tools = tools
        #: What the block began with.
        self.trigger = ""
        #: Whether the text behind the mark may be the beginning of a call.
        self.is_candidate = False
        self._put = put
        self._new_id: Callable[[], str] = str
        self._ids: set[str] = set()
        self._num_calls = 0
        self._has_released = False
        #: Whether the text before the cursor was given back as content.
        self.is_behind_text = False
        self._node = ANYTHING

    def begin(self, trigger: str, new_id: Callable[[], str]) -> None:
        """Begin a block of calls; `new_id` makes the id of a call whose text carries none."""
        self.trigger = trigger
        self._new_id = new_id
        self._num_calls = self.outbox.num_calls
        self._has_released = self.is_behind_text = False
        self.is_candidate = True

    @property
    def has_calls(self) -> bool:
        """Say whether a call of the block was started."""
        return self.outbox.num_calls > self._num_calls

    @property
    def is_settled(self) -> bool:
        """Say whether the block can no longer be given back as a whole."""
        return self._has_released or self.has_calls

    @property
    def schema(self) -> SchemaNode:
        """Return the schema of the open call's arguments."""
        return self._node

    def candidate(self) -> None:
        """Say that a further call may begin here: if it does not, the text becomes content."""
        self.is_candidate = True

    def release(self) -> None:
        """Give everything from the mark to the cursor back as plain text."""
        assert self.reader.mark is not None, "nothing is marked"
        self._put(self.reader.mark, self.reader.pos)
        self.reader.mark = self.reader.pos
        self._has_released = self.is_behind_text = True

    def name(self, stop: re.Pattern[str]) -> Steps[str]:
        """Read the name of a known tool up to the first character that `stop` matches.

        White space around it is left out. Raises `UnknownNameError` as soon as none can come of it.
        """
        known = self.tools

        def may_start(text: str) -> bool:
            if len(text) > _MAX_NAME or not known.may_start(text):
                raise UnknownNameError
            return True

        name = (yield from self.reader.word(stop, may_start)).strip()
        return self.known(name)

    def quoted_name(self) -> Steps[str]:
        """Read the name of a known tool as a JSON string."""
        text = yield from self.quoted(self.tools.may_start, UnknownNameError)
        return self.known(text.strip())

    def known(self, name: str) -> str:
        """Return `name`; raises `UnknownNameError` for a name outside the request's tools."""
        if not self.tools.knows(name):
            raise UnknownNameError
        return name

    def quoted(
        self, may_start: Callable[[str], bool], error: type[MismatchError] = MismatchError
    ) -> Steps[str]:
        """Read a JSON string; raises `error` as soon as `may_start` refuses a part of it."""
        opening = yield from self.reader.accept('"', "'")
        if opening is None:
            raise MismatchError
        stop = _QUOTES[opening]
        escaped = False

        def check(text: str) -> bool:
            # A name that is spelt with escapes is judged as a whole.
            if len(text) > _MAX_NAME or not ("\\" in text or may_start(text)):
                raise error
            return True

        text = yield from self.reader.word(stop, check)
        while self.reader.text[self.reader.pos] != opening:
            escaped = True
            self.reader.pos += 1
            text += "\\" + (yield from self.reader.peek())
            self.reader.pos += 1
            text += yield from self.reader.word(stop, lambda more: len(more) <= _MAX_NAME)
        self.reader.pos += 1
        if not escaped:
            return text
        try:
            return unescape(text)
        except ValueError:
            raise error from None

    def drop(self) -> None:
        """Let go of everything from the mark to the cursor: markers of what is no call."""
        self.reader.mark = self.reader.pos
        self._has_released = True

    def start(self, name: str, call_id: str | None = None) -> None:
        """Open a call to `name`, which is known; nothing is given back from here on.

        An id of the model's own is kept unless another call has it already.
        """
        self.reader.mark = None
        self.is_candidate = self.is_behind_text = False
        self._node = self.tools.schema(name)
        if not call_id or call_id in self._ids:
            call_id = self._new_id()
        self._ids.add(call_id)
        self.outbox.start(name, call_id)

    def emit(self, text: str) -> None:
        """Write JSON text of the open call's arguments."""
        self.outbox.arguments(text)

    def whole(self) -> None:
        """Say that the arguments of the open call are whole, and keep the text from here on."""
        self.outbox.is_whole = True
        self.reader.mark = self.reader.pos
        self.is_candidate = False

    def end(self) -> None:
        """Close the open call; what follows is kept until it is known for what it is."""
        self.outbox.end()
        self.reader.mark = self.reader.pos
        self.is_candidate = False

    def rewind(self) -> None:
        """Go back to the end of the last call, from where on nothing more belongs to the block."""
        if self.reader.mark is not None:
            self.reader.pos = self.reader.mark

    def close(self, *closers: str) -> Steps[None]:
        """Read the end of a block, having let go surplus brackets before it."""
        reader = self.reader
        while (yield from reader.peek()) in " \t\r\n}]":
            reader.pos += 1
        if (yield from reader.accept(*closers)) is None:
            raise MismatchError

    def fence(self) -> Steps[bool]:
        """Read the opening line of a code fence, if there is one, and say so."""
        yield from self.reader.space()
        if (yield from self.reader.accept("```")) is None:
            return False
        while (yield from self.reader.peek()).isalpha():
            self.reader.pos += 1
        return True

    def json_object(self, dialect: Dialect = JSON) -> Steps[None]:
        """Read the whole arguments of the open call as one object."""
        yield from self.reader.space()
        if (yield from self.reader.peek()) != "{":
            raise MismatchError
        yield from ValueScanner(self.reader, self.emit, dialect).value(self._node)
        self.whole()


_QUOTES = {'"': re.compile(r'["\\]'), "'": re.compile(r"['\\]")}
