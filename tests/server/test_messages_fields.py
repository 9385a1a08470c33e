"""The field policy of the Messages routes: complete, and held against the real client."""

from __future__ import annotations

from typing import Any, get_type_hints

import anthropic.types as sdk
import pytest
from anthropic.types import message_count_tokens_params, message_create_params

from vllm_mlx.engine.errors import InvalidRequestError
from vllm_mlx.server.anthropic import schemas
from vllm_mlx.server.anthropic.fields import POLICIES
from vllm_mlx.server.anthropic.schemas import (
    CountTokensBody,
    MessagesBody,
    OutputConfig,
    Thinking,
    ToolChoice,
    ToolDefinition,
)
from vllm_mlx.server.openai.fields import unknown_fields
from vllm_mlx.server.openai.schemas import Body
from vllm_mlx.server.openai.validation import validate

SCHEMAS = [
    cls
    for cls in vars(schemas).values()
    if isinstance(cls, type) and issubclass(cls, Body) and cls is not Body
]
USER = {"role": "user", "content": "x"}
MINIMAL = {"max_tokens": 1, "messages": [USER]}
TOOL = {"name": "look_up", "input_schema": {"type": "object"}}


def checked(**fields: Any) -> MessagesBody:
    """Check a body as the route does."""
    return validate(MessagesBody, {**MINIMAL, **fields}, POLICIES)


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda cls: cls.__name__)
def test_every_field_is_classified(schema: type[Body]) -> None:
    """A field cannot be added to a schema without saying what becomes of it."""
    assert set(POLICIES[schema]) == set(schema.model_fields)


@pytest.mark.parametrize(
    ("schema", "params"),
    [
        (MessagesBody, message_create_params.MessageCreateParamsBase),
        (CountTokensBody, message_count_tokens_params.MessageCountTokensParams),
        (ToolDefinition, sdk.ToolParam),
        (ToolChoice, sdk.ToolChoiceToolParam),
        (Thinking, sdk.ThinkingConfigEnabledParam),
        (OutputConfig, sdk.OutputConfigParam),
        (schemas.OutputFormat, sdk.JSONOutputFormatParam),
        (schemas.ContentBlock, sdk.TextBlockParam),
        (schemas.ContentBlock, sdk.ThinkingBlockParam),
        (schemas.ContentBlock, sdk.RedactedThinkingBlockParam),
        (schemas.ContentBlock, sdk.ToolUseBlockParam),
        (schemas.ContentBlock, sdk.ToolResultBlockParam),
        (schemas.SystemBlock, sdk.TextBlockParam),
        (schemas.ResultBlock, sdk.ToolReferenceBlockParam),
        (schemas.Metadata, sdk.MetadataParam),
    ],
)
def test_every_field_of_the_client_is_known(schema: type[Body], params: type) -> None:
    """What the real client can send is enforced, advisory or refused, never unknown."""
    assert set(get_type_hints(params)) - set(schema.model_fields) == set()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"temperature": 3}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"stop_sequences": [""]}, "stop_sequences[0]"),
        ({"stop_sequences": ["x" * 1025]}, "stop_sequences[0]"),
        ({"stop_sequences": ["x"] * 65}, "stop_sequences"),
        ({"system": [{"type": "image", "text": "x"}]}, "system[0].type"),
        ({"tools": [{"name": "x"}]}, "tools[0].input_schema"),
        ({"tools": [{**TOOL, "type": "web_search_20250305"}]}, "tools[0].type"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"container": "c-1"}, "container"),
    ],
)
def test_what_cannot_be_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    """The error's parameter leads to the fault."""
    with pytest.raises(InvalidRequestError) as caught:
        checked(**fields)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("image", "image input is not supported in this build"),
        ("document", "document input is not supported in this build"),
        ("server_tool_use", "server_tool_use input is not supported in this build"),
        ("hologram", "unknown content block type 'hologram'"),
    ],
)
def test_blocks_that_are_not_taken_are_refused_by_name(kind: str, reason: str) -> None:
    """In messages and in the results of tools, whatever else is in the block."""
    block = {"type": kind, "source": {"type": "base64", "data": "eA=="}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [block]}
    for content, place in (
        ([block], "messages[0].content[0].type"),
        ([result], "messages[0].content[0].content[0].type"),
    ):
        with pytest.raises(InvalidRequestError, match=reason) as caught:
            checked(messages=[{"role": "user", "content": content}])
        assert caught.value.param == place


def test_what_agents_send_beyond_is_ignored_and_named() -> None:
    """New fields at any depth break nothing; those without effect are not even named."""
    body = checked(
        context_management={"edits": []},
        betas=["x"],
        cache_control={"type": "ephemeral"},
        metadata={"user_id": "u", "session": "s"},
        tools=[{**TOOL, "defer_loading": True, "new_flag": 1}],
        messages=[
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}, "y": 1}
                ],
            }
        ],
    )
    assert sorted(unknown_fields(body)) == [
        *("betas", "context_management", "messages[].content[].y"),
        *("metadata.session", "tools[].new_flag"),
    ]
