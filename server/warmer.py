"""Have the engine compute prefixes before anybody asks for them, one at a time."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Iterable
from typing import Any

import msgspec

from vllm_mlx.engine.core.outputs import RowOutput
from vllm_mlx.engine.errors import EngineUnavailableError, VllmMlxError
from vllm_mlx.server.anthropic.chat_input import ChatSettings
from vllm_mlx.server.engine_port import EnginePort
from vllm_mlx.server.generation import GenerationRegistry
from vllm_mlx.server.tokenizer_pool import TokenizerPool
from vllm_mlx.server.warm_prompts import WarmPrompt
from vllm_mlx.server.warm_tokens import prefix_tokens, warm_request, whole_blocks

logger = logging.getLogger(__name__)

#: How often a warmer that lets clients go first looks whether any is left.
_YIELD_S = 0.2


class WarmSummary(msgspec.Struct, kw_only=True):
    """Count what became of prompts."""

    #: Prefixes that are stored now, those included that were stored before.
    count: int = 0
    skipped: int = 0
    #: Prompts that do not fill one block, of which nothing is ever stored.
    too_short: int = 0
    computed_tokens: int = 0
    failures: list[str] = []
    elapsed_ms: float = 0.0

    def add(self, other: WarmSummary) -> None:
        """Add what became of further prompts."""
        for name, value in msgspec.structs.asdict(other).items():
            setattr(self, name, getattr(self, name) + value)

    def fields(self) -> dict[str, Any]:
        """Return the counts as a response has them."""
        return {**msgspec.structs.asdict(self), "elapsed_ms": round(self.elapsed_ms, 1)}


class PrefixWarmer:
    """Warm prompts of one loaded model; event loop only, one prompt at a time for all callers."""

    def __init__(
        self,
        engine: EnginePort,
        generations: GenerationRegistry,
        *,
        block_size: int,
        settings: ChatSettings,
    ) -> None:
        self._engine = engine
        self._generations = generations
        self._block_size = block_size
        self._settings = settings
        self._turn = asyncio.Lock()

    async def warm(
        self, prompts: Iterable[WarmPrompt], tokenizers: TokenizerPool, *, yields: bool = False
    ) -> WarmSummary:
        """Compute what is not stored of each prompt; a cancelled call aborts the one at work.

        With `yields` a prompt is begun only while no client's request is open. Raises
        `EngineUnavailableError` when there is no engine any more.
        """
        began = time.monotonic()
        summary = WarmSummary()
        for prompt in prompts:
            try:
                prefixes = await tokenizers.run(
                    functools.partial(prefix_tokens, prompt, settings=self._settings)
                )
                for tokens in prefixes:
                    await self._warm_one(prompt, tokens, summary, yields=yields)
            except EngineUnavailableError:
                raise
            except VllmMlxError as error:
                summary.failures.append(f"{prompt.where}: {error.message}")
        summary.elapsed_ms = (time.monotonic() - began) * 1e3
        return summary

    async def _warm_one(
        self, prompt: WarmPrompt, tokens: list[int], summary: WarmSummary, *, yields: bool
    ) -> None:
        blocks = whole_blocks(tokens, self._block_size)
        if not blocks:
            summary.too_short += 1
            return
        async with self._turn:
            while yields and self._generations.num_open_rows:
                await asyncio.sleep(_YIELD_S)
            final = await self._compute(blocks)
        if final.error is not None:
            raise final.error.to_error()
        if final.finish_reason == "abort":
            raise EngineUnavailableError("the server is shutting down", retry_after_s=5.0)
        computed = len(blocks) - final.num_cached_tokens
        summary.count += 1
        summary.skipped += computed == 0
        summary.computed_tokens += computed
        logger.debug("%s: %d of %d tokens had to be computed", prompt.where, computed, len(blocks))

    async def _compute(self, blocks: list[int]) -> RowOutput:
        stream = self._engine.generate(warm_request(blocks))
        try:
            while True:
                output = await stream.__anext__()
                if output.finish_reason is not None:
                    return output
        finally:
            await stream.aclose()
