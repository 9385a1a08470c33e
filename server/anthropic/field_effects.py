"""What each field of the Messages routes does, in words, for the page of the HTTP API."""

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
from vllm_mlx.server.openai.schemas import Body
from vllm_mlx.server.openai.translate import MAX_STOP_LENGTH, MAX_STOP_STRINGS

_PROMPT = {
    "model": "The served name, the model as it was given to `serve`, its folder, `default`, an "
    "alias, or any name that begins with `claude-`; the answer says it back. May be left out.",
    "messages": "The chat. See below; turns of one role that follow each other are one.",
    "system": "The system prompt: a text, or a list of text blocks, joined by line breaks. Lines "
    "that an agent changes with each request are left out, unless `--no-normalize-prompts`.",
    "tools": "The tools that the client runs. See below.",
    "tool_choice": "See below.",
    "thinking": "See below. Without it the model does not think, if its template can say so and "
    "`--default-chat-template-kwargs` does not say otherwise.",
    "output_config": "See below.",
    "chat_template_kwargs": "Passed on to the chat template; goes before what other fields say.",
}

#: By schema: every field that is enforced.
EFFECTS: Mapping[type[Body], Mapping[str, str]] = {
    PromptBody: _PROMPT,
    MessagesBody: {
        **_PROMPT,
        "max_tokens": "Most tokens of the answer, thinking included; shortened to "
        "`--max-request-tokens` and to what the context leaves. 0 only has the prompt computed and "
        "stored.",
        "temperature": "0 takes the likeliest token. Default: `--default-temperature`, the model's "
        "own, 0.7.",
        "top_p": "Draw from the likeliest tokens that have this probability together. Default: "
        "`--default-top-p`, the model's own, 0.9.",
        "top_k": "Draw from so many of the likeliest tokens; 0 and -1 from all.",
        "stop_sequences": f"Up to {MAX_STOP_STRINGS} texts of up to {MAX_STOP_LENGTH} characters, "
        "before which the answer ends.",
        "stream": "Answer as server-sent events.",
    },
    CountTokensBody: _PROMPT,
    PrefixBody: _PROMPT,
    InputMessage: {
        "role": "`user`, `assistant` or `system`. What the system says behind the first turn is "
        "shown to the model as part of the user's turn, marked as a reminder.",
        "content": "A text, or a list of blocks. The answer goes on with a last message of the "
        "assistant.",
    },
    SystemBlock: {"type": "`text`.", "text": "The text."},
    ContentBlock: {
        "type": "`text`, `thinking`, `redacted_thinking`, `tool_use` or `tool_result`.",
        "text": "The text of a `text` block.",
        "thinking": "What the assistant thought; the template decides whether it is shown again.",
        "id": "Passed on to the chat template.",
        "name": "The tool that was called.",
        "input": "The arguments of the call.",
        "tool_use_id": "Which call a `tool_result` answers.",
        "content": "What the tool returned: a text, or a list of blocks. See below.",
        "is_error": "The tool failed; the model is told so.",
    },
    ResultBlock: {
        "type": "`text` or `tool_reference`.",
        "text": "The text of a `text` block.",
        "tool_name": "The tool that a `tool_reference` is of; it is named to the model.",
    },
    ToolDefinition: {
        "name": "Its name.",
        "type": "`custom`, or nothing.",
        "description": "What it does.",
        "input_schema": "The JSON schema of its arguments.",
        "strict": "The arguments of a call follow the schema.",
    },
    ToolChoice: {
        "type": "`auto`: the model decides. `any`: it calls at least one tool. `tool`: it calls "
        "the one of this `name`. `none`: it calls none.",
        "name": "The tool, where `type` is `tool`.",
        "disable_parallel_tool_use": "At most one call.",
    },
    Thinking: {
        "type": "`enabled`, `adaptive` (the same here) or `disabled`; passed on to the template.",
        "budget_tokens": "After so many tokens of thinking the answer begins.",
        "display": "`omitted` leaves the blocks of thinking empty.",
    },
    OutputConfig: {
        "effort": "Passed on to the chat template as `reasoning_effort`; above `high` is `high`.",
        "format": "See below.",
    },
    OutputFormat: {
        "type": "`json_schema`.",
        "schema": "The text of the answer is JSON that follows it; calls of tools are free.",
    },
    Metadata: {},
}
