"""In place of the chat model's engine where a server is started without one."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, NoReturn

from vllm_mlx.engine.config import ModelInfo
from vllm_mlx.engine.core.request import GenerationRequest
from vllm_mlx.engine.core.stats import CacheCleared, EngineStats
from vllm_mlx.engine.errors import EngineUnavailableError, ModelUnknownError, VllmMlxError
from vllm_mlx.server.engine_port import OutputStream, StatsListener


@dataclass(frozen=True)
class NoCondition:
    """Say that there is nothing to wait for, and nothing wrong."""

    phase: str = "stopped"
    stage: str = ""
    fraction: float | None = None
    error: VllmMlxError | None = None
    retry_after_s: float | None = None
    pid: int | None = None
    num_restarts: int = 0


class NoChatEngine:
    """Stand where an engine would: it starts nothing, and refuses what nobody should ask."""

    state = NoCondition()
    info: ModelInfo | None = None

    async def start(self) -> None:
        """Do nothing."""

    async def stop(self, drain_timeout_s: float) -> None:
        """Do nothing."""

    async def wait_ready(self) -> ModelInfo:
        """Raise: there will be no model."""
        _refuse()

    async def wait_for_change(self, seen: Any) -> NoCondition:
        """Wait for ever."""
        del seen
        await asyncio.Event().wait()
        return self.state

    def generate(self, request: GenerationRequest) -> OutputStream:
        """Refuse."""
        del request
        _refuse()

    def abort(self, request_id: str) -> bool:
        """Find nothing to end."""
        del request_id
        return False

    async def stats(self, timeout_s: float = 1.0) -> EngineStats:
        """Raise: there is nothing to tell."""
        del timeout_s
        _refuse()

    def on_stats(self, listener: StatsListener) -> None:
        """Do nothing: nothing is ever told."""

    async def clear_cache(self, *, ram: bool, ssd: bool) -> CacheCleared:
        """Refuse."""
        del ram, ssd
        _refuse()


def no_chat_error() -> ModelUnknownError:
    """Make the error that routes of the chat model answer with."""
    return ModelUnknownError(
        "no chat model is served here: the server was started with --no-chat-model", param="model"
    )


def _refuse() -> NoReturn:
    raise EngineUnavailableError(no_chat_error().message)
