"""From the body of a chat, to be answered, counted or warmed, to the one form that all share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm_mlx.engine.errors import InvalidRequestError
from vllm_mlx.server.answers.plan import ChatInput
from vllm_mlx.server.answers.tool_choice import AUTO, ToolChoice, check_tools
from vllm_mlx.server.openai.prompts import chat_messages
from vllm_mlx.server.openai.schemas import (
    ChatCompletionBody,
    FunctionDefinition,
    FunctionName,
    NamedToolChoice,
    TokenizeBody,
)
from vllm_mlx.server.structured_output import AnswerSpec

#: What `chat_template_kwargs` may not hold, because it has its own place in the request.
_FIELDS_OF_THEIR_OWN = frozenset(
    {"messages", "tools", "add_generation_prompt", "continue_final_message"}
)


def chat_input(
    body: ChatCompletionBody | TokenizeBody, form: AnswerSpec | None = None
) -> ChatInput:
    """Return what a chat asks for; raise `InvalidRequestError` for what contradicts itself.

    `form` is the form of its answer.
    """
    assert body.messages is not None, "a chat has messages"
    functions: Sequence[FunctionDefinition]
    if isinstance(body, TokenizeBody):
        functions = [tool.function for tool in body.tools or ()]
        choice, budget, is_parallel = AUTO, None, True
        place = "tools"
    else:
        functions, place = _functions(body)
        choice, budget = _choice(body), body.thinking_token_budget
        is_parallel = body.parallel_tool_calls is not False and place == "tools"
    tools = [_tool_object(function) for function in functions]
    check_tools(tools, choice, place=place)
    return ChatInput(
        messages=chat_messages(body.messages),
        tools=tools,
        tool_choice=choice,
        allows_parallel_calls=is_parallel,
        template_options=_template_options(body),
        thinking_budget=budget,
        form=form,
    )


def is_legacy(body: ChatCompletionBody) -> bool:
    """Say whether a chat names its tools in the older way, and so expects the older answer."""
    return body.functions is not None


def _functions(body: ChatCompletionBody) -> tuple[Sequence[FunctionDefinition], str]:
    """Return the functions of a chat and the field that has them."""
    if body.functions is None:
        return [tool.function for tool in body.tools or ()], "tools"
    if body.tools is not None:
        raise InvalidRequestError(
            "functions is the older name of tools; give one of them", param="functions"
        )
    return body.functions, "functions"


def _choice(body: ChatCompletionBody) -> ToolChoice:
    if body.functions is None and isinstance(body.function_call, FunctionName):
        raise InvalidRequestError(
            "function_call names one of functions, and there are none", param="function_call"
        )
    choice = body.tool_choice if body.functions is None else body.function_call
    if isinstance(choice, NamedToolChoice):
        return ToolChoice("required", choice.function.name)
    if isinstance(choice, FunctionName):
        return ToolChoice("required", choice.name)
    return AUTO if choice is None else ToolChoice(choice)


def _tool_object(function: FunctionDefinition) -> dict[str, Any]:
    """Return a tool in the one order of its parts that templates print."""
    described = {
        name: value
        for name in ("name", "description", "parameters", "strict")
        if (value := getattr(function, name)) is not None
    }
    return {"type": "function", "function": described}


def _template_options(body: ChatCompletionBody | TokenizeBody) -> dict[str, Any]:
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
        if body.reasoning_effort is not None:
            options["reasoning_effort"] = body.reasoning_effort
            if body.reasoning_effort == "none":
                # Templates that know no degrees of effort know this.
                options.setdefault("enable_thinking", False)
        if body.enable_thinking is not None:
            options["enable_thinking"] = body.enable_thinking
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
