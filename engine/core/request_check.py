"""Refuse, with the reason, a request that the engine could never serve; pure."""

from __future__ import annotations

import math

from vllm_mlx.engine.config import ModelInfo
from vllm_mlx.engine.core.request import SamplingParams
from vllm_mlx.engine.core.sequence import Sequence
from vllm_mlx.engine.errors import (
    ContextLengthExceededError,
    InvalidRequestError,
    RequestTooLargeError,
)


def check_request(sequence: Sequence, info: ModelInfo, vocab_size: int) -> None:
    """Raise the InvalidRequestError that says why `sequence` cannot be served, if it cannot."""
    num_tokens = len(sequence.prompt)
    if num_tokens == 0:
        raise InvalidRequestError("the prompt is empty: it has no tokens", param="prompt")
    worst = min(sequence.prompt), max(sequence.prompt)
    if worst[0] < 0 or worst[1] >= vocab_size:
        wrong = worst[0] if worst[0] < 0 else worst[1]
        raise InvalidRequestError(
            f"token id {wrong} is outside the vocabulary of {vocab_size} tokens", param="prompt"
        )
    check_prompt_length(num_tokens, info, param="prompt")
    _check_sampling(sequence.sampling, vocab_size)


def _check_sampling(sampling: SamplingParams, vocab_size: int) -> None:
    if sampling.max_tokens < 0:
        raise InvalidRequestError(
            f"max_tokens must not be negative, but is {sampling.max_tokens}", param="max_tokens"
        )
    if not 0.0 < sampling.repetition_penalty < math.inf:
        raise InvalidRequestError(
            f"repetition_penalty must be above 0, not {sampling.repetition_penalty}",
            param="repetition_penalty",
        )
    for name in ("presence_penalty", "frequency_penalty"):
        if not math.isfinite(getattr(sampling, name)):
            raise InvalidRequestError(f"{name} must be a finite number", param=name)
    for token, bias in sampling.logit_bias:
        if not 0 <= token < vocab_size or not math.isfinite(bias):
            raise InvalidRequestError(
                f"logit_bias has {token}: {bias}; it must map token ids below {vocab_size} to "
                "finite numbers",
                param="logit_bias",
            )


def check_prompt_length(num_tokens: int, info: ModelInfo, *, param: str) -> None:
    """Raise if a prompt of `num_tokens` leaves no room for a single new token; `param` names it.

    ContextLengthExceededError where the model's context is the limit, RequestTooLargeError where
    the KV budget is.
    """
    if num_tokens >= info.max_model_len:
        raise ContextLengthExceededError(
            f"This model's maximum context length is {info.max_model_len} tokens. However, the "
            f"prompt has {num_tokens} tokens and leaves no room for a completion. Please shorten "
            "the prompt.",
            param=param,
        )
    if num_tokens >= info.kv_max_tokens:
        raise RequestTooLargeError(
            f"The prompt has {num_tokens} tokens, but the KV budget of "
            f"{info.kv_budget_bytes / 2**20:,.0f} MiB holds at most {info.kv_max_tokens} tokens of "
            "one request. Shorten the prompt, or start the server with a larger --kv-memory-mb.",
            param=param,
        )
