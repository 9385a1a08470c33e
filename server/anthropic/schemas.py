"""The bodies of the Anthropic Messages routes, every field that clients are known to send.

As with the bodies of the OpenAI routes, unknown fields are kept so that they can be named, and
`fields.py` says what each known one does.
"""

from __future__ import annotations

import warnings
from typing import Annotated, Any, Literal

from pydantic import Field, JsonValue, field_validator
from pydantic_core import PydanticCustomError

from vllm_mlx.server.openai.schemas import MAX_TOKEN_ID, Body
from vllm_mlx.server.openai.translate import MAX_STOP_LENGTH, MAX_STOP_STRINGS

#: Kinds of blocks that messages may hold.
BLOCK_TYPES = frozenset({"text", "thinking", "redacted_thinking", "tool_use", "tool_result"})

#: Kinds of blocks that the result of a tool may hold.
RESULT_TYPES = frozenset({"text", "tool_reference"})

#: Kinds of blocks that other builds and other servers know.
_KNOWN_ELSEWHERE = frozenset(
    {
        *("image", "document", "search_result", "container_upload", "browser_state"),
        *("server_tool_use", "web_search_tool_result", "web_fetch_tool_result"),
        *("code_execution_tool_result", "bash_code_execution_tool_result"),
        *("text_editor_code_execution_tool_result", "tool_search_tool_result"),
        *("mcp_tool_use", "mcp_tool_result", "tool_reference"),
    }
)


def _check_type(value: str, known: frozenset[str]) -> str:
    if value in known:
        return value
    if value in _KNOWN_ELSEWHERE:
        reason = f"{value} input is not supported in this build"
    else:
        reason = f"unknown content block type {value[:64]!r}; known: {', '.join(sorted(known))}"
    raise PydanticCustomError("block_type", "{reason}", {"reason": reason})


def _one_of(values: frozenset[str]) -> dict[str, JsonValue]:
    """Return what a JSON schema says of a field that is checked by hand."""
    return {"enum": [*sorted(values)]}


StopSequences = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]],
    Field(max_length=MAX_STOP_STRINGS),
]


class SystemBlock(Body):
    """Hold one text of the system prompt."""

    type: Literal["text"]
    text: str
    cache_control: Any = None
    citations: Any = None


class ResultBlock(Body):
    """Hold one part of what a tool returned."""

    type: str = Field(json_schema_extra=_one_of(RESULT_TYPES))
    text: str | None = None
    tool_name: str | None = None
    cache_control: Any = None
    citations: Any = None

    @field_validator("type")
    @classmethod
    def _is_known(cls, value: str) -> str:
        return _check_type(value, RESULT_TYPES)


class ContentBlock(Body):
    """Hold one block of a message: text, thinking, a call of a tool or its result."""

    type: str = Field(json_schema_extra=_one_of(BLOCK_TYPES))
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None
    data: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | Annotated[list[ResultBlock], Field(fail_fast=True)] | None = None
    is_error: bool | None = None
    cache_control: Any = None
    citations: Any = None
    caller: Any = None
    toolset_name: Any = None

    @field_validator("type")
    @classmethod
    def _is_known(cls, value: str) -> str:
        return _check_type(value, BLOCK_TYPES)


class InputMessage(Body):
    """Hold one message of a chat; `system` ones stand where something new is to be known."""

    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[ContentBlock], Field(fail_fast=True)]


class ToolDefinition(Body):
    """Describe one tool that the client runs."""

    name: str = Field(min_length=1)
    type: str | None = Field(None, json_schema_extra={"enum": [None, "custom"]})
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    cache_control: Any = None
    defer_loading: Any = None
    eager_input_streaming: Any = None
    input_examples: Any = None
    allowed_callers: Any = None

    @field_validator("type")
    @classmethod
    def _is_run_by_client(cls, value: str | None) -> str | None:
        if value not in (None, "custom"):
            reason = (
                f"the tool type {value[:64]!r} is not supported in this build; tools have a name, "
                "a description and an input_schema"
            )
            raise PydanticCustomError("tool_type", "{reason}", {"reason": reason})
        return value


class ToolChoice(Body):
    """Say whether and which tool must be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Body):
    """Say whether the model thinks before it answers, and for how long."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(None, ge=1, le=MAX_TOKEN_ID)
    display: Literal["summarized", "omitted"] | None = None


with warnings.catch_warnings():
    # The field is called as a method of the base is which nothing here calls.
    warnings.filterwarnings("ignore", r'Field name "schema"')

    class OutputFormat(Body):
        """Say what the text of the answer must be."""

        type: Literal["json_schema"]
        schema: dict[str, Any] | None = None  # type: ignore[assignment]


class OutputConfig(Body):
    """Say how much effort the answer is worth, and its form."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class Metadata(Body):
    """Say on whose behalf the request is made."""

    user_id: str | None = None


class PromptBody(Body):
    """Hold the fields that decide the prompt."""

    model: str | None = None
    messages: Annotated[list[InputMessage], Field(fail_fast=True)] = Field(min_length=1)
    system: str | Annotated[list[SystemBlock], Field(fail_fast=True)] | None = None
    tools: Annotated[list[ToolDefinition], Field(fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # Refused until a build supports them.
    mcp_servers: Any = None
    # Without effect here.
    cache_control: Any = None
    speed: Any = None
    user_profile_id: Any = None
    workspace_id: Any = None


class MessagesBody(PromptBody):
    """Hold the body of `POST /v1/messages`."""

    #: 0 asks for nothing but that the prompt be stored.
    max_tokens: int = Field(ge=0, le=MAX_TOKEN_ID)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=MAX_TOKEN_ID)
    stop_sequences: StopSequences | None = None
    stream: bool | None = None
    metadata: Metadata | None = None
    # Refused until a build supports them.
    container: Any = None
    # Without effect here.
    diagnostics: Any = None
    inference_geo: Any = None
    service_tier: Any = None


class PrefixBody(PromptBody):
    """Hold what of a request decides its prefix, which may end before the first message."""

    messages: Annotated[list[InputMessage], Field(fail_fast=True)] = Field(default=[])


class CountTokensBody(PromptBody):
    """Hold the body of `POST /v1/messages/count_tokens`."""
