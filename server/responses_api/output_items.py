"""From a parser's events to the output items of a response, and to the events that tell of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vllm_mlx.engine.parsing import (
    ContentDelta,
    Event,
    ReasoningDelta,
    ToolArgumentsDelta,
    ToolCallEnd,
    ToolCallStart,
)
from vllm_mlx.server.responses_api.custom_text import CustomText
from vllm_mlx.server.responses_api.input_items import new_item_id, sealed
from vllm_mlx.server.responses_api.tools import OfferedTools

Payload = dict[str, Any]

#: What an event is called whose item has a part of this kind.
_TEXT_EVENTS = {
    "output_text": "response.output_text",
    "reasoning_text": "response.reasoning_text",
}


class ItemWriter:
    """Write the output items of one answer, one after the other; owns what they hold so far.

    The events have no `sequence_number` yet. What a model thinks is the content of a `reasoning`
    item, under the name that the API has for the thoughts themselves; its `summary`, which would be
    somebody else's account of them, is empty.
    """

    def __init__(self, offered: OfferedTools, *, seals: bool = False) -> None:
        """Begin; with `seals`, reasoning is given once more as a text to be sent back."""
        self._offered = offered
        self._seals = seals
        #: The items that are complete.
        self._done: list[dict[str, Any]] = []
        #: The fields of the open one that do not change, and its text.
        self._open: dict[str, Any] | None = None
        self._texts: list[str] = []
        self._custom = CustomText()

    @property
    def output(self) -> list[dict[str, Any]]:
        """Return the items, the open one as it is by now."""
        if self._open is None:
            return [*self._done]
        return [*self._done, self._item("in_progress")]

    def write(self, events: Iterable[Event]) -> list[Payload]:
        """Return the stream events that say what the parser's events say."""
        payloads: list[Payload] = []
        for event in events:
            payloads += self._write(event)
        return payloads

    def finish(self, *, is_cut: bool) -> list[Payload]:
        """Close what is open: the answer has ended, or was cut off."""
        return self._close("incomplete" if is_cut else "completed")

    def _write(self, event: Event) -> list[Payload]:
        if isinstance(event, ContentDelta):
            opening = self._begin("message", role="assistant")
            return [*opening, self._delta("output_text", event.text)]
        if isinstance(event, ReasoningDelta):
            opening = self._begin("reasoning", summary=[])
            return [*opening, self._delta("reasoning_text", event.text)]
        if isinstance(event, ToolCallStart):
            return [*self._close("completed"), *self._begin_call(event)]
        if isinstance(event, ToolArgumentsDelta):
            return self._add_arguments(event.text)
        assert isinstance(event, ToolCallEnd)
        return self._close("completed" if event.complete else "incomplete")

    def _begin_call(self, event: ToolCallStart) -> list[Payload]:
        tool = self._offered.called(event.name)
        fields: dict[str, Any] = {"call_id": event.id, "name": tool.name}
        if tool.namespace is not None:
            fields["namespace"] = tool.namespace
        return self._begin("custom_tool_call" if tool.is_custom else "function_call", **fields)

    def _begin(self, kind: str, **fields: Any) -> list[Payload]:
        """Open an item, unless a text of this kind is open, which then goes on."""
        if self._open is not None and self._open["type"] == kind:
            return []
        closing = self._close("completed")
        self._open = {"id": new_item_id(kind), "type": kind, **fields}
        self._texts, self._custom = [], CustomText()
        added = self._item("in_progress")
        if "content" in added:
            added["content"] = []
        payloads = [*closing, self._event("response.output_item.added", item=added)]
        if (part := self._part("")) is not None:
            payloads.append(self._part_event("response.content_part.added", part=part))
        return payloads

    def _delta(self, part: str, text: str) -> Payload:
        self._texts.append(text)
        logprobs: dict[str, Any] = {"logprobs": []} if part == "output_text" else {}
        return self._part_event(f"{_TEXT_EVENTS[part]}.delta", delta=text, **logprobs)

    def _add_arguments(self, text: str) -> list[Payload]:
        assert self._open is not None, "arguments belong to a call"
        if self._open["type"] == "custom_tool_call":
            return self._custom_delta(self._custom.feed(text))
        self._texts.append(text)
        return [self._item_event("response.function_call_arguments.delta", delta=text)]

    def _close(self, status: str) -> list[Payload]:
        if self._open is None:
            return []
        item = self._item(status)
        payloads = self._last_words(item)
        payloads.append(self._event("response.output_item.done", item=item))
        self._done.append(item)
        self._open = None
        return payloads

    def _last_words(self, item: dict[str, Any]) -> list[Payload]:
        """Return the events that tell what the open item holds in the end."""
        text = "".join(self._texts)
        if item["type"] == "function_call":
            name = "response.function_call_arguments.done"
            return [self._item_event(name, arguments=text)]
        if item["type"] == "custom_tool_call":
            done = self._item_event("response.custom_tool_call_input.done", input=item["input"])
            return [*self._custom_delta(self._custom.finish()), done]
        part = self._part(text)
        assert part is not None, "messages and reasoning have one"
        logprobs: dict[str, Any] = {"logprobs": []} if part["type"] == "output_text" else {}
        return [
            self._part_event(f"{_TEXT_EVENTS[part['type']]}.done", text=text, **logprobs),
            self._part_event("response.content_part.done", part=part),
        ]

    def _custom_delta(self, text: str) -> list[Payload]:
        """Return the event that tells of more text for a custom tool, if there is any."""
        if not text:
            return []
        return [self._item_event("response.custom_tool_call_input.delta", delta=text)]

    def _item(self, status: str) -> dict[str, Any]:
        """Return the open item as it is by now."""
        assert self._open is not None, "asked of an open item only"
        item = {**self._open, "status": status}
        text = "".join(self._texts)
        if item["type"] == "function_call":
            item["arguments"] = text
        elif item["type"] == "custom_tool_call":
            item["input"] = self._custom.text
        else:
            item["content"] = [self._part(text)]
        if item["type"] == "reasoning" and self._seals and status != "in_progress":
            item["encrypted_content"] = sealed(text)
        return item

    def _part(self, text: str) -> dict[str, Any] | None:
        """Return the one part of the open item; None for a call, which has none."""
        assert self._open is not None, "asked of an open item only"
        if self._open["type"] == "message":
            return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
        if self._open["type"] == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return None

    def _part_event(self, name: str, **fields: Any) -> Payload:
        return self._item_event(name, content_index=0, **fields)

    def _item_event(self, name: str, **fields: Any) -> Payload:
        assert self._open is not None, "asked of an open item only"
        return self._event(name, item_id=self._open["id"], **fields)

    def _event(self, name: str, **fields: Any) -> Payload:
        return {"type": name, "output_index": len(self._done), **fields}
