"""Say in which message a prompt departed from what is stored, while logging for debugging."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vllm_mlx.engine.core.common_prefix import common_length
from vllm_mlx.engine.errors import InvalidRequestError
from vllm_mlx.server.generation import Generation
from vllm_mlx.server.request_context import RequestContext
from vllm_mlx.server.tokenizer_pool import TokenizerPool

logger = logging.getLogger(__name__)

Message = Mapping[str, Any]


def explain_departure(
    context: RequestContext,
    generation: Generation,
    tokenizers: TokenizerPool,
    messages: Sequence[Message],
    options: Mapping[str, Any],
) -> None:
    """Have it logged, when the request is over, where its prompt departed from what is stored.

    Does nothing unless this module logs for debugging: it renders the chat several times.
    """
    if not logger.isEnabledFor(logging.DEBUG):
        return

    async def explain() -> None:
        token = generation.departs_at
        if token is None:
            return
        place = await tokenizers.run(
            lambda codec: message_at(token, messages, options, codec.encode_chat)
        )
        logger.debug(
            "request %s: the prompt departs from the nearest stored one at token %d, in %s",
            context.id,
            token,
            "what follows its last message"
            if place is None
            else f"messages[{place}] ({messages[place]['role']})",
        )

    context.closing.push_async_callback(explain)


def message_at(
    token: int,
    messages: Sequence[Message],
    options: Mapping[str, Any],
    encode_chat: Callable[..., list[int]],
) -> int | None:
    """Return which message a prompt's token belongs to; None if it comes after all of them.

    What a template puts before the first message, such as tools, counts as the first's.
    """
    whole = encode_chat(messages, **options)
    alone = {**options, "add_generation_prompt": False}
    alone.pop("continue_final_message", None)

    def reaches(count: int) -> bool:
        """Say whether the token is in the first `count` messages, or more if a template insists."""
        try:
            tokens = encode_chat(messages[:count], **alone)
        except InvalidRequestError:
            return count < len(messages) and reaches(count + 1)
        return common_length(tokens, whole) > token

    low, high = 1, len(messages)
    if not reaches(high):
        return None
    while low < high:
        middle = (low + high) // 2
        if reaches(middle):
            high = middle
        else:
            low = middle + 1
    return low - 1
