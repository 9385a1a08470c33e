"""What each field of the Responses route does here: enforced, advisory or refused."""

from __future__ import annotations

from collections.abc import Mapping

from vllm_mlx.server.openai.fields import FieldPolicy, FieldUse
from vllm_mlx.server.openai.schemas import Body
from vllm_mlx.server.responses_api.schemas import (
    CustomFormat,
    InputItem,
    InputPart,
    OutputPart,
    PromptCacheOptions,
    ReasoningOptions,
    ResponsesBody,
    ResponsesStreamOptions,
    ResponseTool,
    ResponseToolChoice,
    TextFormat,
    TextOptions,
)

_E = FieldPolicy(FieldUse.ENFORCED)
_A = FieldPolicy(FieldUse.ADVISORY)


def _refused(*no_ops: object) -> FieldPolicy:
    return FieldPolicy(FieldUse.REFUSED, no_ops)


def _all(policy: FieldPolicy, names: str) -> dict[str, FieldPolicy]:
    return dict.fromkeys(names.split(), policy)


POLICIES: Mapping[type[Body], Mapping[str, FieldPolicy]] = {
    ResponsesBody: {
        **_all(_E, "model input instructions previous_response_id store stream metadata"),
        **_all(_E, "tools tool_choice parallel_tool_calls text reasoning include"),
        **_all(_E, "max_output_tokens temperature top_p prompt_cache_options generate"),
        **_all(_E, "top_k min_p seed min_tokens stop stop_token_ids ignore_eos priority"),
        **_all(_E, "frequency_penalty presence_penalty repetition_penalty"),
        **_all(_E, "chat_template_kwargs enable_thinking thinking_token_budget"),
        # Only the tools that a service runs itself are counted by it.
        **_all(_A, "max_tool_calls access_programs client_metadata image stream_options"),
        **_all(_A, "prompt_cache_key prompt_cache_retention safety_identifier"),
        **_all(_A, "service_tier user"),
        "background": _refused(False),
        "context_management": _refused([]),
        "top_logprobs": _refused(0),
        "truncation": _refused("disabled"),
        **_all(_refused(), "background_options conversation moderation prompt"),
    },
    InputItem: {
        **_all(_E, "type id role content summary encrypted_content call_id name namespace"),
        **_all(_E, "arguments input output"),
        **_all(_A, "status phase caller"),
    },
    InputPart: {
        **_all(_E, "type text refusal"),
        **_all(_A, "annotations logprobs prompt_cache_breakpoint"),
    },
    OutputPart: {
        **_all(_E, "type text refusal"),
        **_all(_A, "annotations logprobs prompt_cache_breakpoint image_url file_id detail"),
    },
    ResponseTool: {
        **_all(_E, "type name description parameters strict format tools"),
        **_all(_A, "defer_loading allowed_callers output_schema"),
    },
    CustomFormat: _all(_E, "type syntax definition"),
    ResponseToolChoice: _all(_E, "type name mode tools"),
    TextOptions: {"format": _E, "verbosity": _A},
    TextFormat: {**_all(_E, "type schema"), **_all(_A, "name description strict")},
    ReasoningOptions: {"effort": _E, **_all(_A, "summary generate_summary context mode")},
    PromptCacheOptions: {"prewarm": _E, **_all(_A, "mode ttl comparison_response_id")},
    ResponsesStreamOptions: {"include_obfuscation": _A},
}
