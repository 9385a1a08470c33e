"""From a Messages body to the chat that is asked for, in the shapes that every API shares."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm_mlx.engine.errors import InvalidRequestError
from vllm_mlx.server.answers.plan import ChatInput
from vllm_mlx.server.answers.tool_choice import AUTO, ToolChoice, check_tools
from vllm_mlx.server.anthropic.messages import chat_messages, continues_answer
from vllm_mlx.server.anthropic.schemas import PrefixBody, PromptBody, ToolDefinition
from vllm_mlx.server.structured_output import AnswerSpec, json_spec

#: The template's variable for thinking, and what templates know of effort.
_THINKS = "enable_thinking"
_EFFORTS = {"xhigh": "high", "max": "high"}

#: What `chat_template_kwargs` may not hold, because other fields decide it.
_FIELDS_OF_THEIR_OWN = frozenset(
    {"messages", "tools", "add_generation_prompt", "continue_final_message"}
)


@dataclass(frozen=True)
class ChatSettings:
    """Say how a server makes chats of the bodies that come to it."""

    #: Take volatile lines out of system text.
    normalize: bool = True
    #: The server's own variables of the template.
    template_defaults: Mapping[str, Any] = field(default_factory=dict)


def chat_input(body: PromptBody, settings: ChatSettings) -> ChatInput:
    """Return the chat that a body asks for.

    Only of a `PrefixBody` it may be without a turn. Raises `InvalidRequestError`.
    """
    messages = chat_messages(body, normalize=settings.normalize)
    tools = [_openai_tool(tool) for tool in body.tools or ()]
    choice = _tool_choice(body)
    check_tools(tools, choice)
    options = _template_options(body, settings.template_defaults)
    if continues_answer(messages):
        options |= {"add_generation_prompt": False, "continue_final_message": True}
    elif messages and messages[-1]["role"] == "assistant":
        # It is empty: the answer begins.
        messages.pop()
    has_turn = bool(messages) and messages[-1]["role"] != "system"
    if not has_turn and not isinstance(body, PrefixBody):
        raise InvalidRequestError(
            "messages holds no message of a user or an assistant", param="messages"
        )
    is_single = body.tool_choice is not None and body.tool_choice.disable_parallel_tool_use
    return ChatInput(
        messages=messages,
        tools=tools,
        tool_choice=choice,
        allows_parallel_calls=not is_single,
        template_options=options,
        form=_form(body),
        thinking_budget=body.thinking.budget_tokens if body.thinking is not None else None,
    )


def _openai_tool(tool: ToolDefinition) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    function["parameters"] = tool.input_schema
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def _form(body: PromptBody) -> AnswerSpec | None:
    form = body.output_config.format if body.output_config is not None else None
    if form is None:
        return None
    param = "output_config.format.schema"
    if form.schema is None:
        raise InvalidRequestError(f"{param} is missing", param=param)
    return json_spec(form.schema, param=param)


def _tool_choice(body: PromptBody) -> ToolChoice:
    choice = body.tool_choice
    if choice is None or choice.type == "auto":
        return AUTO
    if choice.type == "none":
        return ToolChoice("none")
    if choice.type == "any":
        return ToolChoice("required")
    if choice.name is None:
        raise InvalidRequestError(
            "tool_choice of type 'tool' needs a name", param="tool_choice.name"
        )
    return ToolChoice("required", choice.name)


def _template_options(body: PromptBody, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the template's variables; those that the body spells out go before the others.

    In this API the model thinks when it is asked to, and not otherwise.
    """
    options: dict[str, Any] = {}
    if body.thinking is not None:
        options[_THINKS] = body.thinking.type != "disabled"
    elif _THINKS not in defaults:
        options[_THINKS] = False
    if body.output_config is not None and body.output_config.effort is not None:
        effort = body.output_config.effort
        options["reasoning_effort"] = _EFFORTS.get(effort, effort)
    given = body.chat_template_kwargs or {}
    if own := _FIELDS_OF_THEIR_OWN.intersection(given):
        raise InvalidRequestError(
            f"{min(own)} cannot be given in chat_template_kwargs", param="chat_template_kwargs"
        )
    return {**options, **given, "add_generation_prompt": True}
