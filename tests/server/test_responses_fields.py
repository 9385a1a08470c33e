"""The field policy of the Responses route: complete, and held against the real client."""

from __future__ import annotations

from typing import Any, get_type_hints

import openai.types.responses as sdk
import pytest
from openai.types.responses import response_create_params, response_input_param
from openai.types.shared_params import Reasoning

from vllm_mlx.engine.errors import InvalidRequestError
from vllm_mlx.server.openai.fields import FieldUse, unknown_fields
from vllm_mlx.server.openai.schemas import Body
from vllm_mlx.server.openai.validation import validate
from vllm_mlx.server.responses_api import schemas
from vllm_mlx.server.responses_api.fields import POLICIES
from vllm_mlx.server.responses_api.schemas import (
    InputItem,
    InputPart,
    PromptCacheOptions,
    ReasoningOptions,
    ResponsesBody,
    ResponseTool,
    ResponseToolChoice,
)

SCHEMAS = [
    cls
    for cls in vars(schemas).values()
    if isinstance(cls, type) and issubclass(cls, Body) and cls is not Body
]
FUNCTION = {"type": "function", "name": "f"}


def checked(**fields: Any) -> ResponsesBody:
    """Check a body as the route does."""
    return validate(ResponsesBody, {"input": "x", **fields}, POLICIES)


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda cls: cls.__name__)
def test_every_field_is_classified(schema: type[Body]) -> None:
    """A field cannot be added to a schema without saying what becomes of it."""
    assert set(POLICIES[schema]) == set(schema.model_fields)


@pytest.mark.parametrize(
    ("schema", "params"),
    [
        (ResponsesBody, response_create_params.ResponseCreateParamsStreaming),
        (InputItem, sdk.EasyInputMessageParam),
        (InputItem, sdk.ResponseOutputMessageParam),
        (InputItem, sdk.ResponseReasoningItemParam),
        (InputItem, sdk.ResponseFunctionToolCallParam),
        (InputItem, sdk.ResponseCustomToolCallParam),
        (InputItem, sdk.ResponseCustomToolCallOutputParam),
        (InputItem, response_input_param.FunctionCallOutput),
        (InputItem, response_input_param.ItemReference),
        (InputPart, sdk.ResponseInputTextParam),
        (schemas.OutputPart, sdk.ResponseInputImageContentParam),
        (schemas.OutputPart, sdk.ResponseInputTextContentParam),
        (InputPart, sdk.ResponseOutputTextParam),
        (InputPart, sdk.ResponseOutputRefusalParam),
        (ResponseTool, sdk.FunctionToolParam),
        (ResponseTool, sdk.CustomToolParam),
        (ResponseTool, sdk.NamespaceToolParam),
        (ResponseToolChoice, sdk.ToolChoiceFunctionParam),
        (ResponseToolChoice, sdk.ToolChoiceAllowedParam),
        (schemas.TextOptions, sdk.ResponseTextConfigParam),
        (schemas.TextFormat, sdk.ResponseFormatTextJSONSchemaConfigParam),
        (ReasoningOptions, Reasoning),
        (PromptCacheOptions, response_create_params.PromptCacheOptions),
        (schemas.ResponsesStreamOptions, response_create_params.StreamOptions),
    ],
)
def test_every_field_of_the_client_is_known(schema: type[Body], params: type) -> None:
    """What the real client can send is enforced, advisory or refused, never unknown.

    But for calls that need not be waited for, which are waited for, and named as unknown.
    """
    assert set(get_type_hints(params)) - set(schema.model_fields) <= {"async"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": 5}, "input"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"type": "web_search_call", "id": "x"}]}, "input[0].type"),
        ({"temperature": 3}, "temperature"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"tools": [{"type": "local_shell"}]}, "tools[0].type"),
        ({"tools": [{"type": "mcp", "server_label": "x"}]}, "tools[0].type"),
        ({"tools": [{"type": "web_searching"}]}, "tools[0].type"),
        ({"tool_choice": "any"}, "tool_choice"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "x"}}, "prompt"),
        ({"moderation": {"model": "x"}}, "moderation"),
        ({"truncation": "auto"}, "truncation"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"context_management": [{"type": "compaction"}]}, "context_management"),
        ({"background_options": {"completion_window": "2h"}}, "background_options"),
    ],
)
def test_what_cannot_be_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    """The error's parameter leads to the fault."""
    with pytest.raises(InvalidRequestError) as caught:
        checked(**fields)
    assert caught.value.param == param


def test_what_asks_for_nothing_passes() -> None:
    """Null, and the values that are how it is here anyway."""
    for name, policy in POLICIES[ResponsesBody].items():
        if policy.use is FieldUse.REFUSED:
            for value in (None, *policy.no_ops):
                checked(**{name: value})


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("input_image", "image input is not supported in this build"),
        ("input_file", "file input is not supported in this build"),
        ("input_audio", "audio input is not supported in this build"),
        ("hologram", "unknown content part type 'hologram'"),
    ],
)
def test_parts_that_are_no_text_are_refused_by_name(kind: str, reason: str) -> None:
    """In messages and in the results of tools, but for images that a tool returned."""
    part = {"type": kind, "image_url": "data:image/png;base64,eA=="}
    result = {"type": "function_call_output", "call_id": "c", "output": [part]}
    for item, place in (
        ({"role": "user", "content": [part]}, "input[0].content[0].type"),
        (result, "input[0].output[0].type"),
    ):
        if kind == "input_image" and item is result:
            checked(input=[item])
            continue
        with pytest.raises(InvalidRequestError, match=reason) as caught:
            checked(input=[item])
        assert caught.value.param == place


def test_what_agents_send_beyond_is_ignored_and_named() -> None:
    """New fields at any depth break nothing; those without effect are not even named."""
    body = checked(
        client_metadata={"x": "y"},
        prompt_cache_key="k",
        include=["reasoning.encrypted_content"],
        reasoning={"effort": "medium", "summary": "auto", "new": 1},
        text={"verbosity": "low"},
        tools=[{**FUNCTION, "async": True}, {"type": "web_search_2025_08_26", "filters": {}}],
        stream_options={"include_obfuscation": False},
        newer=1,
    )
    assert sorted(unknown_fields(body)) == [
        *("newer", "reasoning.new", "tools[].async", "tools[].filters"),
    ]
