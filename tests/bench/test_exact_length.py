"""Hold prompts to their exact length with tokenizers of several kinds."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from vllm_mlx.bench.exact_length import PromptBuilder, shared_text
from vllm_mlx.bench.vocabulary import MEASURED_FIRST_WORDS, beginnings
from vllm_mlx.engine.errors import UsageError

TEMPLATE = 11

#: Tokens of one word, by the kind of tokenizer.
TOKENIZERS: dict[str, Callable[[str], int]] = {
    "words": lambda word: 1,
    "short pieces": lambda word: -(-len(word) // 3),
    "letters": len,
    "odd": lambda word: 1 + (len(word) > 4) + (word[0] in "tw"),
}


class Counter:
    """Count tokens by a rule, and the times it was asked."""

    source = "tokenize"
    is_cheap = True

    def __init__(self, tokens_of: Callable[[str], int]) -> None:
        self._tokens_of = tokens_of
        self.num_asked = 0

    async def count(self, messages: Sequence[Any], beginning: str) -> int:
        """Return the tokens of all words and the template."""
        self.num_asked += 1
        assert messages[0]["content"].startswith(beginning)
        words = " ".join(message["content"] for message in messages).split()
        return TEMPLATE + sum(map(self._tokens_of, words))


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("num_tokens", [64, 300, 1500])
def test_every_prompt_is_exact(name: str, num_tokens: int) -> None:
    """Whatever a word costs, each prompt has its length, found in few questions."""
    counter = Counter(TOKENIZERS[name])

    async def build() -> None:
        starts = beginnings(MEASURED_FIRST_WORDS, random.Random(1))
        builder = PromptBuilder(counter, num_tokens, starts, random.Random(2))
        prompts = [await builder.build(str(number)) for number in range(10)]
        counter.num_asked = 0
        for prompt in prompts:
            assert await counter.count(prompt.messages, "") == num_tokens
        texts = {prompt.messages[0]["content"] for prompt in prompts}
        assert len(texts) == len(prompts)

    asyncio.run(build())


@pytest.mark.parametrize("is_shared_first", [True, False])
def test_a_shared_prefix_is_part_of_the_length(is_shared_first: bool) -> None:
    """The shared text counts, and has the tokens that it was asked to have."""
    counter = Counter(TOKENIZERS["odd"])

    async def build() -> None:
        shared = await shared_text(counter, 80, random.Random(3))
        assert abs(sum(map(TOKENIZERS["odd"], shared.split())) - 80) <= 2
        starts = beginnings(MEASURED_FIRST_WORDS, random.Random(1))
        builder = PromptBuilder(
            counter, 200, starts, random.Random(2), shared=shared, is_shared_first=is_shared_first
        )
        prompt = await builder.build("p")
        assert await counter.count(prompt.messages, "") == 200
        assert prompt.messages[0]["content"].startswith(shared) == is_shared_first
        assert shared in prompt.messages[0]["content"]

    asyncio.run(build())


def test_a_length_below_the_template() -> None:
    """A length that no prompt can have is refused with the least that can be."""

    async def build() -> None:
        starts = beginnings(MEASURED_FIRST_WORDS, random.Random(1))
        builder = PromptBuilder(Counter(TOKENIZERS["words"]), 10, starts, random.Random(2))
        with pytest.raises(UsageError, match=r"no prompt has 10 tokens here: .* take about 16"):
            await builder.build("p")

    asyncio.run(build())
