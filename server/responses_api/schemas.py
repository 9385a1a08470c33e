"""The body of the Responses route, every field that clients are known to send.

As with the bodies of the other routes, unknown fields are kept so that they can be named, and
`fields.py` says what each known one does.
"""

from __future__ import annotations

import warnings
from typing import Annotated, Any, Literal

from pydantic import Field, JsonValue, field_validator
from pydantic_core import PydanticCustomError

from vllm_mlx.server.openai.schemas import MAX_PRIORITY, MAX_TOKEN_ID, Body, TokenIds

#: Kinds of items that the input may hold.
ITEM_TYPES = frozenset(
    {
        *("message", "reasoning", "function_call", "function_call_output"),
        *("custom_tool_call", "custom_tool_call_output", "item_reference"),
    }
)

#: Kinds of parts that messages, reasoning and the results of tools may hold.
PART_TYPES = frozenset(
    {"input_text", "output_text", "text", "refusal", "summary_text", "reasoning_text"}
)

#: Kinds of tools that the client runs itself.
CLIENT_TOOLS = frozenset({"function", "custom", "namespace"})

#: Kinds that agents send whatever they are told, and that a chat does without: they are left out.
LEFT_OUT_TOOLS = frozenset({"web_search", "web_search_preview", "image_generation", "tool_search"})

#: The kind of a part that is an image.
IMAGE = "input_image"

#: What parts with other content than text are called in an error.
_MEDIA = {
    IMAGE: "image",
    "computer_screenshot": "image",
    "input_file": "file",
    "input_audio": "audio",
}


def _unsupported(kind: str, reason: str) -> PydanticCustomError:
    return PydanticCustomError(kind, "{reason}", {"reason": reason})


def _one_of(values: frozenset[str], *, optional: bool = False) -> dict[str, JsonValue]:
    """Return what a JSON schema says of a field that is checked by hand."""
    return {"enum": [*sorted(values), *([None] if optional else [])]}


class InputPart(Body):
    """Hold one text of a message, of reasoning or of a tool's result."""

    type: str = Field(json_schema_extra=_one_of(PART_TYPES))
    text: str | None = None
    refusal: str | None = None
    annotations: Any = None
    logprobs: Any = None
    prompt_cache_breakpoint: Any = None

    @field_validator("type")
    @classmethod
    def _is_text(cls, value: str) -> str:
        if value in PART_TYPES:
            return value
        if value in _MEDIA:
            raise _unsupported("part_type", f"{_MEDIA[value]} input is not supported in this build")
        raise _unsupported(
            "part_type",
            f"unknown content part type {value[:64]!r}; known: {', '.join(sorted(PART_TYPES))}",
        )


class OutputPart(InputPart):
    """Hold one part of what a tool returned; of an image the model is told that there is one.

    An agent's tools decide what they return, and its chat would be over with the first image.
    """

    type: str = Field(json_schema_extra=_one_of(PART_TYPES | {IMAGE}))
    image_url: Any = None
    file_id: Any = None
    detail: Any = None

    @field_validator("type")
    @classmethod
    def _is_text(cls, value: str) -> str:
        return value if value == IMAGE else InputPart._is_text(value)


Parts = Annotated[list[InputPart], Field(fail_fast=True)]
OutputParts = Annotated[list[OutputPart], Field(fail_fast=True)]


class InputItem(Body):
    """Hold one item of the input: a message, reasoning, a call of a tool or its result."""

    type: str | None = Field(None, json_schema_extra=_one_of(ITEM_TYPES, optional=True))
    id: str | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | Parts | None = None
    summary: Parts | None = None
    encrypted_content: str | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | None = None
    input: str | None = None
    output: str | OutputParts | None = None
    status: Any = None
    phase: Any = None
    caller: Any = None

    @field_validator("type")
    @classmethod
    def _is_known(cls, value: str | None) -> str | None:
        if value is None or value in ITEM_TYPES:
            return value
        raise _unsupported(
            "item_type",
            f"input items of type {value[:64]!r} are not supported in this build; "
            f"known: {', '.join(sorted(ITEM_TYPES))}",
        )


class CustomFormat(Body):
    """Say what the input of a custom tool must look like."""

    type: Literal["text", "grammar"]
    syntax: str | None = None
    definition: str | None = None


class ResponseTool(Body):
    """Describe one tool, or several in a namespace."""

    type: str = Field(json_schema_extra=_one_of(CLIENT_TOOLS | LEFT_OUT_TOOLS))
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: CustomFormat | None = None
    tools: Annotated[list[ResponseTool], Field(fail_fast=True)] | None = None
    defer_loading: Any = None
    allowed_callers: Any = None
    output_schema: Any = None

    @field_validator("type")
    @classmethod
    def _is_run_by_client(cls, value: str) -> str:
        if value in CLIENT_TOOLS or kind_left_out(value) is not None:
            return value
        raise _unsupported(
            "tool_type",
            f"the tool type {value[:64]!r} is not supported in this build; "
            "tools are of type function, custom or namespace",
        )


def kind_left_out(tool_type: str) -> str | None:
    """Return the kind of a tool that is left out, which may carry a date; None for others."""
    kind = tool_type
    for name in LEFT_OUT_TOOLS:
        if tool_type.startswith(f"{name}_2"):
            kind = name
    return kind if kind in LEFT_OUT_TOOLS else None


class ResponseToolChoice(Body):
    """Name the tool that must be called, or those that may be."""

    type: str
    name: str | None = None
    mode: Literal["auto", "required"] | None = None
    tools: list[dict[str, Any]] | None = None


with warnings.catch_warnings():
    # The field is called as a method of the base is which nothing here calls.
    warnings.filterwarnings("ignore", r'Field name "schema"')

    class TextFormat(Body):
        """Say what the text of the answer must be."""

        type: Literal["text", "json_object", "json_schema"]
        name: str | None = None
        description: str | None = None
        schema: dict[str, Any] | bool | None = None  # type: ignore[assignment]
        strict: bool | None = None


class TextOptions(Body):
    """Say which form the text of the answer has."""

    format: TextFormat | None = None
    verbosity: Any = None


class ReasoningOptions(Body):
    """Say how much the model reasons."""

    effort: str | None = None
    summary: Any = None
    generate_summary: Any = None
    context: Any = None
    mode: Any = None


class PromptCacheOptions(Body):
    """Say what becomes of the prompt beside its answer."""

    prewarm: bool | None = None
    mode: Any = None
    ttl: Any = None
    comparison_response_id: Any = None


class ResponsesStreamOptions(Body):
    """Say what a stream of events carries besides text."""

    include_obfuscation: Any = None


class ResponsesBody(Body):
    """Hold the body of `POST /v1/responses`."""

    model: str | None = None
    input: str | Annotated[list[InputItem], Field(fail_fast=True)] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    stream: bool | None = None
    metadata: Annotated[dict[str, str], Field(max_length=16)] | None = None
    tools: Annotated[list[ResponseTool], Field(fail_fast=True)] | None = None
    tool_choice: Literal["auto", "none", "required"] | ResponseToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include: list[str] | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    prompt_cache_options: PromptCacheOptions | None = None
    generate: bool | None = None
    # Further ones, as the chat route has them.
    top_k: int | None = Field(None, ge=-1, le=MAX_TOKEN_ID)
    min_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    min_tokens: int | None = Field(None, ge=0)
    stop: str | list[str] | None = None
    stop_token_ids: TokenIds | None = None
    ignore_eos: bool | None = None
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100)
    priority: int | None = Field(None, ge=-MAX_PRIORITY, le=MAX_PRIORITY)
    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None
    thinking_token_budget: int | None = Field(None, ge=0, le=MAX_TOKEN_ID)
    # Refused until a build supports them.
    background: Any = None
    background_options: Any = None
    context_management: Any = None
    conversation: Any = None
    moderation: Any = None
    prompt: Any = None
    top_logprobs: Any = None
    truncation: Any = None
    # Without effect here.
    access_programs: Any = None
    client_metadata: Any = None
    image: Any = None
    max_tool_calls: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    safety_identifier: Any = None
    service_tier: Any = None
    stream_options: ResponsesStreamOptions | None = None
    user: Any = None
