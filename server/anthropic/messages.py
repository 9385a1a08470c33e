"""From the messages of the Messages API to those that chat templates take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm_mlx.engine.errors import InvalidRequestError
from vllm_mlx.server.anthropic.schemas import (
    ContentBlock,
    InputMessage,
    PromptBody,
    ResultBlock,
    SystemBlock,
)
from vllm_mlx.server.anthropic.volatile import without_volatile_lines

#: Blocks that only one of the two roles may hold.
_ROLE_OF = {
    "thinking": "assistant",
    "redacted_thinking": "assistant",
    "tool_use": "assistant",
    "tool_result": "user",
}

#: The fields without which a block of a kind says nothing.
_NEEDED = {
    "text": ("text",),
    "thinking": ("thinking",),
    "redacted_thinking": (),
    "tool_use": ("id", "name", "input"),
    "tool_result": ("tool_use_id",),
}

Message = dict[str, Any]


def chat_messages(body: PromptBody, *, normalize: bool) -> list[Message]:
    """Return a request's system prompt and messages as chat templates expect them.

    Tool results become messages of their own, before the text of their message; system messages
    behind the first turn become part of the user's turn there; turns of one role that follow each
    other become one. With `normalize`, system text goes without its volatile lines. Raises
    `InvalidRequestError` for a block that stands where it cannot.
    """
    system = [_system_text(body.system, normalize)] if body.system is not None else []
    turns: list[Message] = []
    for index, message in enumerate(body.messages):
        if message.role == "system":
            text = _normalized(_joined(_blocks(index, message)), normalize)
            if not text:
                continue
            if turns:
                _add(turns, {"role": "user", "content": _reminder(text)})
            else:
                system.append(text)
        elif message.role == "user":
            for turn in _user_turns(index, message):
                _add(turns, turn)
        else:
            _add(turns, _assistant_turn(index, message))
    head = "\n".join(text for text in system if text)
    return [{"role": "system", "content": head}, *turns] if head else turns


def continues_answer(messages: Sequence[Message]) -> bool:
    """Say whether the answer goes on with the last message.

    Raises `InvalidRequestError` for a call that has no result yet: there is nothing to go on with.
    """
    if not messages or messages[-1]["role"] != "assistant":
        return False
    last = messages[-1]
    if last.get("tool_calls"):
        raise InvalidRequestError(
            "messages: the last message calls a tool; its tool_result must follow",
            param="messages",
        )
    return bool(last["content"])


def _system_text(system: str | list[SystemBlock], normalize: bool) -> str:
    texts = [system] if isinstance(system, str) else [block.text for block in system]
    return "\n".join(text for text in (_normalized(t, normalize) for t in texts) if text)


def _normalized(text: str, normalize: bool) -> str:
    return without_volatile_lines(text) if normalize else text


def _reminder(text: str) -> str:
    """Mark what the system says in the middle of a chat, where templates know two roles only."""
    return f"<system-reminder>\n{text}\n</system-reminder>"


def _blocks(index: int, message: InputMessage) -> list[ContentBlock]:
    """Return a message's blocks, each of a kind that its role may hold and with what it needs."""
    if isinstance(message.content, str):
        return [ContentBlock(type="text", text=message.content)]
    for number, block in enumerate(message.content):
        place = f"messages[{index}].content[{number}]"
        if _ROLE_OF.get(block.type, message.role) != message.role:
            raise InvalidRequestError(
                f"{place}: a {block.type} block cannot stand in a message of role {message.role}",
                param=place,
            )
        for name in _NEEDED[block.type]:
            if getattr(block, name) is None:
                raise InvalidRequestError(
                    f"{place}: a {block.type} block needs {name}", param=f"{place}.{name}"
                )
    return message.content


def _joined(blocks: Sequence[ContentBlock], separator: str = "\n") -> str:
    return separator.join(block.text or "" for block in blocks if block.type == "text")


def _user_turns(index: int, message: InputMessage) -> list[Message]:
    blocks = _blocks(index, message)
    turns: list[Message] = [
        {"role": "tool", "tool_call_id": block.tool_use_id, "content": _result_text(block)}
        for block in blocks
        if block.type == "tool_result"
    ]
    if any(block.type == "text" for block in blocks) or not turns:
        turns.append({"role": "user", "content": _joined(blocks)})
    return turns


def _result_text(block: ContentBlock) -> str:
    content = block.content or ""
    text = content if isinstance(content, str) else "\n".join(map(_part_text, content))
    if block.is_error and not text.lower().startswith(("error", "<tool_use_error>")):
        return f"Error: {text}"
    return text


def _part_text(part: ResultBlock) -> str:
    if part.type == "tool_reference":
        # All tools are shown from the beginning, so that there is nothing to load.
        return f"The tool {part.tool_name} is available."
    return part.text or ""


def _assistant_turn(index: int, message: InputMessage) -> Message:
    """Put an answer together again: its text as one, as the model wrote it."""
    blocks = _blocks(index, message)
    turn: Message = {"role": "assistant", "content": _joined(blocks, "")}
    thinking = [block.thinking for block in blocks if block.type == "thinking" and block.thinking]
    if thinking:
        turn["reasoning_content"] = "\n".join(thinking)
    calls = [
        {
            "id": block.id,
            "type": "function",
            "function": {"name": block.name, "arguments": block.input},
        }
        for block in blocks
        if block.type == "tool_use"
    ]
    if calls:
        turn["tool_calls"] = calls
    return turn


def _add(turns: list[Message], turn: Message) -> None:
    """Append a turn, or make it part of the last one if that is of the same role."""
    last = turns[-1] if turns else None
    if last is None or last["role"] != turn["role"] or turn["role"] == "tool":
        turns.append(turn)
        return
    separator = "\n" if turn["role"] == "user" and last["content"] and turn["content"] else ""
    last["content"] += separator + turn["content"]
    if "reasoning_content" in turn:
        earlier = last.get("reasoning_content")
        last["reasoning_content"] = "\n".join(filter(None, (earlier, turn["reasoning_content"])))
    if "tool_calls" in turn:
        last["tool_calls"] = [*last.get("tool_calls", ()), *turn["tool_calls"]]
