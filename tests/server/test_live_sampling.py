"""Log-probabilities, echoes, choices and biases through the real client, from a real engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import openai
import pytest
from mlx_lm.utils import load_model
from support.server_process import ServerProcess
from support.tiny_folder import write_tiny_folder

Messages = list[Any]
HELLO: Messages = [{"role": "user", "content": "Hello there"}]
PROMPT = list(range(500, 600))


pytestmark = pytest.mark.thorough


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, demo_model_path: Path) -> Path:
    """Return the folder of a tiny model."""
    return write_tiny_folder(tmp_path_factory.mktemp("tiny"), demo_model_path)


@pytest.fixture(scope="module")
def client(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    """Return a client of a server of that model."""
    options = ("--kv-memory-mb", "64", "--default-frequency-penalty", "2")
    with ServerProcess(str(folder), tmp_path_factory.mktemp("live"), *options) as process:
        url = process.wait_ready().url
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as made:
            yield made


def log_softmax_after(folder: Path, tokens: list[int]) -> np.ndarray:
    """Return mlx-lm's log-probabilities `[T, V]` after each token, in one plain forward."""
    model, _ = load_model(folder)
    logits = model(mx.array(tokens)[None])[0].astype(mx.float32)
    return np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))


def test_a_streamed_chat_has_the_log_probabilities_of_the_whole_one(client: openai.OpenAI) -> None:
    """One entry for each token that was generated, and their bytes are the text."""
    arguments: dict[str, Any] = {
        "model": "default",
        "messages": HELLO,
        "max_tokens": 12,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 3,
        "extra_body": {"ignore_eos": True},
    }
    whole = client.chat.completions.create(**arguments).choices[0]
    assert whole.logprobs is not None
    entries = whole.logprobs.content or []
    assert len(entries) == 12
    text = b"".join(bytes(entry.bytes or []) for entry in entries).decode("utf-8", "replace")
    assert text == whole.message.content
    for entry in entries:
        values = [top.logprob for top in entry.top_logprobs]
        assert len(values) == 3
        assert values == sorted(values, reverse=True)
    streamed = [
        entry
        for chunk in client.chat.completions.create(**arguments, stream=True)
        for choice in chunk.choices
        if choice.logprobs is not None
        for entry in choice.logprobs.content or []
    ]
    assert [entry.token for entry in streamed] == [entry.token for entry in entries]
    assert [entry.logprob for entry in streamed] == pytest.approx(
        [entry.logprob for entry in entries], abs=1e-4
    )


def test_an_echoed_prompt_has_the_log_probabilities_of_the_model(
    client: openai.OpenAI, folder: Path
) -> None:
    """Asked twice, so that the second time its prefix is stored; nothing else is generated."""
    for _ in range(2):
        answer = client.completions.create(
            model="default", prompt=PROMPT, echo=True, logprobs=2, max_tokens=0
        )
        (choice,) = answer.choices
        assert choice.finish_reason == "length"
        assert answer.usage is not None
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (100, 0)
        assert choice.logprobs is not None
        values = choice.logprobs.token_logprobs or []
        truth = log_softmax_after(folder, PROMPT)
        assert values[0] is None
        expected = [truth[index, token] for index, token in enumerate(PROMPT[1:])]
        assert values[1:] == pytest.approx(expected, abs=1e-3)
        assert "".join(choice.logprobs.tokens or []) == choice.text
        offsets = choice.logprobs.text_offset or []
        assert offsets == [
            len("".join((choice.logprobs.tokens or [])[:index])) for index in range(100)
        ]


def test_choices_are_their_own_and_come_again(client: openai.OpenAI) -> None:
    """A seed gives the same choices again, and the first of them is the answer to n=1."""
    arguments: dict[str, Any] = {
        "model": "default",
        "prompt": PROMPT,
        "max_tokens": 8,
        "temperature": 1,
        "seed": 5,
    }
    first = client.completions.create(**arguments, n=3)
    again = client.completions.create(**arguments, n=3)
    alone = client.completions.create(**arguments)
    texts = [choice.text for choice in first.choices]
    assert texts == [choice.text for choice in again.choices]
    assert len(set(texts)) == 3
    assert alone.choices[0].text == texts[0]
    assert first.usage is not None
    assert first.usage.prompt_tokens == 100
    assert first.usage.completion_tokens <= 24


def test_a_bias_and_a_default_penalty_take_effect(client: openai.OpenAI) -> None:
    """A large bias decides every token; the server's own penalty works and can be undone."""
    arguments: dict[str, Any] = {
        "model": "default",
        "prompt": [700, 701],
        "max_tokens": 16,
        "temperature": 0,
        "logprobs": 0,
    }

    def tokens(**fields: Any) -> tuple[list[str], list[float]]:
        logprobs = client.completions.create(**arguments, **fields).choices[0].logprobs
        assert logprobs is not None
        return logprobs.tokens or [], [value or 0.0 for value in logprobs.token_logprobs or []]

    biased, values = tokens(logit_bias={"500": 100})
    assert len(set(biased)) == 1
    # As unlikely as without the bias.
    assert max(values) < -3
    by_default, _ = tokens(logit_bias={"500": 10})
    explicit, _ = tokens(logit_bias={"500": 10}, frequency_penalty=2)
    undone, _ = tokens(logit_bias={"500": 10}, frequency_penalty=0)
    assert by_default == explicit
    assert undone == biased
    assert len(set(by_default)) > 1
