"""What each field of the Responses route does, in words, for the page of the HTTP API."""

from __future__ import annotations

from collections.abc import Mapping

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

#: By schema: every field that is enforced.
EFFECTS: Mapping[type[Body], Mapping[str, str]] = {
    ResponsesBody: {
        "model": "The served name, the model as it was given to `serve`, its folder, `default` or "
        "an alias; the answer says it back. May be left out.",
        "input": "A text of the user's, or a list of items. See below.",
        "instructions": "A system prompt, before everything else. It is not carried over by "
        "`previous_response_id`.",
        "previous_response_id": "Go on with the conversation of a stored response, one of the same "
        "API key (without keys: of the same address), or else a 404.",
        "store": "Unless it is false the response is kept: the latest 1000 of all clients, in 64 "
        "MB at most, until the server ends.",
        "stream": "Answer as server-sent events.",
        "metadata": "Up to 16 texts, said back.",
        "tools": "The tools that the model may call. See below.",
        "tool_choice": "`auto`, `none`, `required`, or an object. See below.",
        "parallel_tool_calls": "False allows one call at most.",
        "text": "See below.",
        "reasoning": "See below.",
        "include": "`reasoning.encrypted_content` gives reasoning once more as an opaque (not "
        "encrypted) text, to be sent back with the next turn. What only tools of a service or "
        "images have is never there; anything else is a 400.",
        "max_output_tokens": "Most tokens of the answer, reasoning included; shortened to what the "
        "context leaves, and a 400 above `--max-request-tokens`.",
        "temperature": "0 takes the likeliest token. Default: `--default-temperature`, the model's "
        "own, 0.7.",
        "top_p": "Draw from the likeliest tokens that have this probability together. Default: "
        "`--default-top-p`, the model's own, 0.9.",
        "prompt_cache_options": "See below.",
        "generate": "False is the same as `prompt_cache_options.prewarm`.",
        "top_k": "Draw from so many of the likeliest tokens; 0 and -1 from all.",
        "min_p": "Draw from tokens of at least this share of the likeliest one's probability.",
        "seed": "The same draws for the same request.",
        "min_tokens": "No end before so many tokens.",
        "stop": "Texts before which the answer ends.",
        "stop_token_ids": "Tokens that end the answer.",
        "ignore_eos": "Go on over the model's own end.",
        "priority": "Of two waiting requests the one with the lower number goes first.",
        "frequency_penalty": "Lower what was generated, by how often.",
        "presence_penalty": "Lower what was generated.",
        "repetition_penalty": "Lower what is in prompt or answer, as a factor.",
        "chat_template_kwargs": "Passed on to the chat template; other fields go before it.",
        "enable_thinking": "Passed on to the chat template.",
        "thinking_token_budget": "After so many tokens of reasoning the answer begins.",
    },
    InputItem: {
        "type": "`message` (may be left out), `reasoning`, `function_call`, "
        "`function_call_output`, `custom_tool_call`, `custom_tool_call_output` or "
        "`item_reference`.",
        "id": "Of an `item_reference`: an item of a stored response, whose place it takes.",
        "role": "Of a message: `user`, `assistant`, `system` or `developer` (the same).",
        "content": "A text, or a list of texts. What the assistant said, thought and called "
        "between two others is one turn.",
        "summary": "What was thought, where neither `content` nor `encrypted_content` says it.",
        "encrypted_content": "What was thought, where it was sealed here and `content` is missing.",
        "call_id": "Which call it is, or is the result of.",
        "name": "The tool that was called.",
        "namespace": "Its namespace.",
        "arguments": "The arguments of a `function_call`, as JSON.",
        "input": "The text that a custom tool was called with.",
        "output": "What a tool returned: a text, or a list of texts.",
    },
    InputPart: {
        "type": "`input_text`, `output_text`, `text`, `refusal`, `summary_text` or "
        "`reasoning_text`.",
        "text": "The text.",
        "refusal": "The text of a refusal.",
    },
    OutputPart: {
        "type": "As of an `InputPart`; or `input_image`, of which the model is told that there is "
        "one it cannot see, named in `x-ignored-fields`.",
        "text": "The text.",
        "refusal": "The text of a refusal.",
    },
    ResponseTool: {
        "type": "`function`; `custom`, whose input is a text instead of JSON; or `namespace`, "
        "which holds others. `web_search`, `image_generation` and `tool_search`, which agents send "
        "unasked, are left out and named in `x-ignored-fields`. Others are a 400.",
        "name": "Its name. The model knows a tool of a namespace as `NAMESPACE__NAME`.",
        "description": "What it does.",
        "parameters": "The JSON schema of a function's arguments.",
        "strict": "True makes the arguments of a call follow the schema; nothing is the same as "
        "false.",
        "format": "What the input of a custom tool looks like: shown to the model, not enforced.",
        "tools": "The tools of a namespace.",
    },
    CustomFormat: {
        "type": "`text` or `grammar`.",
        "syntax": "How the grammar is written.",
        "definition": "The grammar.",
    },
    ResponseToolChoice: {
        "type": "`function` and `custom`: a call to the tool of this `name`. `allowed_tools`: only "
        "`tools` are shown to the model.",
        "name": "The tool that must be called.",
        "mode": "`auto`, or `required` for at least one call to `tools`.",
        "tools": "Tools by their `type` and `name`.",
    },
    TextOptions: {"format": "See below."},
    TextFormat: {
        "type": "`text`, `json_object` or `json_schema`.",
        "schema": "The text is JSON that follows it; calls of tools are free.",
    },
    ReasoningOptions: {
        "effort": "Passed on to the chat template as `reasoning_effort`; `none` also as "
        "`enable_thinking` false.",
    },
    PromptCacheOptions: {
        "prewarm": "The prompt is computed and stored, and nothing generated: the response is "
        "complete and empty.",
    },
    ResponsesStreamOptions: {},
}
