"""What each request field does here: enforced, advisory or refused; the table and its check."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from vllm_mlx.engine.errors import InvalidRequestError
from vllm_mlx.server.openai.schemas import (
    Body,
    ChatCompletionBody,
    ChatMessage,
    CompletionBody,
    ContentPart,
    DetokenizeBody,
    FunctionCall,
    FunctionDefinition,
    FunctionName,
    FunctionTool,
    GenerationBody,
    JsonSchemaFormat,
    NamedToolChoice,
    ResponseFormat,
    StreamOptions,
    StructuredOutputs,
    TokenizeBody,
    ToolCall,
)

#: How many unknown fields of one body are named; more tell nobody anything.
MAX_UNKNOWN_NAMES = 100


class FieldUse(enum.Enum):
    """Say what happens to a field that a client sends."""

    #: It takes effect on every path.
    ENFORCED = "enforced"
    #: It is known and without effect here.
    ADVISORY = "advisory"
    #: A value that would have an effect is a 400 that names the field.
    REFUSED = "refused"


@dataclass(frozen=True)
class FieldPolicy:
    """Classify one field; of a refused one, `no_ops` are the values that ask for nothing."""

    use: FieldUse
    no_ops: tuple[Any, ...] = ()
    #: A field with whose value (or 1, where it has none) the value asks for nothing either.
    same_as: str | None = None


_E = FieldPolicy(FieldUse.ENFORCED)
_A = FieldPolicy(FieldUse.ADVISORY)


def _refused(*no_ops: Any) -> FieldPolicy:
    return FieldPolicy(FieldUse.REFUSED, no_ops)


def _all(policy: FieldPolicy, names: str) -> dict[str, FieldPolicy]:
    return dict.fromkeys(names.split(), policy)


_GENERATION: dict[str, FieldPolicy] = {
    **_all(_E, "model temperature top_p top_k min_p seed max_tokens min_tokens"),
    **_all(_E, "stop stop_token_ids ignore_eos stream stream_options n priority"),
    **_all(_E, "frequency_penalty presence_penalty repetition_penalty logit_bias"),
    **_all(_E, "response_format structured_outputs guided_json guided_regex guided_choice"),
    **_all(_E, "guided_grammar guided_whitespace_pattern"),
    **_all(_A, "user metadata service_tier safety_identifier guided_decoding_backend"),
    **_all(_A, "prompt_cache_key prompt_cache_retention prompt_cache_options"),
    # As many candidates as choices: nothing to choose between.
    "best_of": FieldPolicy(FieldUse.REFUSED, same_as="n"),
    "length_penalty": _refused(1.0),
    "use_beam_search": _refused(False),
    "bad_words": _refused([]),
    "allowed_token_ids": _refused(),
    "logits_processors": _refused([]),
    "prompt_logprobs": _refused(),
    "echo": _refused(False),
    "skip_special_tokens": _refused(True),
    "spaces_between_special_tokens": _refused(True),
    "include_stop_str_in_output": _refused(False),
    "truncate_prompt_tokens": _refused(),
    "return_token_ids": _refused(False),
    "return_tokens_as_token_ids": _refused(False),
    "thinking_token_budget": _refused(),
    "timeout": _refused(),
}

POLICIES: Mapping[type[Body], Mapping[str, FieldPolicy]] = {
    GenerationBody: _GENERATION,
    ChatCompletionBody: {
        **_GENERATION,
        **_all(_E, "messages max_completion_tokens chat_template_kwargs enable_thinking"),
        **_all(_E, "reasoning_effort add_generation_prompt continue_final_message"),
        **_all(_E, "logprobs top_logprobs thinking_token_budget"),
        **_all(_E, "tools tool_choice parallel_tool_calls functions function_call"),
        **_all(_A, "prediction store verbosity"),
        "modalities": _refused([], ["text"]),
        **_all(_refused(), "audio moderation web_search_options chat_template"),
        "documents": _refused([]),
        "add_special_tokens": _refused(False),
    },
    CompletionBody: {
        **_GENERATION,
        **_all(_E, "prompt add_special_tokens echo logprobs"),
        "suffix": _refused(""),
    },
    StreamOptions: {
        "include_usage": _E,
        # Padding against traffic analysis; the text is the same without it.
        "include_obfuscation": _A,
        "continuous_usage_stats": _refused(False),
    },
    ResponseFormat: _all(_E, "type json_schema schema"),
    JsonSchemaFormat: {"schema": _E, **_all(_A, "name description strict")},
    StructuredOutputs: {
        **_all(_E, "json regex choice grammar json_object whitespace_pattern"),
        **_all(_E, "disable_any_whitespace"),
        "structural_tag": _refused(),
        "disable_additional_properties": _refused(False),
        "disable_fallback": _A,
    },
    ChatMessage: {
        **_all(_E, "role content name tool_calls tool_call_id reasoning reasoning_content refusal"),
        "function_call": _E,
        **_all(_A, "annotations cache_control"),
        "audio": _refused(),
    },
    ContentPart: {
        **_all(_E, "type text refusal"),
        **_all(_A, "cache_control prompt_cache_breakpoint"),
        **_all(_refused(), "image_url input_image image input_audio audio_url audio"),
        **_all(_refused(), "video_url video file"),
    },
    ToolCall: {**_all(_E, "id type function"), "index": _A},
    FunctionCall: _all(_E, "name arguments"),
    FunctionTool: _all(_E, "type function"),
    FunctionDefinition: _all(_E, "name description parameters strict"),
    NamedToolChoice: _all(_E, "type function"),
    FunctionName: _all(_E, "name"),
    TokenizeBody: {
        **_all(_E, "model prompt messages add_special_tokens add_generation_prompt"),
        **_all(_E, "continue_final_message chat_template_kwargs tools"),
        "return_token_strs": _refused(False),
        **_all(_refused(), "chat_template mm_processor_kwargs"),
    },
    DetokenizeBody: _all(_E, "model tokens"),
}


#: The classes of the fields of some API's schemas.
Policies = Mapping[type[Body], Mapping[str, FieldPolicy]]


def check_fields(body: Body, policies: Policies = POLICIES) -> None:
    """Raise `InvalidRequestError` that names the first refused field which asks for something."""
    for path, part in _walk(body):
        for name, policy in policies[type(part)].items():
            value = getattr(part, name)
            if policy.use is not FieldUse.REFUSED or value is None:
                continue
            no_ops = policy.no_ops
            if policy.same_as is not None:
                no_ops = (*no_ops, getattr(part, policy.same_as) or 1)
            if value in no_ops:
                continue
            param = f"{path}.{name}" if path else name
            hint = f"; only {_listed(no_ops)} is accepted" if no_ops else ""
            raise InvalidRequestError(f"{param} is not supported in this build{hint}", param=param)


def unknown_fields(body: Body) -> list[str]:
    """Return the fields that no schema knows, at any depth, as `messages[].name`; each once.

    Of very many, the first are returned.
    """
    found: dict[str, None] = {}
    for path, part in _walk(body, indices=False):
        for name in part.model_extra or ():
            found[f"{path}.{name}" if path else name] = None
            if len(found) >= MAX_UNKNOWN_NAMES:
                return list(found)
    return list(found)


def _walk(body: Body, path: str = "", *, indices: bool = True) -> Iterator[tuple[str, Body]]:
    """Yield `body` and every schema inside it with its path; free-form values are not entered."""
    yield path, body
    for name in type(body).model_fields:
        value = getattr(body, name)
        inner = f"{path}.{name}" if path else name
        if isinstance(value, Body):
            yield from _walk(value, inner, indices=indices)
        elif isinstance(value, list) and value and isinstance(value[0], Body):
            # Of a typed list, all are; a million token ids need not be asked one by one.
            for index, item in enumerate(value):
                place = f"{inner}[{index if indices else ''}]"
                yield from _walk(item, place, indices=indices)


def _listed(values: tuple[Any, ...]) -> str:
    return " or ".join(repr(value) for value in values)
