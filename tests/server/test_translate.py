"""From fields to sampling: defaults in their order, limits, and what the engine receives."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from vllm_mlx.engine.config import ModelInfo
from vllm_mlx.engine.core.outputs import unpack_tokens
from vllm_mlx.engine.core.request import GenerationRequest
from vllm_mlx.engine.errors import ContextLengthExceededError, InvalidRequestError
from vllm_mlx.server.config import ServerConfig
from vllm_mlx.server.openai.schemas import ChatCompletionBody, CompletionBody
from vllm_mlx.server.openai.translate import Limits, choice_seed, generation_request

INFO = ModelInfo(
    model="m",
    path="/m",
    model_type="fake",
    max_model_len=50,
    dtype="float32",
    weights_bytes=1,
    kv_bytes_per_token=1,
    kv_budget_bytes=1,
    kv_max_tokens=50,
    device="cpu",
)


def translate(
    fields: dict[str, Any] | None = None,
    *,
    prompt: list[int] | None = None,
    own: dict[str, float] | None = None,
    **config: Any,
) -> GenerationRequest:
    """Translate a chat with `fields` for a model with its `own` defaults and a server's flags."""
    body = ChatCompletionBody.model_validate(
        {"messages": [{"role": "user", "content": "x"}], **(fields or {})}
    )
    limits = Limits.of(
        ServerConfig(**config), msgspec.structs.replace(INFO, generation_defaults=own or {}), 1000
    )
    return generation_request(body, "id", prompt or [1, 2, 3], "messages", limits)


@pytest.mark.parametrize(
    ("fields", "config", "own", "expected"),
    [
        ({}, {}, {}, (0.7, 0.9)),
        ({}, {}, {"temperature": 0.6, "top_p": 0.95}, (0.6, 0.95)),
        ({}, {"default_temperature": 0.5}, {"temperature": 0.6, "top_p": 0.95}, (0.5, 0.95)),
        (
            {"temperature": 0, "top_p": 1},
            {"default_temperature": 0.5, "default_top_p": 0.8},
            {"temperature": 0.6},
            (0.0, 1.0),
        ),
        ({"temperature": None}, {"default_temperature": 0.0}, {"temperature": 0.6}, (0.0, 0.9)),
    ],
)
def test_defaults_come_from_request_flag_model_and_fallback(
    fields: dict[str, Any],
    config: dict[str, Any],
    own: dict[str, float],
    expected: tuple[float, float],
) -> None:
    """The nearest that says something wins, zero included."""
    sampling = translate(fields, own=own, **config).sampling
    assert (sampling.temperature, sampling.top_p) == expected


def test_the_models_top_k_and_min_p_hold_until_the_request_says_otherwise() -> None:
    """-1 and 0 both turn top_k off."""
    own = {"top_k": 20.0, "min_p": 0.05}
    assert translate({}, own=own).sampling.top_k == 20
    assert translate({}, own=own).sampling.min_p == 0.05
    assert translate({"top_k": -1, "min_p": 0}, own=own).sampling.top_k == 0
    assert translate({"top_k": 5}, own=own).sampling.top_k == 5


@pytest.mark.parametrize(
    ("fields", "config", "expected"),
    [
        ({}, {}, 47),
        ({}, {"default_max_tokens": 10}, 10),
        ({"max_tokens": 5}, {}, 5),
        ({"max_completion_tokens": 6, "max_tokens": 5}, {}, 6),
        ({"max_tokens": 100}, {}, 47),
    ],
)
def test_completions_are_bounded_by_request_flag_and_context(
    fields: dict[str, Any], config: dict[str, Any], expected: int
) -> None:
    """What does not fit beside the prompt is clamped."""
    assert translate(fields, **config).sampling.max_tokens == expected


def test_more_than_the_server_allows_is_refused() -> None:
    """Over `--max-request-tokens` is an error, not a clamp."""
    with pytest.raises(InvalidRequestError, match="limit of 20") as caught:
        translate({"max_tokens": 21}, max_request_tokens=20, default_max_tokens=20)
    assert caught.value.param == "max_tokens"


@pytest.mark.parametrize("length", [50, 51])
def test_a_prompt_that_fills_the_context_is_refused(length: int) -> None:
    """There must be room for one token."""
    with pytest.raises(ContextLengthExceededError):
        translate(prompt=[1] * length)


def test_a_prompt_one_below_the_context_gets_one_token() -> None:
    """The last place is used."""
    assert translate(prompt=[1] * 49).sampling.max_tokens == 1


def test_everything_else_reaches_the_engine() -> None:
    """Each enforced field has its place in the engine's request."""
    request = translate(
        {
            "stop": ["a", "b"],
            "stop_token_ids": [7],
            "ignore_eos": True,
            "min_tokens": 2,
            "seed": -1,
            "stream": True,
        },
        stream_interval=3,
    )
    sampling = request.sampling
    assert sampling.stop == ("a", "b")
    assert sampling.stop_token_ids == (7,)
    assert sampling.ignore_eos
    assert sampling.min_tokens == 2
    assert sampling.seed == 2**64 - 1
    assert request.stream_interval == 3
    assert unpack_tokens(request.prompt) == [1, 2, 3]
    assert translate({"stop": "end"}).sampling.stop == ("end",)
    assert translate({"stop": []}).sampling.stop == ()
    assert translate({}).sampling.seed is None


@pytest.mark.parametrize(
    ("fields", "config", "own", "expected"),
    [
        ({}, {}, {}, (0, 0.0, 1.0, 0.0, 0.0)),
        ({}, {}, {"top_k": 20, "min_p": 0.1, "repetition_penalty": 1.1}, (20, 0.1, 1.1, 0.0, 0.0)),
        (
            {},
            {
                "default_top_k": 0,
                "default_min_p": 0.0,
                "default_repetition_penalty": 1.2,
                "default_presence_penalty": 0.3,
                "default_frequency_penalty": -0.3,
            },
            {"top_k": 20, "min_p": 0.1, "repetition_penalty": 1.1},
            (0, 0.0, 1.2, 0.3, -0.3),
        ),
        (
            {
                "top_k": -1,
                "min_p": 0.2,
                "repetition_penalty": 1,
                "presence_penalty": 0,
                "frequency_penalty": 0,
            },
            {
                "default_top_k": 7,
                "default_repetition_penalty": 1.2,
                "default_presence_penalty": 0.3,
                "default_frequency_penalty": -0.3,
            },
            {"min_p": 0.1},
            (0, 0.2, 1.0, 0.0, 0.0),
        ),
    ],
)
def test_every_setting_comes_from_request_flag_and_model_in_this_order(
    fields: dict[str, Any],
    config: dict[str, Any],
    own: dict[str, float],
    expected: tuple[float, ...],
) -> None:
    """A value that changes nothing, where a request says it, stands over every default."""
    sampling = translate(fields, own=own, **config).sampling
    assert expected == (
        sampling.top_k,
        sampling.min_p,
        sampling.repetition_penalty,
        sampling.presence_penalty,
        sampling.frequency_penalty,
    )


def test_biases_are_numbers_by_token() -> None:
    """Keys are token ids in JSON's strings; a bias of nothing is left out."""
    sampling = translate({"logit_bias": {"5": -100, "007": 1.5, "9": 0}}).sampling
    assert sampling.logit_bias == ((5, -100.0), (7, 1.5))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"logprobs": False}, None),
        ({"logprobs": False, "top_logprobs": 0}, None),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 20}, 20),
    ],
)
def test_a_chat_asks_for_log_probabilities_in_two_fields(
    fields: dict[str, Any], expected: int | None
) -> None:
    """One says whether, the other how many alternatives."""
    assert translate(fields).sampling.logprobs == expected


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, (None, None)),
        ({"echo": True}, (None, None)),
        ({"logprobs": 3}, (3, None)),
        ({"logprobs": 0, "echo": True}, (0, 0)),
        ({"logprobs": 1, "echo": True, "max_tokens": 0}, (1, 1)),
    ],
)
def test_a_completion_that_echoes_asks_for_those_of_its_prompt_too(
    fields: dict[str, Any], expected: tuple[int | None, int | None]
) -> None:
    """Only then is every position of the prompt looked at."""
    body = CompletionBody.model_validate({"prompt": "x", **fields})
    limits = Limits.of(ServerConfig(), INFO, 1000)
    sampling = generation_request(body, "id", [1, 2], "prompt", limits).sampling
    assert (sampling.logprobs, sampling.prompt_logprobs) == expected
    assert sampling.max_tokens == fields.get("max_tokens", 48)


def test_choices_have_seeds_of_their_own() -> None:
    """The first has the request's, and those of neighbouring seeds have nothing in common."""
    assert choice_seed(5, 0) == 5
    assert choice_seed(-1, 0) == 2**64 - 1
    seeds = [choice_seed(seed, choice) for seed in range(20) for choice in range(20)]
    assert len(set(seeds)) == 400
    assert choice_seed(7, 3) == choice_seed(7 + 2**64, 3)


def test_stop_strings_are_bounded() -> None:
    """Neither their number nor their length can slow every token down."""
    for stop in (["x"] * 65, ["y" * 1025]):
        with pytest.raises(InvalidRequestError) as caught:
            translate({"stop": stop})
        assert caught.value.param == "stop"
