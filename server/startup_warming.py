"""Warm prompts in the background of a server, at its start and after restarts of its engine."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from vllm_mlx.engine.errors import EngineUnavailableError
from vllm_mlx.server.runtime import ServerRuntime
from vllm_mlx.server.warm_prompts import WarmPrompt
from vllm_mlx.server.warmer import WarmSummary

logger = logging.getLogger(__name__)


async def warm_whenever_ready(runtime: ServerRuntime, prompts: Sequence[WarmPrompt]) -> None:
    """Warm `prompts` now, and again when the engine has lost them; runs until it is cancelled.

    Requests of clients go first: a prompt is begun only while none is open. One that has failed is
    not tried again: it may be what the engine died of.
    """
    warmed_pid: int | None = None
    rest = list(prompts)
    while True:
        state = runtime.engine.state
        if runtime.is_ready and state.pid != warmed_pid:
            warmed_pid = state.pid
            await _warm(runtime, rest)
        else:
            await runtime.engine.wait_for_change(state)


async def _warm(runtime: ServerRuntime, rest: list[WarmPrompt]) -> None:
    """Warm prompts one by one; those that fail are taken out of `rest`."""
    tokenizers = runtime.require_ready().tokenizers
    total = WarmSummary()
    try:
        for prompt in list(rest):
            summary = await runtime.warmer.warm([prompt], tokenizers, yields=True)
            if summary.failures:
                rest.remove(prompt)
                logger.warning("not warmed: %s", "; ".join(summary.failures))
            total.add(summary)
    except EngineUnavailableError as error:
        logger.warning("warming stopped: %s", error.message)
    except Exception:  # nobody waits for this task, and a server without warm prefixes still serves
        logger.exception("warming failed")
    else:
        logger.info(
            "warmed %d prefixes: %d tokens computed, %d were stored already, in %.1f s",
            total.count,
            total.computed_tokens,
            total.skipped,
            total.elapsed_ms / 1e3,
        )
