"""The interface behind `chat`: what continues a conversation, here or over HTTP."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Sequence
from typing import Protocol

from vllm_mlx.cli.chat_session import Message


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatSampling:
    """Say how answers are drawn; None leaves a value to the model or the server."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    max_tokens: int = 4096
    stop: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Usage:
    """Count the tokens of one answer; None where the backend does not say."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnswerDelta:
    """Carry what is new of an answer; the last one has a `finish_reason`."""

    text: str = ""
    finish_reason: str | None = None
    #: So far; None where the backend does not say.
    usage: Usage | None = None


class ChatBackend(Protocol):
    """Continue conversations, one at a time.

    Every method is called from one thread, and raises errors of the project's tree only.
    """

    @property
    def model_name(self) -> str:
        """Return the name of the model that answers."""
        ...

    def answer(
        self, messages: Sequence[Message], sampling: ChatSampling
    ) -> Generator[AnswerDelta, None, None]:
        """Yield the answer to `messages` as it is generated.

        Closing the generator, or an exception raised in it such as `KeyboardInterrupt`, aborts
        the answer; the backend can be asked again at once.
        """
        ...

    def close(self) -> None:
        """Free what the backend holds; it cannot be asked again."""
        ...
