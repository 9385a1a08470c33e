"""Render chats with a model's template, and make up for what the template cannot say itself."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vllm_mlx.engine.config import ChatConfig
from vllm_mlx.engine.errors import InvalidRequestError
from vllm_mlx.engine.parsing import TOOL_PARSERS
from vllm_mlx.engine.parsing.tool_format import ToolFormat
from vllm_mlx.engine.text.chat_formats import DESCRIBED_FORMAT, ChatFormats, choose_formats
from vllm_mlx.engine.text.role_fitting import role_fittings, with_systems_shown
from vllm_mlx.engine.text.template_facts import TemplateFacts, probe_template
from vllm_mlx.engine.text.tool_description import (
    with_arguments_as_text,
    with_calls_written,
    with_results_written,
    with_tools_described,
)

#: Parameters of `apply_chat_template` that a template may be given through by a request.
_TEMPLATE_PARAMETERS = frozenset({"documents", "continue_final_message", "kwargs"})

Message = Mapping[str, Any]


class ChatRenderer:
    """Own what is known of one chat template; for any thread, once made.

    Every prompt of a chat is made here: requests, counts, warmed prefixes. So whatever is changed
    to fit a template is changed alike in all of them.
    """

    def __init__(self, tokenizer: Any, config: ChatConfig) -> None:
        """Take a transformers tokenizer, and try its template out."""
        self._apply: Callable[..., Any] = tokenizer.apply_chat_template
        self._defaults = dict(config.template_kwargs)
        self._reserved = (
            frozenset(inspect.signature(tokenizer.apply_chat_template).parameters)
            - _TEMPLATE_PARAMETERS
        )
        template = _template_text(tokenizer.chat_template)
        self._facts = probe_template(self._render_plain) if template else TemplateFacts()
        #: What answers to these prompts are read with.
        self.formats: ChatFormats = choose_formats(
            config,
            template,
            tokenizer.get_vocab().keys() if template else (),
            self._facts,
            {
                str(token): token_id
                for token_id, token in tokenizer.added_tokens_decoder.items()
                if token.special
            },
        )

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        options: Mapping[str, Any],
    ) -> str:
        """Render a chat; `options` go before the defaults.

        Raises `InvalidRequestError` for options that would steer the library instead of the
        template, and where the template refuses the chat in every form that `role_fittings` gives
        it: with what it says of the chat as it came.
        """
        refused = sorted(self._reserved.intersection(options) - {"add_generation_prompt"})
        if refused:
            raise InvalidRequestError(
                f"not a variable of a chat template: {', '.join(refused)}",
                param="chat_template_kwargs",
            )
        tools = [_shown_tool(tool) for tool in tools]
        written = self._written(messages, tools)
        shown = {"tools": tools} if self._facts.takes_tools else {}
        options = {**self._defaults, **options, **(shown if tools else {})}
        refusal: Exception | None = None
        for fitted in role_fittings(written):
            try:
                return self._render_plain(fitted, **options)
            except Exception as error:  # noqa: BLE001
                # A template is a program of the model's run on the request's data: it may raise
                # anything, and whatever it raises ends this request only.
                refusal = refusal or error
        raise InvalidRequestError(
            f"the model's chat template refused the messages: {refusal}", param="messages"
        ) from refusal

    def _render_plain(self, messages: Sequence[Message], **options: Any) -> str:
        settings = {"add_generation_prompt": True, "tokenize": False, **options}
        return str(self._apply([dict(message) for message in messages], **settings))

    def _written(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]
    ) -> Sequence[Message]:
        """Return the chat with all that the template would leave out as text."""
        facts, tool_format = self._facts, self._described_format
        has_calls = any(message.get("tool_calls") for message in messages)
        if has_calls:
            messages = [_with_objects(message) for message in messages]
        if has_calls and facts.call_arguments is None:
            messages = with_calls_written(messages, tool_format)
        elif has_calls and facts.call_arguments == "texts":
            messages = with_arguments_as_text(messages)
        if not (facts.takes_results and facts.takes_tools):
            messages = with_results_written(messages)
        if tools and not facts.takes_tools:
            messages = with_tools_described(messages, tools, tool_format)
        return with_systems_shown(
            messages,
            takes_system=facts.takes_system,
            takes_late_system=facts.takes_late_system,
        )

    @property
    def _described_format(self) -> type[ToolFormat]:
        return self.formats.tool_format or TOOL_PARSERS[DESCRIBED_FORMAT]


def _shown_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool as the model is told of it: that it is strict concerns the engine only."""
    function = tool.get("function")
    if not isinstance(function, Mapping):
        return dict(tool)
    shown = {name: value for name, value in function.items() if name != "strict"}
    return {**tool, "function": shown}


def _with_objects(message: Message) -> Message:
    """Return a message whose calls all have objects as arguments, as templates rely on.

    A call that was cut off has text that is no JSON.
    """
    calls = message.get("tool_calls")
    if not calls:
        return message
    return {**message, "tool_calls": [_with_object(call) for call in calls]}


def _with_object(call: Mapping[str, Any]) -> Mapping[str, Any]:
    function = call["function"]
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = {"arguments": arguments}
    if not isinstance(arguments, Mapping):
        arguments = {"arguments": arguments}
    return {**call, "function": {**function, "arguments": dict(arguments)}}


def _template_text(template: Any) -> str:
    """Return a tokenizer's template, or all that it has by name, as one text."""
    if isinstance(template, Mapping):
        return "\n".join(map(str, template.values()))
    return str(template or "")
