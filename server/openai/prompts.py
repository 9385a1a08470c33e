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
    ChatCompletionBody,
    ChatMessage,
    ContentPart,
    TokenizeBody,
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

#: What `chat_template_kwargs` may not hold, because it has its own place in the request.
_FIELDS_OF_THEIR_OWN = frozenset(
    {"messages", "tools", "add_generation_prompt", "continue_final_message"}
)

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

    `developer` becomes `system`, text parts are joined by line breaks, tool arguments are parsed.
    Raises `InvalidRequestError` for a message without content.
    """
    return [_template_message(index, message) for index, message in enumerate(messages)]


def template_options(body: ChatCompletionBody | TokenizeBody) -> dict[str, Any]:
    """Return the keyword arguments for the template that a request asks for.

    The more special fields stand over `chat_template_kwargs`.
    """
    options = dict(body.chat_template_kwargs or {})
    if own := _FIELDS_OF_THEIR_OWN.intersection(options):
        raise InvalidRequestError(
            f"{min(own)} is a field of the request itself, not of chat_template_kwargs",
            param="chat_template_kwargs",
        )
    if isinstance(body, ChatCompletionBody):
        if body.enable_thinking is not None:
            options["enable_thinking"] = body.enable_thinking
        if body.reasoning_effort is not None:
            options["reasoning_effort"] = body.reasoning_effort
    options["add_generation_prompt"] = body.add_generation_prompt is not False
    if body.continue_final_message:
        if body.add_generation_prompt:
            raise InvalidRequestError(
                "continue_final_message and add_generation_prompt exclude each other",
                param="continue_final_message",
            )
        options["add_generation_prompt"] = False
        options["continue_final_message"] = True
    return options


def _template_message(index: int, message: ChatMessage) -> dict[str, Any]:
    rendered: dict[str, Any] = {"role": _role(message), "content": _content(index, message)}
    for name in ("name", "tool_call_id"):
        if (value := getattr(message, name)) is not None:
            rendered[name] = value
    reasoning = message.reasoning_content or message.reasoning
    if reasoning is not None:
        rendered["reasoning_content"] = reasoning
    if message.tool_calls:
        rendered["tool_calls"] = [
            {
                "id": call.id,
                "type": call.type,
                "function": {
                    "name": call.function.name,
                    "arguments": _arguments(call.function.arguments),
                },
            }
            for call in message.tool_calls
        ]
    return rendered


def _role(message: ChatMessage) -> str:
    """`developer` is OpenAI's newer name of `system`; templates know the older."""
    return "system" if message.role == "developer" else message.role


def _content(index: int, message: ChatMessage) -> str:
    place = f"messages[{index}].content"
    if isinstance(message.content, str):
        return message.content
    if message.content is not None:
        return "\n".join(
            _part_text(f"{place}[{number}]", part) for number, part in enumerate(message.content)
        )
    if message.role == "assistant" and (message.tool_calls or message.refusal is not None):
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
