"""From a checked request body to what the engine computes: limits, defaults and sampling."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from vllm_mlx.engine.config import ModelInfo
from vllm_mlx.engine.core.outputs import pack_tokens
from vllm_mlx.engine.core.request import GenerationRequest, SamplingParams
from vllm_mlx.engine.errors import ContextLengthExceededError, InvalidRequestError
from vllm_mlx.server.config import FALLBACK_TEMPERATURE, FALLBACK_TOP_P, ServerConfig
from vllm_mlx.server.openai.schemas import ChatCompletionBody, GenerationBody

#: Bounds of what stop matching is asked to carry through every token.
MAX_STOP_STRINGS = 64
MAX_STOP_LENGTH = 1024

#: Of an answer that is sent whole, the engine reports this many tokens at a time.
WHOLE_ANSWER_INTERVAL = 16

#: Seeds are taken modulo this, so that negative ones are as good as others.
_SEED_RANGE = 2**64


@dataclass(frozen=True)
class Limits:
    """Hold what the server and the model allow, and the defaults where a request says nothing."""

    max_model_len: int
    default_max_tokens: int
    max_request_tokens: int
    stream_interval: int
    vocab_size: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float

    @classmethod
    def of(cls, config: ServerConfig, info: ModelInfo, vocab_size: int) -> Limits:
        """Combine flags, the model's own defaults and the fallbacks, in this order."""
        own = info.generation_defaults
        return cls(
            max_model_len=info.max_model_len,
            default_max_tokens=config.default_max_tokens,
            max_request_tokens=config.max_request_tokens,
            stream_interval=config.stream_interval,
            vocab_size=vocab_size,
            temperature=_first(
                config.default_temperature, own.get("temperature"), FALLBACK_TEMPERATURE
            ),
            top_p=_first(config.default_top_p, own.get("top_p"), FALLBACK_TOP_P),
            top_k=int(own.get("top_k", 0)),
            min_p=float(own.get("min_p", 0.0)),
        )


def generation_request(
    body: GenerationBody, request_id: str, prompt: list[int], prompt_param: str, limits: Limits
) -> GenerationRequest:
    """Resolve one prompt's request; `prompt_param` names the field that the prompt came from.

    Raises `ContextLengthExceededError` for a prompt that leaves no room for one token, and
    `InvalidRequestError` for values outside the server's limits.
    """
    _check_prompt(prompt, prompt_param, limits)
    return GenerationRequest(
        request_id=request_id,
        prompt=pack_tokens(prompt),
        sampling=_sampling(body, len(prompt), limits),
        stream_interval=limits.stream_interval if body.stream else WHOLE_ANSWER_INTERVAL,
    )


def stop_strings(stop: str | list[str] | None) -> tuple[str, ...]:
    """Return the stop strings of a request; raise `InvalidRequestError` for an empty one."""
    strings = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if "" in strings:
        raise InvalidRequestError("stop must not hold an empty string", param="stop")
    if len(strings) > MAX_STOP_STRINGS:
        raise InvalidRequestError(
            f"stop holds {len(strings)} strings; at most {MAX_STOP_STRINGS} are allowed",
            param="stop",
        )
    if any(len(string) > MAX_STOP_LENGTH for string in strings):
        raise InvalidRequestError(
            f"a stop string is longer than {MAX_STOP_LENGTH} characters", param="stop"
        )
    return strings


def _check_prompt(prompt: list[int], param: str, limits: Limits) -> None:
    if not prompt:
        raise InvalidRequestError(f"{param} is empty: it has no tokens", param=param)
    if len(prompt) >= limits.max_model_len:
        raise ContextLengthExceededError(
            f"This model's maximum context length is {limits.max_model_len} tokens, and {param} "
            f"alone has {len(prompt)}, which leaves no room for an answer; shorten it",
            param=param,
        )
    if max(prompt) >= limits.vocab_size:
        raise InvalidRequestError(
            f"{param} has the token {max(prompt)}, but the vocabulary ends at "
            f"{limits.vocab_size - 1}",
            param=param,
        )


def _sampling(body: GenerationBody, prompt_len: int, limits: Limits) -> SamplingParams:
    max_tokens = min(_requested_tokens(body, limits), limits.max_model_len - prompt_len)
    min_tokens = body.min_tokens or 0
    if min_tokens > max_tokens:
        raise InvalidRequestError(
            f"min_tokens is {min_tokens}, but at most {max_tokens} can be generated",
            param="min_tokens",
        )
    stop_ids = tuple(body.stop_token_ids or ())
    if stop_ids and max(stop_ids) >= limits.vocab_size:
        raise InvalidRequestError(
            f"stop_token_ids has {max(stop_ids)}, but the vocabulary ends at "
            f"{limits.vocab_size - 1}",
            param="stop_token_ids",
        )
    return SamplingParams(
        temperature=_first(body.temperature, limits.temperature),
        top_p=_first(body.top_p, limits.top_p),
        top_k=max(0, body.top_k if body.top_k is not None else limits.top_k),
        min_p=_first(body.min_p, limits.min_p),
        seed=None if body.seed is None else body.seed % _SEED_RANGE,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        stop=stop_strings(body.stop),
        stop_token_ids=stop_ids,
        ignore_eos=bool(body.ignore_eos),
    )


def _requested_tokens(body: GenerationBody, limits: Limits) -> int:
    """Return how many tokens a request asks for; the newer of the two names goes first."""
    requested: Mapping[str, int | None] = {"max_tokens": body.max_tokens}
    if isinstance(body, ChatCompletionBody):
        requested = {"max_completion_tokens": body.max_completion_tokens, **requested}
    for param, value in requested.items():
        if value is None:
            continue
        if value > limits.max_request_tokens:
            raise InvalidRequestError(
                f"{param} is {value}, over this server's limit of {limits.max_request_tokens} "
                "(--max-request-tokens)",
                param=param,
            )
        return value
    return limits.default_max_tokens


def _first(*values: float | None) -> float:
    """Return the first value that is set."""
    return float(next(value for value in values if value is not None))
