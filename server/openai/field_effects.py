"""What each request field that takes effect does, in words, for the page of the HTTP API."""

from __future__ import annotations

from collections.abc import Mapping

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
from vllm_mlx.server.openai.translate import MAX_STOP_LENGTH, MAX_STOP_STRINGS

_MODEL = (
    "The served name, the model as it was given to `serve`, its folder, or `default`; "
    "may be left out."
)

_GENERATION = {
    "model": _MODEL,
    "temperature": "0 takes the likeliest token. Default: `--default-temperature`, the model's "
    "own, 0.7.",
    "top_p": "Draw from the likeliest tokens that have this probability together. Default: "
    "`--default-top-p`, the model's own, 0.9.",
    "top_k": "Draw from so many of the likeliest tokens; 0 and -1 from all.",
    "min_p": "Draw from tokens at least this probable, as a part of the likeliest one's "
    "probability.",
    "seed": "The same seed and request draw the same tokens, whatever else is computed.",
    "max_tokens": "Most tokens of the answer, at most `--max-request-tokens`; shortened to what "
    "the context leaves. Default: `--max-tokens`.",
    "min_tokens": "Nothing but the length ends the answer before so many tokens.",
    "stop": f"A text, or up to {MAX_STOP_STRINGS} of up to {MAX_STOP_LENGTH} characters, "
    "before which the answer ends.",
    "stop_token_ids": "Tokens that end the answer.",
    "ignore_eos": "Go on after the model's own end.",
    "stream": "Answer as server-sent events.",
    "stream_options": "See below; only with `stream`.",
    "n": "So many answers to each prompt, each with a seed of its own that `seed` decides.",
    "priority": "Of waiting requests those with the lower number go first. Default 0.",
    "frequency_penalty": "Taken off a token's logit once for each time that it is in the answer.",
    "presence_penalty": "Taken off the logit of tokens in the answer.",
    "repetition_penalty": "Makes tokens of prompt and answer less likely, above 1.",
    "logit_bias": "Added to the logits of tokens, by their ids.",
    "response_format": "The form of the answer, which is enforced token by token. See below, and "
    "[structured output](guides/structured-output.md). Of this and the fields like it one may be "
    "given.",
    "structured_outputs": "The same in vLLM's way. See below.",
    "guided_json": "A JSON schema that the answer follows, as an object or its text.",
    "guided_regex": "A regular expression that matches the whole answer.",
    "guided_choice": "Texts of which the answer is one.",
    "guided_grammar": "A grammar of the answer: Lark with a rule `start`, or GBNF with `root`.",
    "guided_whitespace_pattern": "What may stand between the parts of `guided_json`, as a regular "
    "expression. Default: nothing, a space, or a line break and an indentation.",
}

_MESSAGES = {
    "add_generation_prompt": "`false` leaves out the beginning of an answer, which the template "
    "writes.",
    "continue_final_message": "Go on with the last message instead of answering it.",
    "chat_template_kwargs": "Passed on to the chat template.",
}

_TOOLS = "What the model may call: [tool calling](guides/tool-calling.md). See below."

_SPECIAL_TOKENS = "`false` leaves out the tokens that the tokenizer puts before a text."

#: By schema: every field that is enforced.
EFFECTS: Mapping[type[Body], Mapping[str, str]] = {
    GenerationBody: _GENERATION,
    ChatCompletionBody: {
        **_GENERATION,
        **_MESSAGES,
        "messages": "The chat. See below.",
        "max_completion_tokens": "The newer name of `max_tokens`, which it goes before.",
        "enable_thinking": "Passed on to the chat template.",
        "reasoning_effort": "Passed on to the chat template; `none` also as `enable_thinking` "
        "`false`.",
        "thinking_token_budget": "Most tokens of [reasoning](guides/reasoning.md), which is closed "
        "then.",
        "tools": _TOOLS,
        "tool_choice": "`auto` (the default), `none`, `required`, or a tool by its name; a call "
        "that is asked for is enforced.",
        "parallel_tool_calls": "`false` allows one call at most.",
        "functions": "The older name of `tools`, without their `type`; the answer then has "
        "`function_call`.",
        "function_call": "The older name of `tool_choice`: `auto`, `none` or a function by its "
        "name.",
        "logprobs": "Return each token's log-probability, of the model itself: before temperature, "
        "penalties and biases.",
        "top_logprobs": "Return so many of the likeliest tokens beside each token, up to 20; only "
        "with `logprobs`.",
    },
    CompletionBody: {
        **_GENERATION,
        "prompt": "A text, a list of texts, token ids, or a list of those; each is answered for "
        "itself.",
        "add_special_tokens": _SPECIAL_TOKENS,
        "max_tokens": _GENERATION["max_tokens"] + " 0 with `echo` only.",
        "echo": "Repeat the prompt before the answer; with `logprobs` the prompt's are returned "
        "too.",
        "logprobs": "Return each token's log-probability and those of so many of the likeliest "
        "tokens, up to 20.",
    },
    StreamOptions: {"include_usage": "Send one more chunk at the end, with `usage`."},
    ResponseFormat: {
        "type": "`text`, `json_object` for any object, or `json_schema`.",
        "json_schema": "The schema of a `json_schema`. See below.",
        "schema": "A schema that a `json_object` follows.",
    },
    JsonSchemaFormat: {"schema": "The JSON schema, which is enforced whatever `strict` says."},
    StructuredOutputs: {
        "json": "As `guided_json`.",
        "regex": "As `guided_regex`.",
        "choice": "As `guided_choice`.",
        "grammar": "As `guided_grammar`.",
        "json_object": "`true` asks for any object.",
        "whitespace_pattern": "As `guided_whitespace_pattern`.",
        "disable_any_whitespace": "`true` leaves nothing between the parts of JSON.",
    },
    ChatMessage: {
        "role": "`system`, `developer` (the same), `user`, `assistant`, `tool` or `function` (the "
        "same).",
        "content": "A text, or a list of parts; parts are joined by line breaks.",
        "name": "Passed on to the chat template.",
        "tool_calls": "Calls that the assistant made.",
        "tool_call_id": "Which call a `tool` message answers.",
        "function_call": "The older form of one of `tool_calls`.",
        "reasoning": "The same as `reasoning_content`.",
        "reasoning_content": "What the assistant thought; the template decides whether it is "
        "shown again.",
        "refusal": "The content of an assistant's message that has no other.",
    },
    ContentPart: {
        "type": "`text`, `input_text`, `output_text` or `refusal`.",
        "text": "The text.",
        "refusal": "The text of a `refusal`.",
    },
    ToolCall: {
        "id": "Passed on to the chat template.",
        "type": "`function`.",
        "function": "What was called.",
    },
    FunctionCall: {
        "name": "Passed on to the chat template.",
        "arguments": "JSON as text, or an object.",
    },
    FunctionTool: {"type": "`function`.", "function": "The function. See below."},
    FunctionDefinition: {
        "name": "1 to 128 letters, digits, `_` and `-`.",
        "description": "Told to the model.",
        "parameters": "JSON schema of an object: the arguments. Told to the model.",
        "strict": "Every call follows the schema, also one that the model makes by itself.",
    },
    NamedToolChoice: {"type": "`function`.", "function": "Which. See below."},
    FunctionName: {"name": "One of those that the request describes."},
    TokenizeBody: {
        **_MESSAGES,
        "tools": _TOOLS,
        "model": _MODEL,
        "prompt": "A text; or give `messages`.",
        "messages": "A chat, which the template renders; or give `prompt`.",
        "add_special_tokens": _SPECIAL_TOKENS,
    },
    DetokenizeBody: {"model": _MODEL, "tokens": "Token ids; special ones are shown."},
}
