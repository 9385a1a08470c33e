"""What each field of the Messages routes does here: enforced, advisory or refused."""

from __future__ import annotations

from collections.abc import Mapping

from vllm_mlx.server.anthropic.schemas import (
    ContentBlock,
    CountTokensBody,
    InputMessage,
    MessagesBody,
    Metadata,
    OutputConfig,
    OutputFormat,
    PrefixBody,
    PromptBody,
    ResultBlock,
    SystemBlock,
    Thinking,
    ToolChoice,
    ToolDefinition,
)
from vllm_mlx.server.openai.fields import FieldPolicy, FieldUse
from vllm_mlx.server.openai.schemas import Body

_E = FieldPolicy(FieldUse.ENFORCED)
_A = FieldPolicy(FieldUse.ADVISORY)


def _all(policy: FieldPolicy, names: str) -> dict[str, FieldPolicy]:
    return dict.fromkeys(names.split(), policy)


_PROMPT: dict[str, FieldPolicy] = {
    **_all(_E, "model messages system tools tool_choice thinking output_config"),
    **_all(_E, "chat_template_kwargs"),
    # Every whole block of every prompt is kept; what else could be asked for is done anyway.
    **_all(_A, "cache_control speed user_profile_id workspace_id"),
    "mcp_servers": FieldPolicy(FieldUse.REFUSED, ([],)),
}

POLICIES: Mapping[type[Body], Mapping[str, FieldPolicy]] = {
    PromptBody: _PROMPT,
    MessagesBody: {
        **_PROMPT,
        **_all(_E, "max_tokens temperature top_p top_k stop_sequences stream"),
        **_all(_A, "metadata diagnostics inference_geo service_tier"),
        "container": FieldPolicy(FieldUse.REFUSED),
    },
    CountTokensBody: _PROMPT,
    PrefixBody: _PROMPT,
    InputMessage: _all(_E, "role content"),
    SystemBlock: {**_all(_E, "type text"), **_all(_A, "cache_control citations")},
    ContentBlock: {
        **_all(_E, "type text thinking id name input tool_use_id content is_error"),
        **_all(_A, "signature data cache_control citations caller toolset_name"),
    },
    ResultBlock: {**_all(_E, "type text tool_name"), **_all(_A, "cache_control citations")},
    ToolDefinition: {
        **_all(_E, "name type description input_schema strict"),
        **_all(_A, "cache_control defer_loading eager_input_streaming input_examples"),
        **_all(_A, "allowed_callers"),
    },
    ToolChoice: _all(_E, "type name disable_parallel_tool_use"),
    Thinking: _all(_E, "type budget_tokens display"),
    OutputConfig: _all(_E, "effort format"),
    OutputFormat: _all(_E, "type schema"),
    Metadata: _all(_A, "user_id"),
}
