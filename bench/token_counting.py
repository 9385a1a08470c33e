"""Count a prompt's tokens as the server does, without filling its cache with what is measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from vllm_mlx.bench.answer import count, mapping
from vllm_mlx.bench.endpoint_messages import messages_fields
from vllm_mlx.bench.endpoints import Ask
from vllm_mlx.bench.endpoints_openai import completion_prompt
from vllm_mlx.bench.http_connection import ExchangeError
from vllm_mlx.bench.requester import Reply, Requester
from vllm_mlx.bench.timeline import Place, RequestRecorder
from vllm_mlx.engine.errors import UnreachableError

Message = Mapping[str, Any]


class TokenCounter(Protocol):
    """Count the tokens of a request's prompt, template included."""

    #: What the report names.
    source: str
    #: Whether every prompt may be counted; if not, one stands for all of its length.
    is_cheap: bool

    async def count(self, messages: Sequence[Message], beginning: str) -> int:
        """Return the number of tokens; `beginning` is what the first message's text starts with."""
        ...


@dataclasses.dataclass(frozen=True)
class CountedPrompt:
    """Hold a prompt that was thrown away, and what `usage` said of it; None where it is silent."""

    messages: Sequence[Message]
    num_tokens: int | None


async def find_counter(
    requester: Requester,
    model: str,
    throwaway_beginnings: Iterator[str],
    extra: Mapping[str, Any],
    known: CountedPrompt,
) -> TokenCounter:
    """Return the best counter of this server.

    Its `/tokenize`, else its `count_tokens`, else the `usage` of requests that are thrown away.
    One of the former that does not agree with what `usage` said of `known` is passed over: some
    leave out the template.
    """
    counters: tuple[TokenCounter, ...] = (
        TokenizeCounter(requester, model),
        MessagesCounter(requester, model),
    )
    for counter in counters:
        try:
            found = await counter.count(known.messages, "")
        except UnreachableError:
            continue
        if known.num_tokens in (None, found):
            return counter
    return UsageCounter(requester, model, throwaway_beginnings, extra)


class TokenizeCounter:
    """Ask `/tokenize`, in vLLM's shape."""

    source = "tokenize"
    is_cheap = True

    def __init__(self, requester: Requester, model: str) -> None:
        self._requester = requester
        self._model = model

    async def count(self, messages: Sequence[Message], beginning: str) -> int:
        """Return the number of tokens; raises `UnreachableError` when the server cannot tell."""
        del beginning
        body: dict[str, Any] = {"model": self._model}
        if self._requester.endpoint.name == "completions":
            body["prompt"] = completion_prompt(Ask(model="", messages=messages, max_tokens=1))
        else:
            body["messages"] = [dict(message) for message in messages]
        return _counted(await _posted(self._requester, "/tokenize", body), "count")


class MessagesCounter:
    """Ask Anthropic's `count_tokens`."""

    source = "count_tokens"
    is_cheap = True

    def __init__(self, requester: Requester, model: str) -> None:
        self._requester = requester
        self._model = model

    async def count(self, messages: Sequence[Message], beginning: str) -> int:
        """Return the number of tokens; raises `UnreachableError` when the server cannot tell."""
        del beginning
        if self._requester.endpoint.name == "completions":
            raise UnreachableError("count_tokens counts chats, not plain prompts")
        fields = messages_fields(Ask(model="", messages=messages, max_tokens=1))
        body = {"model": self._model, **fields}
        return _counted(
            await _posted(self._requester, "/v1/messages/count_tokens", body), "input_tokens"
        )


class UsageCounter:
    """Send the prompt with another beginning, and read what `usage` says.

    The measured prompt shares no first token with what is sent, so that nothing of it is cached.
    """

    source = "usage"
    is_cheap = False

    def __init__(
        self,
        requester: Requester,
        model: str,
        throwaway_beginnings: Iterator[str],
        extra: Mapping[str, Any],
    ) -> None:
        self._requester = requester
        self._model = model
        self._beginnings = throwaway_beginnings
        self._extra = extra

    async def count(self, messages: Sequence[Message], beginning: str) -> int:
        """Return the number of tokens; raises `UnreachableError` when the server cannot tell."""
        first, *rest = messages
        text = str(first.get("content"))
        assert text.startswith(beginning)
        other = next(self._beginnings) + text[len(beginning) :]
        ask = Ask(
            model=self._model,
            messages=[{**first, "content": other}, *rest],
            max_tokens=1,
            is_streamed=False,
            extra=self._extra,
        )
        recorder = RequestRecorder(
            self._requester.endpoint,
            Place(0, "calibration"),
            scheduled_at=0.0,
            is_streamed=False,
            max_tokens=1,
        )
        record = await self._requester.send(self._requester.encode(ask), recorder)
        if record.answer.prompt_tokens is None:
            why = record.failure.message if record.failure is not None else "it reports no usage"
            raise UnreachableError(
                "the server has neither /tokenize nor count_tokens, and calibrating by usage "
                f"failed: {why}; leave out --prompt-tokens"
            )
        return record.answer.prompt_tokens


async def _posted(requester: Requester, path: str, body: Mapping[str, Any]) -> Reply:
    try:
        return await requester.post(path, body)
    except ExchangeError as error:
        raise UnreachableError(f"{path}: {error.message}") from error


def _counted(reply: Reply, field: str) -> int:
    found = mapping(reply.json())
    number = count(found.get(field)) if reply.status == 200 else None
    if not number:
        raise UnreachableError(f"the server does not count tokens there (status {reply.status})")
    return number
