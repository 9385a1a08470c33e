"""Hold the conversation, its files and its numbers."""

from __future__ import annotations

import json
import os
import stat
from datetime import datetime
from pathlib import Path

import pytest

from vllm_mlx.cli.chat_backends import AnswerDelta, Usage
from vllm_mlx.cli.chat_commands import COMMANDS, ChatState, run_command
from vllm_mlx.cli.chat_session import AnswerRecord, Conversation, Message, SessionStats
from vllm_mlx.engine.errors import UsageError


@pytest.fixture
def state() -> ChatState:
    """Give a chat of one turn with a system message."""
    conversation = Conversation("Be brief.")
    conversation.ask("Hi\nthere ☂")
    conversation.answered("Hello.")
    return ChatState(conversation, "some/model", now=lambda: datetime(2026, 1, 2, 3, 4, 5))


def test_a_conversation_starts_with_its_system_message(state: ChatState) -> None:
    """Messages are in order, the system message first, and clearing keeps only that."""
    assert state.conversation.messages == (
        Message("system", "Be brief."),
        Message("user", "Hi\nthere ☂"),
        Message("assistant", "Hello."),
    )
    assert run_command("/clear", state).startswith("Conversation cleared")
    assert state.conversation.messages == (Message("system", "Be brief."),)


def test_only_an_unanswered_question_is_withdrawn(state: ChatState) -> None:
    """An answered question stays."""
    assert state.conversation.withdraw() == ""
    state.conversation.ask("More?")
    assert state.conversation.withdraw() == "More?"
    assert len(state.conversation) == 2


def test_system_is_shown_set_and_removed(state: ChatState) -> None:
    """`/system` without a text shows it, with one sets it, and `off` removes it."""
    assert run_command("/system", state) == "System message: Be brief."
    run_command("/system  Be  kind. ", state)
    assert state.conversation.system == "Be  kind."
    run_command("/system off", state)
    assert state.conversation.system is None
    assert run_command("/system", state) == "No system message."


def test_a_saved_conversation_loads_again(state: ChatState, tmp_path: Path) -> None:
    """What was saved is loaded whole, over whatever there was."""
    path = tmp_path / "a chat.json"
    assert run_command(f"/save '{path}'", state) == f"Saved 2 messages to {path}."
    other = ChatState(Conversation(), "other")
    other.conversation.ask("Forgotten?")
    assert run_command(f"/load {path}", other) == f"Loaded 2 messages from {path}."
    assert other.conversation.messages == state.conversation.messages
    assert json.loads(path.read_text())["model"] == "some/model"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == ["a chat.json"]


def test_saving_again_needs_no_name(
    state: ChatState, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a name the time makes one, and later saves go to the same file."""
    monkeypatch.chdir(tmp_path)
    assert run_command("/save", state) == "Saved 2 messages to chat-20260102-030405.json."
    state.conversation.ask("More?")
    state.conversation.answered("No.")
    assert run_command("/save", state) == "Saved 4 messages to chat-20260102-030405.json."
    assert os.listdir(tmp_path) == ["chat-20260102-030405.json"]


def test_a_question_without_an_answer_comes_back_as_a_draft(
    state: ChatState, tmp_path: Path
) -> None:
    """A file that ends with a question puts it into the next prompt."""
    path = tmp_path / "chat.json"
    path.write_text('{"messages": [{"role": "user", "content": "And?"}], "more": 1}')
    assert run_command(f"/load {path}", state) == f"Loaded 0 messages from {path}."
    assert (state.draft, state.conversation.messages) == ("And?", ())


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "cannot read"),
        (b"", "is not a saved conversation"),
        (b"not json", "is not a saved conversation"),
        (b"\xff\xfe", "is not a saved conversation"),
        (b"[]", "is not a saved conversation"),
        (b'{"messages": [{"role": "tool", "content": "x"}]}', "is not a saved conversation"),
        (b'{"messages": [{"role": "user", "content": 1}]}', "is not a saved conversation"),
        (b'{"messages": [], "version": 2}', "newer version"),
        (
            b'{"messages": [{"role": "user", "content": "x"}, {"role": "system", "content": "y"}]}',
            "not the first message",
        ),
    ],
)
def test_a_bad_file_changes_nothing(
    state: ChatState, tmp_path: Path, content: bytes | None, expected: str
) -> None:
    """A file that cannot be used is refused with its name, and nothing is lost."""
    path = tmp_path / "bad.json"
    if content is not None:
        path.write_bytes(content)
    before = state.conversation.messages
    with pytest.raises(UsageError, match=expected) as caught:
        run_command(f"/load {path}", state)
    assert str(path) in caught.value.message
    assert state.conversation.messages == before
    assert state.draft == ""


def test_a_file_of_another_kind_is_not_overwritten(state: ChatState, tmp_path: Path) -> None:
    """`/save` replaces a saved conversation only."""
    path = tmp_path / "notes.txt"
    path.write_text("precious")
    with pytest.raises(UsageError, match="not overwritten"):
        run_command(f"/save {path}", state)
    assert path.read_text() == "precious"


def test_a_folder_that_is_not_there_is_said(state: ChatState, tmp_path: Path) -> None:
    """A save that fails names the file and leaves nothing behind."""
    with pytest.raises(UsageError, match=r"cannot write .*No such file"):
        run_command(f"/save {tmp_path}/nowhere/chat.json", state)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("line", ["/nope", "/", "/clear now", "/stats all", "/load", "/exit 3"])
def test_wrong_commands_are_refused(state: ChatState, line: str) -> None:
    """An unknown command, a superfluous argument or a missing one is an error."""
    with pytest.raises(UsageError):
        run_command(line, state)
    assert len(state.conversation) == 2
    assert not state.is_over


def test_help_lists_every_command(state: ChatState) -> None:
    """`/help` names all commands, and `/quit` leaves as `/exit` does."""
    shown = run_command("/help", state)
    assert [name for name in COMMANDS if name not in shown] == []
    assert run_command("/quit", state) == ""
    assert state.is_over


def record_of(*, tokens: int, ttft_s: float, total_s: float) -> AnswerRecord:
    """Return the record of one answer with the given numbers."""
    record = AnswerRecord(started_at=100.0)
    record.add(AnswerDelta(text="a"), 100.0 + ttft_s)
    usage = Usage(prompt_tokens=30, completion_tokens=tokens, cached_tokens=10)
    record.add(AnswerDelta(finish_reason="stop", usage=usage), 100.0 + total_s)
    return record


def test_an_answer_is_measured() -> None:
    """The rate counts the tokens after the first, over the time after the first."""
    record = record_of(tokens=11, ttft_s=0.5, total_s=2.5)
    assert record.timings() == {"ttft_s": 0.5, "total_s": 2.5, "tokens_per_s": 5.0}


def test_stats_add_up() -> None:
    """`/stats` shows the last answer and the sum of all."""
    stats = SessionStats()
    assert list(stats.lines()) == ["No answer yet."]
    stats.answers.append(record_of(tokens=11, ttft_s=0.5, total_s=2.5))
    stats.answers.append(record_of(tokens=31, ttft_s=1.5, total_s=3.5))
    assert list(stats.lines()) == [
        "Last answer: 30 prompt tokens (10 cached), 31 generated, first token after 1.50 s, "
        "15.0 tok/s",
        "Session: 2 answers, 60 prompt tokens (20 cached), 42 generated, "
        "first token after 1.00 s (mean), 10.0 tok/s",
    ]


def test_what_is_not_known_is_not_made_up() -> None:
    """Without token counts there is no rate."""
    record = AnswerRecord(started_at=0.0)
    record.add(AnswerDelta(text="a"), 1.0)
    assert record.timings() == {"ttft_s": 1.0, "total_s": 1.0, "tokens_per_s": None}
    assert next(SessionStats([record]).lines()) == (
        "Last answer: tokens not reported, first token after 1.00 s"
    )
