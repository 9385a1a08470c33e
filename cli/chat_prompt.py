"""Read the user's lines in a terminal: editing, history and messages of several lines."""

from __future__ import annotations

import contextlib
import os
import sys
import termios
from collections.abc import Iterator
from pathlib import Path

import platformdirs
from prompt_toolkit import PromptSession
from prompt_toolkit.completion import NestedCompleter, PathCompleter
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

from vllm_mlx.cli.chat_commands import COMMANDS

FENCE = '"""'
PROMPT = "> "
CONTINUATION = ". "


class LineInterruptedError(Exception):
    """Say that Ctrl-C was pressed at the prompt; `text` is what had been typed."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text


def is_unfinished(text: str) -> bool:
    """Say whether Enter starts a new line: a block is open, or a backslash ends the line."""
    stripped = text.strip()
    if stripped.startswith(FENCE):
        return len(stripped) < 2 * len(FENCE) or not stripped.endswith(FENCE)
    return text.endswith("\\")


def unfenced(text: str) -> str:
    """Return the message in `text`, without the quotes around a block."""
    stripped = text.strip()
    if stripped.startswith(FENCE) and not is_unfinished(stripped):
        return stripped[len(FENCE) : -len(FENCE)].strip("\n")
    return text


def history_path() -> Path:
    """Return where the lines of earlier chats are kept."""
    return platformdirs.user_state_path("vllm-mlx") / "chat_history"


def open_history(path: Path) -> tuple[History, str | None]:
    """Return the history kept at `path`, and a warning if it cannot be kept there.

    Makes the file, readable by its owner only, as what was asked may be private.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.fchmod(descriptor, 0o600)
        finally:
            os.close(descriptor)
    except OSError as error:
        return InMemoryHistory(), f"lines are not kept for later: {path}: {error.strerror}"
    return FileHistory(str(path)), None


class LinePrompt:
    """Read messages from the terminal; owns its history and key bindings."""

    def __init__(self, history: History) -> None:
        path = PathCompleter(expanduser=True)
        completer = NestedCompleter.from_nested_dict(
            {name: path if name in ("/save", "/load") else None for name in COMMANDS}
        )
        self._session: PromptSession[str] = PromptSession(
            PROMPT,
            multiline=True,
            prompt_continuation=CONTINUATION,
            history=history,
            key_bindings=_key_bindings(),
            completer=completer,
            complete_while_typing=False,
            enable_open_in_editor=True,
        )

    def read(self, draft: str = "") -> str:
        """Return one message, `draft` being its first text.

        Raises `EOFError` on Ctrl-D and `LineInterruptedError` on Ctrl-C.
        """
        return self._session.prompt(default=draft)

    @contextlib.contextmanager
    def muted(self) -> Iterator[None]:
        """Keep typed characters out of an answer; the next message starts with them."""
        terminal = sys.stdin.fileno()
        before = termios.tcgetattr(terminal)
        muted = termios.tcgetattr(terminal)
        muted[3] &= ~termios.ECHO
        termios.tcsetattr(terminal, termios.TCSANOW, muted)
        try:
            yield
        finally:
            termios.tcsetattr(terminal, termios.TCSANOW, before)


def _key_bindings() -> KeyBindings:
    bindings = KeyBindings()

    @bindings.add("enter")
    def send_or_continue(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if not is_unfinished(buffer.text):
            buffer.validate_and_handle()
            return
        if buffer.document.is_cursor_at_the_end and buffer.text.endswith("\\"):
            buffer.delete_before_cursor(1)
        buffer.insert_text("\n")

    # A terminal that was not raw yet when the key was pressed hands on c-j.
    @bindings.add("escape", "c-j")
    @bindings.add("escape", "enter")
    def new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @bindings.add("c-c")
    @bindings.add("<sigint>")
    def interrupt(event: KeyPressEvent) -> None:
        event.app.exit(exception=LineInterruptedError(event.current_buffer.text))

    return bindings
