"""The endpoints that can be measured: how each is asked and where its parts are defined."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from vllm_mlx.bench.answer import Answer

Message = Mapping[str, Any]

ENDPOINT_NAMES = ("chat", "completions", "messages", "responses")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ask:
    """Say what one request asks for, in no endpoint's shape."""

    model: str
    messages: Sequence[Message]
    max_tokens: int
    is_streamed: bool = True
    #: None leaves it to the server.
    temperature: float | None = None
    tools: Sequence[Mapping[str, Any]] = ()
    #: Generate exactly `max_tokens`, by `ignore_eos` and `min_tokens`.
    is_held: bool = False
    #: Merged into the body last; wins over everything else.
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)


class Endpoint(Protocol):
    """Write the requests of one API, and read its answers into an `Answer`."""

    name: str
    #: Below the server's root.
    path: str

    def body(self, ask: Ask) -> dict[str, Any]:
        """Return the JSON body of a request."""
        ...

    def headers(self, api_key: str | None) -> dict[str, str]:
        """Return the headers that this API wants besides the usual ones."""
        ...

    def read_event(self, answer: Answer, name: str, data: bytes) -> bool:
        """Read one event into `answer`; return whether it carried generated output.

        Raises `ValueError` for what is not an event of this API.
        """
        ...

    def read_whole(self, answer: Answer, body: bytes) -> None:
        """Read the body of an answer that is not streamed; raises `ValueError` as above."""
        ...


def endpoint_named(name: str) -> Endpoint:
    """Return the endpoint `name`, one of `ENDPOINT_NAMES`."""
    from vllm_mlx.bench.endpoint_messages import MessagesEndpoint
    from vllm_mlx.bench.endpoint_responses import ResponsesEndpoint
    from vllm_mlx.bench.endpoints_openai import ChatEndpoint, CompletionsEndpoint

    every: tuple[Endpoint, ...] = (
        ChatEndpoint(),
        CompletionsEndpoint(),
        MessagesEndpoint(),
        ResponsesEndpoint(),
    )
    return next(endpoint for endpoint in every if endpoint.name == name)


def message_text(message: Message) -> str:
    """Return the text of a message, its parts joined."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence):
        return "\n".join(str(part.get("text") or "") for part in content)
    return ""


def common_fields(ask: Ask) -> dict[str, Any]:
    """Return the fields that every API spells alike."""
    fields: dict[str, Any] = {"model": ask.model, "stream": ask.is_streamed}
    if ask.temperature is not None:
        fields["temperature"] = ask.temperature
    if ask.is_held:
        fields |= {"ignore_eos": True, "min_tokens": ask.max_tokens}
    return fields
