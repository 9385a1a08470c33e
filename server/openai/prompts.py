"""Prompts as clients send them, in the form that the tokenizer and its templates take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from vllm_mlx.engine.config import ModelInfo
from vllm_mlx.engine.core.request_check import check_prompt_length
from vllm_mlx.engine.errors import InvalidRequestError
from vllm_mlx.server.openai.schemas import (
    MAX_TOKEN_ID,
    ChatMessage,
    ContentPart,
    FunctionCall,
)

#: What parts with other content than text are called in an error.
_MEDIA_PARTS = {
    "image_url": "image",
    "input_image": "image",
    "image": "image",
    "input_audio": "audio",
    "audio_url": "audio",
    "audio": "audio",
    "video_url": "video",
    "video": "video",
    "file": "file",
    "input_file": "file",
}

#: Text and token prompts; each becomes one choice.
Prompt = str | list[int]


def num_prompts(prompt: Any) -> int:
    """Return how many prompts a completion's `prompt` would be, whether or not they are any."""
    is_list_of_prompts = isinstance(prompt, list) and bool(prompt) and type(prompt[0]) is not int
    return len(prompt) if is_list_of_prompts else 1


def split_prompt(prompt: Any, info: ModelInfo | None = None) -> list[Prompt]:
    """Return the prompts in a completion's `prompt`: a text, tokens, or a list of either.

    Raises `InvalidRequestError` for an empty prompt, an empty list and mixed kinds. Of more tokens
    than the model of `info` takes none is looked at: raises what `check_prompt_length` does.
    """
    if info is not None:
        _check_lengths(prompt, info)
    if isinstance(prompt, str):
        prompts: list[Prompt] = [prompt]
    elif not isinstance(prompt, list) or not prompt:
        raise _wrong_prompt("must be a string, a list of strings, a token list or a list of those")
    elif _is_token_list(prompt):
        prompts = [prompt]
    elif all(isinstance(item, str) for item in prompt) or all(map(_is_token_list, prompt)):
        prompts = prompt
    else:
        raise _wrong_prompt(
            f"must hold strings, token ids (0 to {MAX_TOKEN_ID}) or token lists, all of one kind"
        )
    return prompts


def _check_lengths(prompt: Any, info: ModelInfo) -> None:
    if not isinstance(prompt, list) or not prompt:
        return
    lists = [prompt] if type(prompt[0]) is int else prompt
    for index, tokens in enumerate(lists):
        if isinstance(tokens, list):
            param = "prompt" if len(lists) == 1 else f"prompt[{index}]"
            check_prompt_length(len(tokens), info, param=param)


def chat_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Return the messages as chat templates expect them.

    `developer` becomes `system` and `function` becomes `tool`, text parts are joined by line
    breaks, arguments of calls are parsed.
    Raises `InvalidRequestError` for a message without content.
    """
    return [_template_message(index, message) for index, message in enumerate(messages)]


def _template_message(index: int, message: ChatMessage) -> dict[str, Any]:
    rendered: dict[str, Any] = {
        "role": _ROLES.get(message.role, message.role),
        "content": _content(index, message),
    }
    for name in ("name", "tool_call_id"):
        if (value := getattr(message, name)) is not None:
            rendered[name] = value
    reasoning = message.reasoning_content or message.reasoning
    if reasoning is not None:
        rendered["reasoning_content"] = reasoning
    calls = [_call(call.id, call.function) for call in message.tool_calls or ()]
    if message.function_call is not None:
        calls.append(_call(None, message.function_call))
    if calls:
        rendered["tool_calls"] = calls
    return rendered


#: OpenAI's newer name of one role and its older one of another, as templates know them.
_ROLES = {"developer": "system", "function": "tool"}


def _call(call_id: str | None, function: FunctionCall) -> dict[str, Any]:
    call = {"name": function.name, "arguments": _arguments(function.arguments)}
    return {"id": call_id, "type": "function", "function": call}


def _content(index: int, message: ChatMessage) -> str:
    place = f"messages[{index}].content"
    if isinstance(message.content, str):
        return message.content
    if message.content is not None:
        return "\n".join(
            _part_text(f"{place}[{number}]", part) for number, part in enumerate(message.content)
        )
    others = (message.tool_calls, message.function_call, message.refusal, message.reasoning)
    has_others = any(other is not None for other in (*others, message.reasoning_content))
    if message.role == "assistant" and has_others:
        return message.refusal or ""
    raise InvalidRequestError(f"{place} is missing", param=place)


def _part_text(place: str, part: ContentPart) -> str:
    if part.type in _MEDIA_PARTS:
        raise InvalidRequestError(
            f"{place}: {_MEDIA_PARTS[part.type]} input is not supported in this build",
            param=f"{place}.type",
        )
    text = part.refusal if part.type == "refusal" else part.text
    if part.type not in {"text", "input_text", "output_text", "refusal"}:
        raise InvalidRequestError(
            f"{place}: unknown content part type {part.type!r}", param=f"{place}.type"
        )
    if text is None:
        raise InvalidRequestError(
            f"{place}: a part of type {part.type!r} has no text", param=f"{place}.text"
        )
    return text


def _arguments(arguments: str | dict[str, Any]) -> dict[str, Any] | str:
    """Parse a call's arguments: templates print objects; text that is no object stays text."""
    if isinstance(arguments, dict):
        return arguments
    try:
        parsed = msgspec.json.decode(arguments or "{}")
    except (msgspec.MsgspecError, RecursionError):
        return arguments
    return parsed if isinstance(parsed, dict) else arguments


def _is_token_list(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(type(token) is int and 0 <= token <= MAX_TOKEN_ID for token in value)
    )


def _wrong_prompt(reason: str) -> InvalidRequestError:
    return InvalidRequestError(f"prompt {reason}", param="prompt")
