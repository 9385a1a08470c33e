"""From the items of a Responses input to the messages that chat templates take."""

from __future__ import annotations

import base64
import binascii
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from vllm_mlx.engine.errors import InvalidRequestError
from vllm_mlx.server.responses_api.custom_text import custom_arguments
from vllm_mlx.server.responses_api.schemas import IMAGE, InputItem, InputPart
from vllm_mlx.server.responses_api.tools import shown_name

Message = dict[str, Any]

#: What reasoning that was sealed here begins with.
_SEAL = "vllm-mlx-1."

#: What the model is told of an image that a tool has returned.
_UNSEEN = {"type": "input_text", "text": "[an image, which cannot be shown here]"}

#: The fields without which an item of a kind says nothing.
_NEEDED = {
    "message": ("role", "content"),
    "reasoning": (),
    "function_call": ("call_id", "name", "arguments"),
    "custom_tool_call": ("call_id", "name", "input"),
    "function_call_output": ("call_id", "output"),
    "custom_tool_call_output": ("call_id", "output"),
    "item_reference": ("id",),
}

#: What the ids of items begin with.
_ID_PREFIX = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
}


def new_item_id(kind: str) -> str:
    """Make an id that no other item has."""
    return f"{_ID_PREFIX[kind]}_{uuid.uuid4().hex}"


def sealed(reasoning: str) -> str:
    """Return reasoning as an opaque text, for clients that keep nothing else of it.

    It is not encrypted: whoever has it was told the reasoning, too.
    """
    return _SEAL + base64.urlsafe_b64encode(reasoning.encode()).decode("ascii")


def input_items(
    given: str | Sequence[InputItem] | None, resolve: Callable[[str], dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return an input as the items that are stored: each with its type and an id, none a reference.

    `resolve` returns the item that a reference means. Raises `InvalidRequestError` for an item
    without what its kind needs.
    """
    if isinstance(given, str):
        given = [InputItem(type="message", role="user", content=given)]
    return [_stored(f"input[{index}]", item, resolve) for index, item in enumerate(given or ())]


def is_reference(item: InputItem) -> bool:
    """Say whether an item stands for one of a stored response."""
    return item.type == "item_reference" or (item.type is None and item.role is None)


def has_unseen(given: str | Sequence[InputItem] | None) -> bool:
    """Say whether tools have returned images, of which the model is only told."""
    return any(
        part.type == IMAGE
        for item in (given if isinstance(given, list) else ())
        for part in (item.output if isinstance(item.output, list) else ())
    )


def chat_messages(items: Sequence[dict[str, Any]]) -> list[Message]:
    """Return stored items as messages: what the assistant did between two others is one.

    Raises `InvalidRequestError` for what no client could have sent.
    """
    messages: list[Message] = []
    for fields in items:
        item = InputItem.model_validate(fields)
        if item.type in ("function_call_output", "custom_tool_call_output"):
            text = _text(item.output or "")
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": text})
        elif item.type == "message" and item.role != "assistant":
            role = "system" if item.role == "developer" else item.role
            messages.append({"role": role, "content": _text(item.content or "")})
        else:
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            _add_to_turn(messages[-1], item)
    return messages


def _stored(
    where: str, item: InputItem, resolve: Callable[[str], dict[str, Any]]
) -> dict[str, Any]:
    kind = "item_reference" if is_reference(item) else item.type or "message"
    for name in _NEEDED[kind]:
        if getattr(item, name) is None:
            raise InvalidRequestError(
                f"{where}: an item of type {kind} needs {name}", param=f"{where}.{name}"
            )
    if kind == "item_reference":
        return resolve(item.id or "")
    fields = item.model_dump(exclude_none=True)
    fields |= {"type": kind, "id": item.id or new_item_id(kind)}
    if kind == "message":
        fields.setdefault("status", "completed")
        if isinstance(item.content, str):
            part = "output_text" if item.role == "assistant" else "input_text"
            fields["content"] = [{"type": part, "text": item.content}]
    for name in ("content", "summary", "output"):
        parts = getattr(item, name)
        if isinstance(parts, list):
            _check_parts(f"{where}.{name}", parts)
            fields[name] = [_UNSEEN if p["type"] == IMAGE else p for p in fields[name]]
    return fields


def _check_parts(where: str, parts: Sequence[InputPart]) -> None:
    for index, part in enumerate(parts):
        if part.type == IMAGE:
            continue
        name = "refusal" if part.type == "refusal" else "text"
        if getattr(part, name) is None:
            raise InvalidRequestError(
                f"{where}[{index}]: a part of type {part.type} needs {name}",
                param=f"{where}[{index}].{name}",
            )


def _text(content: str | Sequence[InputPart], separator: str = "\n") -> str:
    if isinstance(content, str):
        return content
    return separator.join(part.text or part.refusal or "" for part in content)


def _add_to_turn(turn: Message, item: InputItem) -> None:
    """Add a message, reasoning or a call of the assistant's to its turn."""
    if item.type == "message":
        # The text of an answer is one, as the model wrote it.
        turn["content"] += _text(item.content or "", "")
    elif item.type == "reasoning":
        reasoning = _reasoning(item)
        if reasoning:
            earlier = turn.get("reasoning_content")
            turn["reasoning_content"] = "\n".join(filter(None, (earlier, reasoning)))
    else:
        turn["tool_calls"] = [*turn.get("tool_calls", ()), _call(item)]


def _reasoning(item: InputItem) -> str:
    """Return what was thought: itself, or sealed, or else what a client kept as its summary."""
    text = _text(item.content or "") or _opened(item.encrypted_content or "")
    return text or _text(item.summary or "")


def _opened(text: str) -> str:
    """Return what was sealed here; nothing of what another server has encrypted."""
    if not text.startswith(_SEAL):
        return ""
    try:
        return base64.urlsafe_b64decode(text.removeprefix(_SEAL)).decode()
    except (binascii.Error, ValueError):
        return ""


def _call(item: InputItem) -> dict[str, Any]:
    name = shown_name(item.name or "", item.namespace)
    arguments: Any = item.arguments
    if item.type == "custom_tool_call":
        arguments = custom_arguments(item.input or "")
    else:
        arguments = _parsed(item.arguments or "")
    function = {"name": name, "arguments": arguments}
    return {"id": item.call_id, "type": "function", "function": function}


def _parsed(arguments: str) -> dict[str, Any] | str:
    """Parse a call's arguments: templates print objects; text that is no object stays text."""
    try:
        parsed = msgspec.json.decode(arguments or "{}")
    except (msgspec.MsgspecError, RecursionError):
        return arguments
    return parsed if isinstance(parsed, dict) else arguments
