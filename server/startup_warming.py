"""Warm prompts in the background of a server, at its start and after restarts of its engine."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from vllm_mlx.engine.errors import EngineUnavailableError
from vllm_mlx.server.runtime import ServerRuntime
from vllm_mlx.server.warm_prompts import WarmPrompt

logger = logging.getLogger(__name__)


async def warm_whenever_ready(runtime: ServerRuntime, prompts: Sequence[WarmPrompt]) -> None:
    """Warm `prompts` now, and again when the engine has lost them; runs until it is cancelled.

    Requests of clients go first: a prompt is begun only while none is open.
    """
    warmed_pid: int | None = None
    while True:
        state = runtime.engine.state
        if runtime.is_ready and state.pid != warmed_pid:
            warmed_pid = state.pid
            await _warm(runtime, prompts)
        else:
            await runtime.engine.wait_for_change(state)


async def _warm(runtime: ServerRuntime, prompts: Sequence[WarmPrompt]) -> None:
    tokenizers = runtime.require_ready().tokenizers
    try:
        summary = await runtime.warmer.warm(prompts, tokenizers, yields=True)
    except EngineUnavailableError as error:
        logger.warning("warming stopped: %s", error.message)
        return
    except Exception:  # nobody waits for this task, and a server without warm prefixes still serves
        logger.exception("warming failed")
        return
    for failure in summary.failures:
        logger.warning("not warmed: %s", failure)
    logger.info(
        "warmed %d prefixes: %d tokens computed, %d were stored already, in %.1f s",
        summary.count,
        summary.computed_tokens,
        summary.skipped,
        summary.elapsed_ms / 1e3,
    )
