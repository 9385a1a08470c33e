"""Make a repetition's prompts: unique, shared or repeated, as the cache mode wants them."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping, Sequence
from typing import Any

from vllm_mlx.bench.exact_length import PromptBuilder, shared_text
from vllm_mlx.bench.plan import Planned
from vllm_mlx.bench.prompt import Prompt, cycled, user_prompt
from vllm_mlx.bench.requester import Requester
from vllm_mlx.bench.token_counting import CountedPrompt, TokenCounter, find_counter
from vllm_mlx.bench.vocabulary import (
    MEASURED_FIRST_WORDS,
    THROWAWAY_FIRST_WORDS,
    beginnings,
    unseen_rng,
)


@dataclasses.dataclass(frozen=True)
class Prepared:
    """Hold what a repetition sends: first to fill the cache, then to be measured."""

    priming: Sequence[Prompt]
    measured: Sequence[Prompt]


class Preparation:
    """Make the prompts of a run; owns the words that make them unique.

    A beginning that was once given out is never given out again, in this run or another, so that
    what starts with it is in no cache. Warm-up and calibration draw from first words of their own.
    """

    def __init__(
        self, requester: Requester, model: str, seed: int, extra: Mapping[str, Any]
    ) -> None:
        self._requester = requester
        self._model = model
        self._seed = seed
        self._extra = extra
        self._fresh = beginnings(MEASURED_FIRST_WORDS, unseen_rng())
        self._throwaway = beginnings(THROWAWAY_FIRST_WORDS, unseen_rng())
        self._counter: TokenCounter | None = None
        self._shared: dict[int, str] = {}
        self._known: CountedPrompt | None = None

    @property
    def tokens_source(self) -> str | None:
        """Return how lengths were counted, None if none had to be."""
        return self._counter.source if self._counter is not None else None

    def throwaway(self) -> Prompt:
        """Return a short prompt that nothing measured begins like."""
        return user_prompt("probe", next(self._throwaway))

    def learn(self, prompt: Prompt, num_tokens: int | None) -> None:
        """Take what `usage` said of a throw-away prompt: counters are held to it."""
        self._known = CountedPrompt(prompt.messages, num_tokens)

    def warmup(self, prompts: Sequence[Prompt], num: int) -> list[Prompt]:
        """Return prompts like those that are measured, but with throw-away beginnings."""
        return [cycled(prompts, i).begins_with(next(self._throwaway)) for i in range(num)]

    async def prepare(self, planned: Planned) -> Prepared:
        """Return a repetition's prompts; asks the server to count tokens where they must fit.

        Raises `UsageError` for lengths that cannot be, `UnreachableError` where the server
        cannot count.
        """
        shared_tokens = planned.configuration.shared_prefix_tokens
        shared = await self._shared_prefix(shared_tokens) if shared_tokens is not None else None
        if planned.configuration.prompt_tokens_target is not None:
            return await self._to_length(planned, shared)
        return self._from_set(planned, shared)

    async def _shared_prefix(self, num_tokens: int) -> str:
        if num_tokens not in self._shared:
            counter = await self._find_counter()
            rng = random.Random(f"{self._seed} shared")
            self._shared[num_tokens] = await shared_text(counter, num_tokens, rng)
        return self._shared[num_tokens]

    async def _find_counter(self) -> TokenCounter:
        if self._counter is None:
            known = self._known or CountedPrompt(self.throwaway().messages, None)
            self._counter = await find_counter(
                self._requester, self._model, self._throwaway, self._extra, known
            )
        return self._counter

    async def _to_length(self, planned: Planned, shared: str | None) -> Prepared:
        configuration = planned.configuration
        num_tokens = configuration.prompt_tokens_target
        assert num_tokens is not None
        mode = configuration.cache_mode
        is_new = mode in ("cold", "prefix-hit")
        rng = random.Random(f"{self._seed} {num_tokens}")
        builder = PromptBuilder(
            await self._find_counter(),
            num_tokens,
            self._fresh if is_new else beginnings(MEASURED_FIRST_WORDS, rng),
            unseen_rng() if is_new else rng,
            shared=shared,
            is_shared_first=mode != "cold",
        )
        measured = [
            await builder.build(f"{num_tokens}-{number}")
            for number in range(1, planned.num_conversations + 1)
        ]
        if mode == "prefix-hit":
            assert shared is not None
            return Prepared([self.throwaway().with_system_prefix(shared)], measured)
        return Prepared(measured if mode == "warm" else [], measured)

    def _from_set(self, planned: Planned, shared: str | None) -> Prepared:
        """Change the set's prompts as the mode wants."""
        prompts = planned.prompts
        chosen = [cycled(prompts, index) for index in range(planned.num_conversations)]
        mode = planned.configuration.cache_mode
        if mode == "cold":
            return Prepared([], [self._unique(_prefixed(p, shared)) for p in chosen])
        if mode == "prefix-hit" and shared is not None:
            primed = [self.throwaway().with_system_prefix(shared)]
            return Prepared(primed, [_prefixed(self._unique(p), shared) for p in chosen])
        if mode == "prefix-hit":
            primed = [prompt.ends_with(next(self._throwaway)) for prompt in prompts]
            return Prepared(primed, [p.ends_with(next(self._fresh)) for p in chosen])
        measured = [_prefixed(prompt, shared) for prompt in chosen]
        if mode == "warm":
            return Prepared([_prefixed(prompt, shared) for prompt in prompts], measured)
        return Prepared([], measured)

    def _unique(self, prompt: Prompt) -> Prompt:
        return prompt.begins_with(next(self._fresh))


def _prefixed(prompt: Prompt, shared: str | None) -> Prompt:
    return prompt if shared is None else prompt.with_system_prefix(shared)
