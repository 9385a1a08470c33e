"""Read a value whose text lies within other text, as it comes."""

from __future__ import annotations

from collections.abc import Callable

from vllm_mlx.engine.parsing.reader import MismatchError, Reader, Steps


class InnerValue:
    """Run the steps that read a value over the pieces of its text.

    `read` is given a reader of that text alone. What comes behind a fault goes to `emit` as it
    is, so that `add` never raises and a fault looks the same however the text was cut.
    """

    def __init__(self, emit: Callable[[str], None], read: Callable[[Reader], Steps[None]]) -> None:
        self._emit = emit
        self._reader = Reader()
        self._is_broken = False
        self._steps = self._run(read)
        next(self._steps)

    def add(self, text: str) -> None:
        """Take the next piece of the text."""
        if self._is_broken:
            self._emit(text)
            return
        self._reader.append(text)
        self._step()

    def finish(self) -> None:
        """Say that the text has ended; raises `MismatchError` if it was no whole value."""
        if not self._is_broken:
            self._reader.closed = True
            self._step()
        if self._is_broken:
            raise MismatchError

    def _step(self) -> None:
        try:
            next(self._steps, None)
        except MismatchError:
            self._is_broken = True
            start = self._reader.pos if self._reader.mark is None else self._reader.mark
            self._emit(self._reader.text[start:])

    def _run(self, read: Callable[[Reader], Steps[None]]) -> Steps[None]:
        yield
        yield from read(self._reader)
        self._reader.mark = self._reader.pos
        yield from self._reader.space()
        if self._reader.pos < len(self._reader.text):
            raise MismatchError
