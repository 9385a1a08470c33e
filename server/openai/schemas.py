"""The request bodies of the OpenAI-compatible routes, every field that clients are known to send.

Unknown fields are kept in `model_extra`, at any depth, so that they can be named; what each known
field does is said in `fields.py`. Fields that are refused there are typed loosely: their content
is not looked at.
"""

from __future__ import annotations

import warnings
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

#: Ids beyond this cannot be packed for the engine.
MAX_TOKEN_ID = 2**31 - 1

TokenId = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]

#: Checked to the first fault: a long list of wrong ones is as cheap to refuse as a short one.
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]

#: Most choices of one prompt, and most alternatives of one token: OpenAI's own limits.
MAX_CHOICES = 128
MAX_TOP_LOGPROBS = 20

#: Priorities on both sides of 0; far more than anybody tells apart.
MAX_PRIORITY = 2**31 - 1


class Body(BaseModel):
    """Base of every schema: values of the wrong type are refused, unknown fields are kept."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)


class StreamOptions(Body):
    """Say what a stream carries besides text."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None


with warnings.catch_warnings():
    # The base class has methods of these names, old ones that nobody calls here.
    warnings.filterwarnings("ignore", 'Field name "(schema|json)"', UserWarning)

    class JsonSchemaFormat(Body):
        """Hold a JSON schema with the name that OpenAI's API gives it."""

        name: str | None = None
        description: str | None = None
        schema: dict[str, Any] | bool | None = None  # type: ignore[assignment]
        strict: bool | None = None

    class ResponseFormat(Body):
        """Say which form an answer must have, in OpenAI's way."""

        type: Literal["text", "json_object", "json_schema"]
        json_schema: JsonSchemaFormat | None = None
        #: Where other servers take the schema of a `json_object`.
        schema: dict[str, Any] | bool | None = None  # type: ignore[assignment]

    class StructuredOutputs(Body):
        """Say which form an answer must have, in vLLM's way."""

        json: str | dict[str, Any] | None = None  # type: ignore[assignment]
        regex: str | None = None
        choice: Annotated[list[str], Field(fail_fast=True)] | None = None
        grammar: str | None = None
        json_object: bool | None = None
        whitespace_pattern: str | None = None
        disable_any_whitespace: bool | None = None
        # Refused until a build supports them.
        structural_tag: Any = None
        disable_additional_properties: bool | None = None
        # Without effect here.
        disable_fallback: Any = None


class GenerationBody(Body):
    """Hold the fields that chat and plain completions share."""

    model: str | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=MAX_TOKEN_ID)
    min_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    max_tokens: int | None = Field(None, ge=1)
    min_tokens: int | None = Field(None, ge=0)
    stop: str | list[str] | None = None
    stop_token_ids: TokenIds | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100)
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    priority: int | None = Field(None, ge=-MAX_PRIORITY, le=MAX_PRIORITY)
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Field(fail_fast=True)] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    # Refused until a build supports them.
    best_of: int | None = None
    length_penalty: float | None = None
    use_beam_search: bool | None = None
    bad_words: Any = None
    allowed_token_ids: Any = None
    logits_processors: Any = None
    prompt_logprobs: Any = None
    echo: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    truncate_prompt_tokens: int | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    thinking_token_budget: Any = None
    timeout: Any = None
    # Without effect here.
    guided_decoding_backend: Any = None
    user: Any = None
    metadata: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    prompt_cache_options: Any = None


class ContentPart(Body):
    """Hold one part of a message: text, or a kind that another build may take."""

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: Any = None
    input_image: Any = None
    image: Any = None
    input_audio: Any = None
    audio_url: Any = None
    audio: Any = None
    video_url: Any = None
    video: Any = None
    file: Any = None
    cache_control: Any = None
    prompt_cache_breakpoint: Any = None


class FunctionCall(Body):
    """Name a function and its arguments, as JSON text or already parsed."""

    name: str
    arguments: str | dict[str, Any] = "{}"


class ToolCall(Body):
    """Hold one call that an assistant made earlier."""

    id: str | None = None
    type: Literal["function"] = "function"
    index: int | None = None
    function: FunctionCall


class FunctionDefinition(Body):
    """Describe a function that the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionTool(Body):
    """Describe a tool; functions are the only kind."""

    type: Literal["function"]
    function: FunctionDefinition


class FunctionName(Body):
    """Name the function that is to be called."""

    name: str


class NamedToolChoice(Body):
    """Name the tool that is to be called."""

    type: Literal["function"]
    function: FunctionName


FunctionTools = Annotated[list[FunctionTool], Field(fail_fast=True)]


class ChatMessage(Body):
    """Hold one message of a chat; `function` is the older name of `tool`."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Annotated[list[ContentPart], Field(fail_fast=True)] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    function_call: FunctionCall | None = None
    annotations: Any = None
    cache_control: Any = None
    audio: Any = None


class ChatCompletionBody(GenerationBody):
    """Hold the body of `POST /v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], Field(fail_fast=True)] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    tools: FunctionTools | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    functions: Annotated[list[FunctionDefinition], Field(fail_fast=True)] | None = None
    function_call: Literal["auto", "none"] | FunctionName | None = None
    thinking_token_budget: int | None = Field(None, ge=0, le=MAX_TOKEN_ID)
    # Refused until a build supports them.
    modalities: Any = None
    audio: Any = None
    moderation: Any = None
    web_search_options: Any = None
    chat_template: Any = None
    documents: Any = None
    add_special_tokens: bool | None = None
    # Without effect here.
    prediction: Any = None
    store: Any = None
    verbosity: Any = None


class CompletionBody(GenerationBody):
    """Hold the body of `POST /v1/completions`; `prompt` is told apart in `prompts.py`."""

    prompt: Any
    add_special_tokens: bool | None = None
    #: 0 asks for nothing but what `echo` gives.
    max_tokens: int | None = Field(None, ge=0)
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    # Refused until a build supports them.
    suffix: str | None = None


class TokenizeBody(Body):
    """Hold the body of `POST /tokenize`: a prompt or a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(fail_fast=True)] | None = Field(None, min_length=1)
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: FunctionTools | None = None
    # Refused until a build supports them.
    return_token_strs: bool | None = None
    chat_template: Any = None
    mm_processor_kwargs: Any = None


class DetokenizeBody(Body):
    """Hold the body of `POST /detokenize`."""

    model: str | None = None
    tokens: TokenIds
