"""Hold the terminal chat with a reader and a backend that follow a script."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path

import pytest

from vllm_mlx.cli.chat_backends import AnswerDelta, ChatSampling, Usage
from vllm_mlx.cli.chat_commands import ChatState
from vllm_mlx.cli.chat_prompt import (
    LineInterruptedError,
    is_unfinished,
    open_history,
    unfenced,
)
from vllm_mlx.cli.chat_session import Conversation, Message
from vllm_mlx.cli.chat_terminal import ChatTerminal
from vllm_mlx.engine.errors import OverloadedError

ScriptedAnswer = list[AnswerDelta | BaseException]


class ScriptedBackend:
    """Give prepared answers; an exception in one is raised there."""

    model_name = "scripted"

    def __init__(self, answers: list[ScriptedAnswer]) -> None:
        self._answers = answers
        self.asked: list[tuple[Message, ...]] = []
        self.num_closed = 0

    def answer(
        self, messages: Sequence[Message], sampling: ChatSampling
    ) -> Generator[AnswerDelta, None, None]:
        """Yield the next prepared answer."""
        self.asked.append(tuple(messages))
        try:
            for part in self._answers.pop(0):
                if isinstance(part, BaseException):
                    raise part
                yield part
        finally:
            self.num_closed += 1

    def close(self) -> None:
        """Hold nothing."""


class ScriptedReader:
    """Type prepared lines; an exception among them is raised, and the end is Ctrl-D."""

    def __init__(self, lines: list[str | BaseException]) -> None:
        self._lines = lines
        self.drafts: list[str] = []

    def read(self, draft: str = "") -> str:
        """Return the next line."""
        self.drafts.append(draft)
        if not self._lines:
            raise EOFError
        line = self._lines.pop(0)
        if isinstance(line, BaseException):
            raise line
        return line

    @contextlib.contextmanager
    def muted(self) -> Iterator[None]:
        """Have no terminal to mute."""
        yield


class Chat:
    """Run one scripted chat and keep what it showed."""

    def __init__(self, lines: list[str | BaseException], answers: list[ScriptedAnswer]) -> None:
        self.backend = ScriptedBackend(answers)
        self.reader = ScriptedReader(lines)
        self.state = ChatState(Conversation(), "scripted")
        self.notes: list[str] = []
        out = io.StringIO()
        ChatTerminal(
            self.backend,
            self.state,
            ChatSampling(),
            reader=self.reader,
            out=out,
            note=self.notes.append,
            clock=iter(range(1000)).__next__,
        ).run()
        self.shown = out.getvalue()

    @property
    def said(self) -> list[str]:
        """Return the contents of the conversation."""
        return [message.content for message in self.state.conversation.messages]


def answer(*words: str, reason: str = "stop") -> ScriptedAnswer:
    """Return a whole answer."""
    usage = Usage(prompt_tokens=1, completion_tokens=len(words))
    last = AnswerDelta(finish_reason=reason, usage=usage)
    return [*(AnswerDelta(text=word) for word in words), last]


def test_a_conversation_grows_turn_by_turn() -> None:
    """Each question is asked with all that was said before it."""
    chat = Chat(["Hi", "", "  ", "More"], [answer("He", "llo"), answer("No")])
    assert chat.shown == "Hello\nNo\n"
    assert [len(asked) for asked in chat.backend.asked] == [1, 3]
    assert chat.said == ["Hi", "Hello", "More", "No"]
    assert len(chat.state.stats.answers) == 2
    assert chat.notes == []


def test_ctrl_c_ends_the_answer_and_keeps_what_was_shown() -> None:
    """An answer cut short stays in the conversation, and the chat goes on."""
    cut: ScriptedAnswer = [AnswerDelta(text="One, two"), KeyboardInterrupt()]
    chat = Chat(["Count", "Go on"], [cut, answer("three")])
    assert chat.shown == "One, two\nthree\n"
    assert chat.notes == ["(stopped)"]
    assert chat.said == ["Count", "One, two", "Go on", "three"]
    assert chat.backend.num_closed == 2


def test_ctrl_c_before_the_first_word_takes_the_question_back() -> None:
    """A question without any answer is not part of the conversation."""
    chat = Chat(["Oops", "Hi"], [[KeyboardInterrupt()], answer("Hello")])
    assert chat.said == ["Hi", "Hello"]
    assert chat.reader.drafts == ["", "", ""]


def test_an_error_keeps_the_chat_and_offers_the_question_again() -> None:
    """A failed question comes back as a draft; the conversation is as before."""
    failed: ScriptedAnswer = [OverloadedError("the queue is full")]
    chat = Chat(["Hi", "Again"], [failed, answer("Hello")])
    assert chat.notes == ["Error: the queue is full"]
    assert chat.reader.drafts == ["", "Hi", ""]
    assert chat.said == ["Again", "Hello"]


def test_an_answer_at_its_limit_says_so() -> None:
    """A cut at the token limit is not taken for the end of the answer."""
    chat = Chat(["Hi"], [answer("Hel", reason="length")])
    assert chat.notes == ["(cut off at 4096 tokens or the context's end)"]


def test_control_characters_never_reach_the_terminal() -> None:
    """A model cannot drive the terminal; the conversation keeps what it said."""
    chat = Chat(["Hi"], [answer("a\x1b[2Jb\tc\nd\x07\x9b")])
    assert chat.shown == "a[2Jb\tc\nd\n"
    assert chat.said[1] == "a\x1b[2Jb\tc\nd\x07\x9b"


def test_commands_are_run_and_not_asked() -> None:
    """Commands and their errors are shown; a space before the slash sends the text."""
    chat = Chat(["/system Be kind.", "/nope", " /etc is what?"], [answer("A folder.")])
    assert chat.notes[0] == "System message set."
    assert chat.notes[1].startswith("Error: no command /nope")
    assert chat.said == ["Be kind.", "/etc is what?", "A folder."]


@pytest.mark.parametrize(
    ("lines", "num_left"),
    [
        (["/exit", "not read"], 1),
        ([LineInterruptedError(""), LineInterruptedError(""), "not read"], 1),
        ([LineInterruptedError("typed"), LineInterruptedError(""), "not read"], 1),
        ([LineInterruptedError(""), LineInterruptedError("typed"), "/stats"], 0),
        ([LineInterruptedError(""), "/stats", LineInterruptedError(""), "/stats"], 0),
    ],
)
def test_leaving(lines: list[str | BaseException], num_left: int) -> None:
    """`/exit`, and Ctrl-C twice in a row, leave; with something typed in between they do not."""
    Chat(lines, [])
    assert len(lines) == num_left


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("one line", False),
        ("a backslash \\", True),
        ('"""', True),
        ('"""one\ntwo', True),
        ('"""one\ntwo"""', False),
        ('  """one"""  ', False),
        ('say """quoted', False),
        ("", False),
    ],
)
def test_when_enter_starts_a_new_line(text: str, expected: bool) -> None:
    """Enter sends, except within a block and after a backslash."""
    assert is_unfinished(text) is expected


def test_a_blocks_quotes_are_not_sent() -> None:
    """Only the quotes around a whole message are removed."""
    assert unfenced('"""\n  one\ntwo\n"""') == "  one\ntwo"
    assert unfenced('say """x"""') == 'say """x"""'


def test_the_history_is_private(tmp_path: Path) -> None:
    """The file of earlier lines is its owner's alone, even if it was not."""
    path = tmp_path / "state" / "history"
    history, warning = open_history(path)
    assert warning is None
    history.append_string("a secret question")
    path.chmod(0o644)
    again, _ = open_history(path)
    assert list(again.load_history_strings()) == ["a secret question"]
    assert (path.parent.stat().st_mode & 0o777, path.stat().st_mode & 0o777) == (0o700, 0o600)


def test_a_history_that_cannot_be_kept_is_said(tmp_path: Path) -> None:
    """Without a place for its history the chat works, and says so."""
    (tmp_path / "file").write_text("")
    history, warning = open_history(tmp_path / "file" / "history")
    assert warning is not None
    assert "lines are not kept" in warning
    history.append_string("x")
