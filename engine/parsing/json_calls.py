"""Read calls that are JSON objects, singly or in lists: `{"name": ..., "arguments": {...}}`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from vllm_mlx.engine.parsing.inner_value import InnerValue
from vllm_mlx.engine.parsing.json_value import ValueScanner
from vllm_mlx.engine.parsing.literals import STEPWISE_JSON, unescape
from vllm_mlx.engine.parsing.reader import MismatchError, Reader, Steps
from vllm_mlx.engine.parsing.scan import Scan, UnknownNameError


@dataclass(frozen=True, slots=True)
class CallKeys:
    """Say under which keys the parts of a call stand."""

    names: tuple[str, ...] = ("name",)
    arguments: tuple[str, ...] = ("arguments", "parameters")
    ids: tuple[str, ...] = ("id",)
    #: Keys whose value is an object that has the parts of the call in it.
    nested: tuple[str, ...] = ()
    #: Keys whose value is a list of calls.
    lists: tuple[str, ...] = ()
    #: Other keys that may stand before the name.
    ignored: tuple[str, ...] = ("type", "index")

    def may_start(self, text: str) -> bool:
        """Say whether one of the keys begins with `text`."""
        return any(key.startswith(text) for key in self._all())

    def _all(self) -> Iterator[str]:
        for keys in (self.names, self.arguments, self.ids, self.nested, self.lists, self.ignored):
            yield from keys


class _Call:
    """One call object while it is read."""

    def __init__(self) -> None:
        self.name: str | None = None
        self.call_id: str | None = None
        #: Arguments that came before the name.
        self.early: str | None = None
        self.has_arguments = False
        #: Whether it was a list of calls instead.
        self.is_list = False


class JsonCallReader:
    """Read call objects of one shape for one block."""

    def __init__(self, scan: Scan, keys: CallKeys) -> None:
        self._scan = scan
        self._reader = scan.reader
        self._keys = keys

    def payload(
        self, *, separators: tuple[str, ...] = (), keeps_unknown: bool = True
    ) -> Steps[None]:
        """Read a list of calls, or one call and more behind `separators` or at once."""
        reader = self._reader
        yield from reader.space()
        if (yield from reader.find("[", "{")) == "[":
            yield from self.list(keeps_unknown=keeps_unknown)
            return
        while True:
            yield from self.call()
            yield from reader.space()
            if separators:
                separator = yield from reader.find(*separators, "{")
            else:
                separator = yield from reader.find("{")
            if separator is None:
                self._scan.rewind()
                return
            self._scan.candidate()
            if separator != "{":
                yield from reader.expect(separator)
                yield from reader.space()

    def list(self, *, keeps_unknown: bool = True) -> Steps[None]:
        """Read a list of calls; with `keeps_unknown` a call to no known tool becomes content."""
        reader, scan = self._reader, self._scan
        yield from reader.expect("[")
        while True:
            yield from reader.space()
            element = reader.pos - (reader.mark or 0)
            try:
                yield from self.call()
            except UnknownNameError:
                if not keeps_unknown or not scan.is_candidate or reader.mark is None:
                    raise
                reader.pos = reader.mark + element
                yield from self._release_value()
            yield from reader.space()
            found = yield from reader.find(",", "]")
            if found is None:
                raise MismatchError
            if found == "]":
                break
            scan.candidate()
            reader.pos += 1
        if not scan.has_calls:
            raise MismatchError
        reader.pos += 1

    def call(self) -> Steps[None]:
        """Read one call object; it is closed once its brace is, or all its parts are there."""
        call = _Call()
        yield from self._object(call)
        if call.is_list:
            return
        if call.name is None:
            raise MismatchError
        if not call.has_arguments:
            self._scan.emit("{}")
            self._scan.whole()
        self._scan.end()

    def _object(self, call: _Call) -> Steps[None]:
        reader = self._reader
        is_headed = self._head(call)
        if not is_headed:
            yield from reader.expect("{")
            yield from reader.space()
            if (yield from reader.accept("}")) is not None:
                return
        while True:
            if is_headed:
                yield from self._arguments(call)
                is_headed = False
            else:
                yield from self._member(call)
            yield from reader.space()
            if (yield from reader.accept(",")) is None:
                yield from reader.expect("}")
                return
            yield from reader.space()
            # A trailing comma is let go.
            if (yield from reader.accept("}")) is not None:
                return

    def _head(self, call: _Call) -> bool:
        """Read the usual beginning of a call at once, if all of it is at hand.

        This is for speed alone: member by member gives the same.
        """
        reader, scan = self._reader, self._scan
        if call.name is not None:
            return False
        found = _head(self._keys).match(reader.text, reader.pos)
        if found is None or not scan.tools.knows(found.group(1)):
            return False
        reader.pos = found.end()
        call.name = found.group(1)
        scan.start(call.name, call.call_id)
        return True

    def _member(self, call: _Call) -> Steps[None]:
        reader, scan, keys = self._reader, self._scan, self._keys
        is_started = call.name is not None
        key = yield from scan.quoted((lambda _: True) if is_started else keys.may_start)
        yield from reader.space()
        yield from reader.expect(":")
        yield from reader.space()
        if key in keys.arguments and not call.has_arguments:
            yield from self._arguments(call)
        elif is_started:
            yield from ValueScanner(reader, _discard).value()
        elif key in keys.nested and (yield from reader.find("{")) is not None:
            yield from self._object(call)
        elif key in keys.names or key in keys.nested:
            yield from self._name(call)
        elif key in keys.lists:
            yield from self.list()
            call.is_list = True
        elif key in keys.ids:
            call.call_id = yield from self._id()
        elif key in keys.ignored:
            yield from ValueScanner(reader, _discard).value()
        else:
            raise MismatchError

    def _name(self, call: _Call) -> Steps[None]:
        """Read the name, and start the call."""
        scan = self._scan
        call.name = yield from scan.quoted_name()
        scan.start(call.name, call.call_id)
        if call.early is not None:
            early = Reader(call.early, closed=True)
            yield from _arguments(scan, early)
            scan.whole()

    def _arguments(self, call: _Call) -> Steps[None]:
        reader, scan = self._reader, self._scan
        call.has_arguments = True
        if call.name is not None:
            yield from _arguments(scan, reader)
            scan.whole()
            return
        # The name is still to come. The mark keeps the text until then.
        start = reader.pos - (reader.mark or 0)
        yield from ValueScanner(reader, _discard).value()
        call.early = reader.text[(reader.mark or 0) + start : reader.pos]

    def _id(self) -> Steps[str | None]:
        """Read the call's id; one that is no string is none."""
        if (yield from self._reader.find('"', "'")) is None:
            yield from ValueScanner(self._reader, _discard).value()
            return None
        return (yield from ValueScanner(self._reader, _discard).string()) or None

    def _release_value(self) -> Steps[None]:
        """Give back as content everything from the mark to the end of the value that comes next.

        Markers within the value are text. Should it not be JSON, that holds up to the fault.
        """
        reader, scan = self._reader, self._scan
        try:
            for _ in ValueScanner(reader, _discard, STEPWISE_JSON).value():
                scan.release()
                yield
        except MismatchError:
            scan.release()
            raise
        scan.release()


@lru_cache(maxsize=64)
def _head(keys: CallKeys) -> re.Pattern[str]:
    """Return a pattern of a call from its brace up to its arguments, its name being a group."""
    space = r"[ \t\r\n]*+"
    names, arguments = ("|".join(map(re.escape, k)) for k in (keys.names, keys.arguments))
    return re.compile(
        rf'\{{{space}"(?:{names})"{space}:{space}"([A-Za-z0-9_.\-]++)"{space},{space}'
        rf'"(?:{arguments})"{space}:{space}(?=\{{)'
    )


def _arguments(scan: Scan, reader: Reader) -> Steps[None]:
    """Read the arguments of the open call: an object, one within a string, or null."""
    kind = yield from reader.find("{", '"', "null", "None")
    if kind == "{":
        yield from ValueScanner(reader, scan.emit).value(scan.schema)
    elif kind == '"':
        yield from _nested_arguments(scan, reader)
    elif kind is not None:
        yield from reader.expect(kind)
        scan.emit("{}")
    else:
        raise MismatchError


def _nested_arguments(scan: Scan, reader: Reader) -> Steps[None]:
    """Read arguments whose JSON text is itself a JSON string, as it comes."""
    decode = _Decoder()
    inner = InnerValue(scan.emit, _inner_arguments(scan))
    yield from ValueScanner(reader, _discard).string_into(lambda text: inner.add(decode(text)))
    inner.finish()


def _inner_arguments(scan: Scan) -> Callable[[Reader], Steps[None]]:
    def read(inner: Reader) -> Steps[None]:
        yield from inner.space()
        if inner.pos == len(inner.text) or (yield from inner.accept("null")) is not None:
            scan.emit("{}")
        elif (yield from inner.peek()) != "{":
            raise MismatchError
        else:
            yield from ValueScanner(inner, scan.emit).value(scan.schema)

    return read


class _Decoder:
    """Turn the inside of a JSON string, in pieces of whole escapes, into text."""

    def __init__(self) -> None:
        self._high = ""

    def __call__(self, text: str) -> str:
        """Decode the next piece; half of a surrogate pair waits for the other half."""
        decoded = unescape(self._high + text)
        self._high = ""
        if decoded and "\ud800" <= decoded[-1] <= "\udbff":
            self._high = f"\\u{ord(decoded[-1]):04x}"
            decoded = decoded[:-1]
        return decoded.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _discard(text: str) -> None:
    """Leave out what a value scanner emits."""
