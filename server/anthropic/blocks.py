"""From a parser's events to content blocks: as stream events, and as the whole content."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable
from typing import Any

from pydantic_core import from_json

from vllm_mlx.engine.parsing import (
    ContentDelta,
    Event,
    ReasoningDelta,
    ToolArgumentsDelta,
    ToolCallEnd,
    ToolCallStart,
)

Payload = dict[str, Any]


class BlockWriter:
    """Write the content blocks of one answer, one after the other.

    With `shows_thinking` false the blocks of thinking are there, and signed, but empty.
    """

    def __init__(self, *, shows_thinking: bool = True) -> None:
        self._shows_thinking = shows_thinking
        self._index = -1
        #: The kind of the open block.
        self._open: str | None = None
        self._digest = hashlib.sha256()

    def write(self, events: Iterable[Event]) -> list[Payload]:
        """Return the stream events that say what the parser's events say."""
        payloads: list[Payload] = []
        for event in events:
            payloads += self._write(event)
        return payloads

    def finish(self) -> list[Payload]:
        """Close what is open: the answer has ended."""
        return self._close()

    def _write(self, event: Event) -> list[Payload]:
        if isinstance(event, ContentDelta):
            opening = self._begin("text", text="")
            return [*opening, self._delta(type="text_delta", text=event.text)]
        if isinstance(event, ReasoningDelta):
            opening = self._begin("thinking", thinking="", signature="")
            self._digest.update(event.text.encode())
            if not self._shows_thinking:
                return opening
            return [*opening, self._delta(type="thinking_delta", thinking=event.text)]
        if isinstance(event, ToolCallStart):
            return [
                *self._close(),
                *self._begin("tool_use", id=event.id, name=event.name, input={}),
            ]
        if isinstance(event, ToolArgumentsDelta):
            return [self._delta(type="input_json_delta", partial_json=event.text)]
        assert isinstance(event, ToolCallEnd)
        return self._close()

    def _begin(self, kind: str, **fields: Any) -> list[Payload]:
        """Open a block, unless one of this kind is open, which then goes on."""
        if self._open == kind:
            return []
        closing = self._close()
        self._open = kind
        self._index += 1
        block = {"type": kind, **fields}
        start = {"type": "content_block_start", "index": self._index, "content_block": block}
        return [*closing, start]

    def _close(self) -> list[Payload]:
        if self._open is None:
            return []
        signing = []
        if self._open == "thinking":
            # Nobody checks it; clients ask for one that is not empty, and send it back.
            signature = base64.b64encode(self._digest.digest()).decode("ascii")
            signing = [self._delta(type="signature_delta", signature=signature)]
        self._open = None
        return [*signing, {"type": "content_block_stop", "index": self._index}]

    def _delta(self, **delta: str) -> Payload:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}


def whole_content(payloads: Iterable[Payload]) -> list[dict[str, Any]]:
    """Return the content that the stream events of its blocks add up to.

    Arguments that were cut off are read as far as they go, as clients do that read the stream.
    """
    content: list[dict[str, Any]] = []
    texts: list[str] = []
    for payload in payloads:
        if payload["type"] == "content_block_start":
            content.append(dict(payload["content_block"]))
            texts = []
        elif payload["type"] == "content_block_stop":
            _complete(content[-1], "".join(texts))
        elif payload["delta"]["type"] == "signature_delta":
            content[-1]["signature"] = payload["delta"]["signature"]
        else:
            delta = payload["delta"]
            texts.append(delta[_TEXT_OF[delta["type"]]])
    return content


_TEXT_OF = {
    "text_delta": "text",
    "thinking_delta": "thinking",
    "input_json_delta": "partial_json",
}


def _complete(block: dict[str, Any], text: str) -> None:
    if block["type"] != "tool_use":
        block[block["type"]] = text
        return
    try:
        arguments = from_json(text, allow_partial=True) if text.strip() else {}
    except ValueError:
        # The model broke the format: what it wrote is no JSON, and a call needs an object.
        arguments = {}
    block["input"] = arguments if isinstance(arguments, dict) else {}
