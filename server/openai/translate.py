"""From a checked request body to what the engine computes: limits, defaults and sampling."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from vllm_mlx.engine.config import ModelInfo
from vllm_mlx.engine.core.outputs import pack_tokens
from vllm_mlx.engine.core.request import GenerationRequest, SamplingParams
from vllm_mlx.engine.core.request_check import check_prompt_length
from vllm_mlx.engine.errors import InvalidRequestError
from vllm_mlx.server.answers.plan import AnswerPlan
from vllm_mlx.server.config import FALLBACK_TEMPERATURE, FALLBACK_TOP_P, ServerConfig
from vllm_mlx.server.openai.schemas import ChatCompletionBody, CompletionBody, GenerationBody

#: Bounds of what stop matching is asked to carry through every token.
MAX_STOP_STRINGS = 64
MAX_STOP_LENGTH = 1024

#: Of an answer that is sent whole, the engine reports this many tokens at a time.
WHOLE_ANSWER_INTERVAL = 16

#: Seeds are taken modulo this, so that negative ones are as good as others.
_SEED_RANGE = 2**64

#: No token id has more digits.
_MAX_ID_DIGITS = 10


@dataclass(frozen=True)
class Limits:
    """Hold what the server and the model allow, and the defaults where a request says nothing."""

    info: ModelInfo
    default_max_tokens: int
    max_request_tokens: int
    stream_interval: int
    vocab_size: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float

    @classmethod
    def of(cls, config: ServerConfig, info: ModelInfo, vocab_size: int) -> Limits:
        """Combine flags, the model's own defaults and the fallbacks, in this order."""
        own = info.generation_defaults
        return cls(
            info=info,
            default_max_tokens=config.default_max_tokens,
            max_request_tokens=config.max_request_tokens,
            stream_interval=config.stream_interval,
            vocab_size=vocab_size,
            temperature=_first(
                config.default_temperature, own.get("temperature"), FALLBACK_TEMPERATURE
            ),
            top_p=_first(config.default_top_p, own.get("top_p"), FALLBACK_TOP_P),
            top_k=int(_first(config.default_top_k, own.get("top_k"), 0)),
            min_p=_first(config.default_min_p, own.get("min_p"), 0.0),
            repetition_penalty=_first(
                config.default_repetition_penalty, own.get("repetition_penalty"), 1.0
            ),
            presence_penalty=_first(config.default_presence_penalty, 0.0),
            frequency_penalty=_first(config.default_frequency_penalty, 0.0),
        )


def generation_request(
    body: GenerationBody,
    request_id: str,
    prompt: list[int],
    prompt_param: str,
    limits: Limits,
    *,
    choice: int = 0,
    client: str = "",
    plan: AnswerPlan | None = None,
    grammar: str | None = None,
) -> GenerationRequest:
    """Resolve the request for one choice of one prompt, from the field `prompt_param`.

    `plan` is that of a chat, `grammar` that of an answer to a plain prompt.

    Raises what `check_prompt_length` does for a prompt that leaves no room for one token, and
    `InvalidRequestError` for values outside the server's limits.
    """
    _check_prompt(prompt, prompt_param, limits)
    sampling = _sampling(body, len(prompt), limits, choice, grammar)
    return GenerationRequest(
        request_id=request_id,
        prompt=pack_tokens(prompt),
        sampling=sampling if plan is None else plan.sampling(sampling),
        # vLLM's meaning: of two requests the one with the lower number goes first.
        priority=-(body.priority or 0),
        client=client,
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
    check_prompt_length(len(prompt), limits.info, param=param)
    if max(prompt) >= limits.vocab_size:
        raise InvalidRequestError(
            f"{param} has the token {max(prompt)}, but the vocabulary ends at "
            f"{limits.vocab_size - 1}",
            param=param,
        )


def logprobs_of(body: GenerationBody) -> int | None:
    """Return how many alternatives of each token are asked for; None for no log-probabilities."""
    if isinstance(body, CompletionBody):
        return body.logprobs
    if not isinstance(body, ChatCompletionBody):
        return None
    if body.logprobs:
        return body.top_logprobs or 0
    if body.top_logprobs:
        raise InvalidRequestError(
            "top_logprobs is only allowed when logprobs is true", param="top_logprobs"
        )
    return None


def _sampling(
    body: GenerationBody, prompt_len: int, limits: Limits, choice: int, grammar: str | None
) -> SamplingParams:
    max_tokens = min(_requested_tokens(body, limits), limits.info.max_model_len - prompt_len)
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
    logprobs = logprobs_of(body)
    return SamplingParams(
        temperature=_first(body.temperature, limits.temperature),
        top_p=_first(body.top_p, limits.top_p),
        top_k=max(0, body.top_k if body.top_k is not None else limits.top_k),
        min_p=_first(body.min_p, limits.min_p),
        seed=None if body.seed is None else choice_seed(body.seed, choice),
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        stop=stop_strings(body.stop),
        stop_token_ids=stop_ids,
        ignore_eos=bool(body.ignore_eos),
        repetition_penalty=_first(body.repetition_penalty, limits.repetition_penalty),
        presence_penalty=_first(body.presence_penalty, limits.presence_penalty),
        frequency_penalty=_first(body.frequency_penalty, limits.frequency_penalty),
        logit_bias=_logit_bias(body.logit_bias or {}, limits.vocab_size),
        logprobs=logprobs,
        prompt_logprobs=logprobs if body.echo else None,
        grammar=grammar,
    )


def choice_seed(seed: int, choice: int) -> int:
    """Return the seed of one of several choices; the first has the request's own.

    The others' share nothing with those of neighbouring seeds, as `seed + choice` would.
    """
    seed %= _SEED_RANGE
    if choice == 0:
        return seed
    digest = hashlib.sha256(f"{seed}:{choice}".encode()).digest()
    return int.from_bytes(digest[:8], "little")


def _logit_bias(given: Mapping[str, float], vocab_size: int) -> tuple[tuple[int, float], ...]:
    biases: dict[int, float] = {}
    for key, bias in given.items():
        is_number = key.isascii() and key.isdigit() and len(key) <= _MAX_ID_DIGITS
        if not is_number or int(key) >= vocab_size:
            raise InvalidRequestError(
                f"logit_bias has the key {key[:20]!r}; its keys are token ids, and the "
                f"vocabulary ends at {vocab_size - 1}",
                param="logit_bias",
            )
        biases[int(key)] = bias
    return tuple((token, bias) for token, bias in biases.items() if bias)


def _requested_tokens(body: GenerationBody, limits: Limits) -> int:
    """Return how many tokens a request asks for; the newer of the two names goes first."""
    requested: Mapping[str, int | None] = {"max_tokens": body.max_tokens}
    if isinstance(body, ChatCompletionBody):
        requested = {"max_completion_tokens": body.max_completion_tokens, **requested}
    for param, value in requested.items():
        if value is None:
            continue
        if value == 0 and not body.echo:
            raise InvalidRequestError(
                f"{param} is 0: only a completion that echoes its prompt may be empty", param=param
            )
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
