"""Prompts of exactly so many tokens, by the server's own count."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Mapping
from typing import Any

from vllm_mlx.bench.prompt import Prompt
from vllm_mlx.bench.token_counting import TokenCounter
from vllm_mlx.bench.vocabulary import BODY_WORDS, NUM_MARK_WORDS, body_words
from vllm_mlx.engine.errors import UsageError

#: Words of the first two guesses, from which the rest is estimated.
_FIRST_GUESSES = (8, 72)
#: Words given up so that another can take their place.
_MAX_DROPPED = 3


@dataclasses.dataclass
class _Fit:
    """Hold what the prompts so far taught: words beside the beginning, and tokens a word."""

    num_words: int
    tokens_per_word: float


class PromptBuilder:
    """Build prompts of random words, each of exactly `num_tokens` tokens, template included.

    The words come from `rng`, and each prompt starts with the next of `beginnings`. With `shared`
    all have a system message of that text: before the beginning if `is_shared_first`, else after
    it, so that even the first tokens differ.
    """

    def __init__(
        self,
        counter: TokenCounter,
        num_tokens: int,
        beginnings: Iterator[str],
        rng: random.Random,
        *,
        shared: str | None = None,
        is_shared_first: bool = True,
    ) -> None:
        self._counter = counter
        self._num_tokens = num_tokens
        self._beginnings = beginnings
        self._rng = rng
        self._shared = shared
        self._is_shared_first = is_shared_first
        self._fit: _Fit | None = None

    async def build(self, prompt_id: str) -> Prompt:
        """Return the next prompt; raises `UsageError` when no prompt is that short."""
        beginning = next(self._beginnings)
        words = body_words(self._rng)
        # Enough for any tokenizer: a word is at least one token.
        text = [next(words) for _ in range(self._num_tokens)]
        if self._fit is None:
            self._fit = await self._first_fit(beginning, text)
        elif not self._counter.is_cheap:
            return self._prompt(prompt_id, beginning, text[: self._fit.num_words])
        found = await self._corrected(beginning, text, self._fit)
        return self._prompt(prompt_id, beginning, found)

    async def _first_fit(self, beginning: str, text: list[str]) -> _Fit:
        fewest, more = _FIRST_GUESSES
        low = await self._count(beginning, text[:fewest])
        if low > self._num_tokens:
            shortest = low - fewest
            if shortest > self._num_tokens:
                raise UsageError(
                    f"no prompt has {self._num_tokens} tokens here: template, beginning and "
                    f"shared prefix alone take about {shortest}"
                )
            return _Fit(max(0, fewest - (low - self._num_tokens)), 1.0)
        if len(text) < more:
            return _Fit(fewest + self._num_tokens - low, 1.0)
        high = await self._count(beginning, text[:more])
        tokens_per_word = max((high - low) / (more - fewest), 1.0)
        return _Fit(fewest + round((self._num_tokens - low) / tokens_per_word), tokens_per_word)

    async def _corrected(self, beginning: str, text: list[str], fit: _Fit) -> list[str]:
        """Return words that make the count exact, or nearly so where none can be found.

        The count grows with the words: between too few and too many the next guess is where the
        fit says, and somewhere between them in any case.
        """
        too_few, too_many = -1, len(text) + 1
        num_words = fit.num_words
        while too_many - too_few > 1:
            num_words = min(max(num_words, too_few + 1), too_many - 1)
            words = text[:num_words]
            missing = self._num_tokens - await self._count(beginning, words)
            if missing == 0:
                fit.num_words = num_words
                return words
            if missing > 0:
                too_few = num_words
            else:
                too_many = num_words
            num_words += round(missing / fit.tokens_per_word)
        nearly = text[: max(0, too_few)]
        if not self._counter.is_cheap:
            # Every further question would cost the server a whole prefill.
            return nearly
        return await self._with_other_last_words(beginning, nearly)

    async def _with_other_last_words(self, beginning: str, below: list[str]) -> list[str]:
        """Return `below` with another word at its end that makes the count exact, if there is one.

        Words of every length are tried: what a word costs grows with it, whatever the tokenizer.
        """
        by_length = {len(word): word for word in self._rng.sample(BODY_WORDS, len(BODY_WORDS))}
        for num_dropped in range(min(_MAX_DROPPED, len(below)) + 1):
            kept = below[: len(below) - num_dropped]
            for word in by_length.values():
                if await self._count(beginning, [*kept, word]) == self._num_tokens:
                    return [*kept, word]
        return below

    async def _count(self, beginning: str, words: list[str]) -> int:
        prompt = self._prompt("", beginning, words)
        start = beginning
        if self._shared is not None and self._is_shared_first:
            start = " ".join(self._shared.split()[:NUM_MARK_WORDS])
        return await self._counter.count(prompt.messages, start)

    def _prompt(self, prompt_id: str, beginning: str, words: list[str]) -> Prompt:
        body = " ".join(words)
        messages: list[Mapping[str, Any]]
        if self._shared is None:
            messages = [{"role": "user", "content": f"{beginning} {body}".strip()}]
        elif self._is_shared_first:
            messages = [
                {"role": "system", "content": self._shared},
                {"role": "user", "content": f"{beginning} {body}".strip()},
            ]
        else:
            messages = [
                {"role": "system", "content": f"{beginning} {self._shared}"},
                {"role": "user", "content": body},
            ]
        return Prompt(id=prompt_id, messages=tuple(messages))


async def shared_text(counter: TokenCounter, num_tokens: int, rng: random.Random) -> str:
    """Return a text that makes a system message `num_tokens` tokens longer than its first word.

    That word counts as one, so that the text itself has `num_tokens` tokens.
    """
    words = body_words(rng)
    text = [next(words) for _ in range(num_tokens)]

    async def count(num_words: int) -> int:
        system = " ".join(text[:num_words])
        messages = [
            {"role": "system", "content": system},
            {"role": "user", "content": "Continue."},
        ]
        return await counter.count(messages, text[0])

    base = await count(1)
    num_words, seen = num_tokens, set[int]()
    while num_words not in seen:
        seen.add(num_words)
        missing = num_tokens - 1 - (await count(num_words) - base)
        num_words = min(max(1, num_words + missing), len(text))
    return " ".join(text[:num_words])
