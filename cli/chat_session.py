"""A conversation and its numbers: what has been said, saving and loading it, tokens and times."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from vllm_mlx.engine.errors import UsageError

if TYPE_CHECKING:
    from vllm_mlx.cli.chat_backends import AnswerDelta, Usage

SAVE_VERSION = 1


class Message(msgspec.Struct, frozen=True):
    """Hold one message of a conversation."""

    role: Literal["system", "user", "assistant"]
    content: str


class SavedChat(msgspec.Struct, frozen=True, kw_only=True):
    """Hold what a saved conversation's file holds; fields that it does not know are ignored."""

    messages: list[Message]
    model: str | None = None
    version: int = SAVE_VERSION


class Conversation:
    """Own the messages of one chat: at most one system message, then turns."""

    def __init__(self, system: str | None = None) -> None:
        self.system = system
        self._turns: list[Message] = []

    def __len__(self) -> int:
        return len(self._turns)

    @property
    def messages(self) -> tuple[Message, ...]:
        """Return everything that has been said, the system message first."""
        head = () if self.system is None else (Message("system", self.system),)
        return (*head, *self._turns)

    def ask(self, text: str) -> None:
        """Append the user's message."""
        self._turns.append(Message("user", text))

    def answered(self, text: str) -> None:
        """Append the model's answer."""
        self._turns.append(Message("assistant", text))

    def withdraw(self) -> str:
        """Take back the user's message that got no answer and return it, empty if none waits."""
        if self._turns and self._turns[-1].role == "user":
            return self._turns.pop().content
        return ""

    def clear(self) -> None:
        """Forget all turns; the system message stays."""
        self._turns.clear()

    def save(self, path: Path, model: str) -> None:
        """Write the conversation to `path` as JSON, whole or not at all, readable by its owner.

        Raises `UsageError` when that fails, or when `path` is a file of another kind, which is
        never overwritten.
        """
        if path.exists():
            try:
                read_chat(path)
            except UsageError as error:
                raise UsageError(f"{error.message}; not overwritten, give another name") from error
        saved = SavedChat(messages=list(self.messages), model=model)
        try:
            write_private(path, msgspec.json.format(msgspec.json.encode(saved), indent=2) + b"\n")
        except OSError as error:
            raise UsageError(f"cannot write {path}: {error.strerror}") from error

    def load(self, path: Path) -> str:
        """Replace the conversation by the saved one; return a last message that has no answer.

        Raises `UsageError` and changes nothing when the file cannot be used.
        """
        messages = read_chat(path).messages
        has_system = bool(messages) and messages[0].role == "system"
        turns = messages[1:] if has_system else messages
        if any(message.role == "system" for message in turns):
            raise UsageError(f"{path} has a system message that is not the first message")
        self.system = messages[0].content if has_system else None
        self._turns = list(turns)
        return self.withdraw()


def read_chat(path: Path) -> SavedChat:
    """Read a saved conversation; raise `UsageError` that says what is wrong with the file."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    try:
        saved = msgspec.json.decode(content, type=SavedChat)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not a saved conversation: {error}") from error
    if saved.version > SAVE_VERSION:
        raise UsageError(
            f"{path} was saved by a newer version (format {saved.version}, "
            f"known is {SAVE_VERSION}); update vllm-mlx"
        )
    return saved


def write_private(path: Path, content: bytes) -> None:
    """Replace `path` by `content` atomically, with mode 0600; a failure leaves nothing behind."""
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


@dataclasses.dataclass
class AnswerRecord:
    """Collect one answer while it streams: its text, why it ended, tokens and times."""

    #: Seconds on a monotonic clock.
    started_at: float
    text: str = ""
    finish_reason: str | None = None
    usage: Usage | None = None
    ttft_s: float | None = None
    total_s: float = 0.0

    def add(self, delta: AnswerDelta, now: float) -> None:
        """Take in `delta`, which arrived at `now`."""
        if delta.text and self.ttft_s is None:
            self.ttft_s = now - self.started_at
        self.text += delta.text
        self.finish_reason = delta.finish_reason or self.finish_reason
        self.usage = delta.usage or self.usage
        self.total_s = now - self.started_at

    @property
    def tokens_per_s(self) -> float | None:
        """Return the rate after the first token; None when it cannot be told."""
        if self.usage is None or self.ttft_s is None or self.usage.completion_tokens < 2:
            return None
        generating_s = self.total_s - self.ttft_s
        return (self.usage.completion_tokens - 1) / generating_s if generating_s > 0 else None

    def timings(self) -> dict[str, float | None]:
        """Return the times as `--json` reports them: seconds, and tokens a second."""
        return {
            "ttft_s": _rounded(self.ttft_s),
            "total_s": _rounded(self.total_s),
            "tokens_per_s": _rounded(self.tokens_per_s),
        }


@dataclasses.dataclass
class SessionStats:
    """Sum up the answers of one run of `chat`."""

    answers: list[AnswerRecord] = dataclasses.field(default_factory=list)

    def lines(self) -> Iterator[str]:
        """Yield what `/stats` shows: the last answer, then the session."""
        if not self.answers:
            yield "No answer yet."
            return
        yield f"Last answer: {_describe(self.answers[-1:])}"
        count = "1 answer" if len(self.answers) == 1 else f"{len(self.answers)} answers"
        yield f"Session: {count}, {_describe(self.answers)}"


def _describe(answers: list[AnswerRecord]) -> str:
    usages = [answer.usage for answer in answers if answer.usage is not None]
    parts = []
    if usages:
        prompt = sum(usage.prompt_tokens for usage in usages)
        cached = sum(usage.cached_tokens or 0 for usage in usages)
        completion = sum(usage.completion_tokens for usage in usages)
        parts.append(f"{prompt} prompt tokens" + (f" ({cached} cached)" if cached else ""))
        parts.append(f"{completion} generated")
    else:
        parts.append("tokens not reported")
    waits = [answer.ttft_s for answer in answers if answer.ttft_s is not None]
    if waits:
        mean = sum(waits) / len(waits)
        parts.append(f"first token after {mean:.2f} s" + (" (mean)" if len(waits) > 1 else ""))
    rate = _mean_rate(answers)
    if rate is not None:
        parts.append(f"{rate:.1f} tok/s")
    return ", ".join(parts)


def _mean_rate(answers: list[AnswerRecord]) -> float | None:
    tokens = seconds = 0.0
    for answer in answers:
        if answer.tokens_per_s is not None and answer.usage is not None and answer.ttft_s:
            tokens += answer.usage.completion_tokens - 1
            seconds += answer.total_s - answer.ttft_s
    return tokens / seconds if seconds > 0 else None


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
