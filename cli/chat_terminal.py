"""The chat in a terminal: read, answer as it streams, and survive Ctrl-C and errors."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Protocol, TextIO

from vllm_mlx.cli.chat_backends import ChatBackend, ChatSampling
from vllm_mlx.cli.chat_commands import ChatState, run_command
from vllm_mlx.cli.chat_prompt import LineInterruptedError, unfenced
from vllm_mlx.cli.chat_session import AnswerRecord
from vllm_mlx.cli.errors import error_line, printable
from vllm_mlx.engine.errors import VllmMlxError


class LineReader(Protocol):
    """Name the part of `LinePrompt` that the chat needs."""

    def read(self, draft: str = "") -> str:
        """Return one message; raise `EOFError` or `LineInterruptedError`."""
        ...

    def muted(self) -> contextlib.AbstractContextManager[None]:
        """Keep what is typed off the screen for a while, not out of the next message."""
        ...


class ChatTerminal:
    """Hold the conversation between a reader of lines and a backend.

    Answers go to `out`; everything else is said through `note`.
    """

    def __init__(
        self,
        backend: ChatBackend,
        state: ChatState,
        sampling: ChatSampling,
        *,
        reader: LineReader,
        out: TextIO,
        note: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._backend = backend
        self._state = state
        self._sampling = sampling
        self._reader = reader
        self._out = out
        self._note = note
        self._clock = clock
        self._was_interrupted = False

    def run(self) -> None:
        """Chat until the user leaves."""
        while not self._state.is_over:
            try:
                self._turn()
            except LineInterruptedError as interrupt:
                self._interrupted(interrupt.text)
            except EOFError:
                return
            except KeyboardInterrupt:
                # Between two prompts, in the instant after an answer.
                self._note("(interrupted)")
            except VllmMlxError as error:
                self._note(error_line(error))

    def _turn(self) -> None:
        draft, self._state.draft = self._state.draft, ""
        line = self._reader.read(draft)
        self._was_interrupted = False
        if line.startswith("/"):
            shown = run_command(line, self._state)
            if shown:
                self._note(shown)
            return
        text = unfenced(line).strip()
        if text:
            self._answer(text)

    def _interrupted(self, typed: str) -> None:
        """Leave on the second Ctrl-C in a row; typing in between starts over."""
        if self._was_interrupted and not typed:
            self._state.is_over = True
            return
        self._was_interrupted = True
        self._note("Ctrl-C again, or Ctrl-D, leaves.")

    def _answer(self, text: str) -> None:
        """Ask and show the answer; what was shown stays in the conversation, even cut short."""
        conversation = self._state.conversation
        conversation.ask(text)
        record = AnswerRecord(started_at=self._clock())
        remark = None
        try:
            self._stream(record)
            if record.finish_reason == "length":
                remark = f"(cut off at {self._sampling.max_tokens} tokens or the context's end)"
        except KeyboardInterrupt:
            remark = "(stopped)"
        except VllmMlxError as error:
            remark = error_line(error)
            # The question can be edited and sent again, unless a part of its answer stays.
            self._state.draft = "" if record.text else text
        finally:
            self._out.write("\n")
            self._out.flush()
        if record.text:
            conversation.answered(record.text)
            self._state.stats.answers.append(record)
        else:
            conversation.withdraw()
        if remark is not None:
            self._note(remark)

    def _stream(self, record: AnswerRecord) -> None:
        deltas = self._backend.answer(self._state.conversation.messages, self._sampling)
        with self._reader.muted(), contextlib.closing(deltas):
            for delta in deltas:
                record.add(delta, self._clock())
                self._out.write(printable(delta.text))
                self._out.flush()
