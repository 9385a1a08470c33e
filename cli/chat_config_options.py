"""The options that say how chats become prompts and how answers are read."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import click

from vllm_mlx.cli.options import Decorator, option, stacked


class JsonObject(click.ParamType):  # type: ignore[type-arg]
    """Accept a JSON object."""

    name = "json"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> dict[str, Any]:
        """Convert the text `value`; a value that is an object already passes."""
        if isinstance(value, dict):
            return value
        try:
            decoded = json.loads(value)
        except ValueError as error:
            self.fail(f"{value!r} is not JSON: {error}", param, ctx)
        if not isinstance(decoded, dict):
            self.fail(f"{value!r} is not a JSON object", param, ctx)
        return decoded


#: How chats become prompts, for every command that renders any.
template_options: Decorator[Any] = stacked(
    option(
        "--chat-template",
        type=click.Path(exists=True, dir_okay=False),
        metavar="FILE",
        help="Jinja template in place of the model's own.",
    ),
    option(
        "--default-chat-template-kwargs",
        type=JsonObject(),
        metavar="JSON",
        help="Variables of the chat template where a request does not set them, such as "
        '{"enable_thinking": false}.',
    ),
)

tool_parser_option: Decorator[Any] = option(
    "--tool-call-parser",
    metavar="NAME",
    help="Format in which the model writes calls, or none; default: what its chat template shows.",
)

answer_options: Decorator[Any] = stacked(
    tool_parser_option,
    option(
        "--enable-auto-tool-choice",
        is_flag=True,
        help="Always on; accepted because other servers ask for it.",
    ),
    option(
        "--reasoning-parser",
        metavar="NAME",
        help="Format in which the model reasons, none, or delimiters:OPEN,CLOSE; default: what its "
        "chat template shows.",
    ),
    option(
        "--default-thinking-token-budget",
        type=click.IntRange(min=0),
        metavar="TOKENS",
        help="Most tokens of reasoning when the request does not say; default: no limit.",
    ),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TemplateOptions:
    """Hold the parsed options of `template_options`, by the names of their flags."""

    chat_template: str | None
    default_chat_template_kwargs: dict[str, Any] | None

    def chat_fields(self) -> dict[str, Any]:
        """Return the fields of `ChatConfig` that they become."""
        return {
            "chat_template": self.chat_template,
            "template_kwargs": self.default_chat_template_kwargs or {},
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnswerOptions:
    """Hold the parsed options of `answer_options`, by the names of their flags."""

    tool_call_parser: str | None
    enable_auto_tool_choice: bool
    reasoning_parser: str | None
    default_thinking_token_budget: int | None

    def answer_fields(self) -> dict[str, Any]:
        """Return the fields of `ChatConfig` that they become."""
        return {
            "tool_parser": self.tool_call_parser,
            "reasoning_parser": self.reasoning_parser,
            "thinking_budget": self.default_thinking_token_budget,
        }
