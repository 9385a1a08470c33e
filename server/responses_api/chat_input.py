"""From a Responses body to the chat that is asked for, in the shapes that every API shares."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm_mlx.engine.errors import InvalidRequestError
from vllm_mlx.server.answers.plan import ChatInput
from vllm_mlx.server.responses_api.input_items import chat_messages, input_items
from vllm_mlx.server.responses_api.schemas import ResponsesBody
from vllm_mlx.server.responses_api.tools import OfferedTools, offered_tools
from vllm_mlx.server.structured_output import AnswerSpec, json_spec, object_spec

#: What `include` may ask for that no answer here has, and so is without effect.
_NEVER_THERE = frozenset(
    {
        *("file_search_call.results", "web_search_call.results", "web_search_call.action.sources"),
        *("message.input_image.image_url", "computer_call_output.output.image_url"),
        "code_interpreter_call.outputs",
    }
)
#: What it may ask for that is done.
SEALED_REASONING = "reasoning.encrypted_content"

#: What `chat_template_kwargs` may not hold, because other fields decide it.
_FIELDS_OF_THEIR_OWN = frozenset(
    {"messages", "tools", "add_generation_prompt", "continue_final_message"}
)


def chat_input(
    body: ResponsesBody, items: Sequence[dict[str, Any]], offered: OfferedTools
) -> ChatInput:
    """Return the chat that a body asks for; `items` are its input behind what went before.

    Raises `InvalidRequestError`.
    """
    messages = chat_messages(items)
    if body.instructions:
        messages.insert(0, {"role": "system", "content": body.instructions})
    if not messages:
        raise InvalidRequestError("input holds no item", param="input")
    return ChatInput(
        messages=messages,
        tools=offered.tools,
        tool_choice=offered.choice,
        allows_parallel_calls=body.parallel_tool_calls is not False,
        template_options=_template_options(body),
        thinking_budget=body.thinking_token_budget,
        form=_form(body),
    )


def whole_chat(body: ResponsesBody) -> ChatInput:
    """Return the chat of a body that refers to nothing which is stored."""

    def resolve(item_id: str) -> dict[str, Any]:
        raise InvalidRequestError(
            f"the item {item_id[:100]!r} is one that only the server has that made it",
            param="input",
        )

    items = input_items(body.input, resolve)
    return chat_input(body, items, offered_tools(body.tools or (), body.tool_choice))


def is_prompt_only(body: ResponsesBody) -> bool:
    """Say whether a body asks for its prompt to be computed and for no answer."""
    options = body.prompt_cache_options
    return body.generate is False or (options is not None and bool(options.prewarm))


def check_include(include: Sequence[str]) -> None:
    """Raise `InvalidRequestError` for what an answer is to include and cannot."""
    for name in include:
        if name != SEALED_REASONING and name not in _NEVER_THERE:
            raise InvalidRequestError(
                f"include: {name[:64]!r} is not supported in this build", param="include"
            )


def _form(body: ResponsesBody) -> AnswerSpec | None:
    form = body.text.format if body.text is not None else None
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return object_spec(param="text.format")
    param = "text.format.schema"
    if form.schema is None:
        raise InvalidRequestError(f"{param} is missing", param=param)
    return json_spec(form.schema, param=param)


def _template_options(body: ResponsesBody) -> dict[str, Any]:
    """Return the template's variables; the more special fields stand over the others."""
    options = dict(body.chat_template_kwargs or {})
    if own := _FIELDS_OF_THEIR_OWN.intersection(options):
        raise InvalidRequestError(
            f"{min(own)} cannot be given in chat_template_kwargs", param="chat_template_kwargs"
        )
    effort = body.reasoning.effort if body.reasoning is not None else None
    if effort is not None:
        options["reasoning_effort"] = effort
        if effort == "none":
            # Templates that know no degrees of effort know this.
            options.setdefault("enable_thinking", False)
    if body.enable_thinking is not None:
        options["enable_thinking"] = body.enable_thinking
    return {**options, "add_generation_prompt": True}
