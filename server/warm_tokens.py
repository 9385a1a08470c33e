"""From prompts to be warmed to tokens and engine requests, rendered as requests are; no engine."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from vllm_mlx.engine.core.outputs import pack_tokens
from vllm_mlx.engine.core.request import GenerationRequest, SamplingParams
from vllm_mlx.engine.text.prefix_render import is_whole_request, open_prefix
from vllm_mlx.server.answers.plan import ChatInput
from vllm_mlx.server.anthropic.chat_input import ChatSettings
from vllm_mlx.server.anthropic.chat_input import chat_input as anthropic_chat
from vllm_mlx.server.anthropic.schemas import PromptBody
from vllm_mlx.server.openai.chat_input import chat_input as openai_chat
from vllm_mlx.server.openai.prompts import split_prompt
from vllm_mlx.server.openai.schemas import CompletionBody
from vllm_mlx.server.responses_api.chat_input import whole_chat
from vllm_mlx.server.responses_api.schemas import ResponsesBody
from vllm_mlx.server.warm_prompts import WarmPrompt

_DEFAULTS = ChatSettings()

#: Requests of clients go first.
WARM_PRIORITY = -1


class PromptEncoder(Protocol):
    """Name the part of a tokenizer that prompts need."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of `text`."""
        ...

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], **template_kwargs: Any
    ) -> list[int]:
        """Render a chat and return its token ids."""
        ...


def prefix_tokens(
    prompt: WarmPrompt, encoder: PromptEncoder, settings: ChatSettings = _DEFAULTS
) -> list[list[int]]:
    """Return the token prefixes that a prompt stands for: one, or one a text of a completion's.

    A chat that waits for the user gives what all ways to go on have in common, any other one its
    whole prompt. `settings` are those of the server that is to find them. Raises
    `InvalidRequestError` for what the template refuses.
    """
    if isinstance(prompt.body, CompletionBody):
        special = prompt.body.add_special_tokens is not False
        return [
            part if isinstance(part, list) else encoder.encode(part, add_special_tokens=special)
            for part in split_prompt(prompt.body.prompt)
        ]
    if isinstance(prompt.body, PromptBody):
        return [_chat_tokens(anthropic_chat(prompt.body, settings), encoder)]
    if isinstance(prompt.body, ResponsesBody):
        return [_chat_tokens(whole_chat(prompt.body), encoder)]
    return [_chat_tokens(openai_chat(prompt.body), encoder)]


def warm_request(blocks: Sequence[int]) -> GenerationRequest:
    """Return the request that has whole blocks of tokens computed and stored."""
    return GenerationRequest(
        request_id=f"warm-{uuid.uuid4().hex}",
        # One more token, whichever: blocks do not depend on what follows, and it is not stored.
        prompt=pack_tokens([*blocks, blocks[0]]),
        sampling=SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True),
        priority=WARM_PRIORITY,
        is_warm=True,
    )


def whole_blocks(tokens: list[int], block_size: int) -> list[int]:
    """Return the tokens without those of an incomplete last block, which is never stored."""
    return tokens[: len(tokens) // block_size * block_size]


def _chat_tokens(chat: ChatInput, encoder: PromptEncoder) -> list[int]:
    options = chat.render_options
    if is_whole_request(chat.messages) or options.get("continue_final_message"):
        return encoder.encode_chat(chat.messages, **options)
    return open_prefix(chat.messages, lambda part: encoder.encode_chat(part, **options))
