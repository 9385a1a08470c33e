"""The part of the engine supervisor that the server uses; tests put a small engine behind it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from vllm_mlx.engine.config import ModelInfo
from vllm_mlx.engine.core.outputs import RowOutput
from vllm_mlx.engine.core.request import GenerationRequest
from vllm_mlx.engine.core.stats import CacheCleared, EngineStats
from vllm_mlx.engine.errors import VllmMlxError

#: Called with statistics and the id of the process that they are of.
StatsListener = Callable[[EngineStats, int], None]


class OutputStream(Protocol):
    """Iterate over one request's outputs; the last one has a `finish_reason`.

    A cancelled `__anext__` loses nothing. `aclose` aborts what has not finished.
    """

    async def __anext__(self) -> RowOutput: ...

    async def aclose(self) -> None:
        """Abort the request if it has not finished."""
        ...


class EngineCondition(Protocol):
    """Say how an engine is at one moment."""

    @property
    def phase(self) -> str:
        """Return `loading`, `ready`, `restarting`, `failed`, `draining` or `stopped`."""
        ...

    @property
    def stage(self) -> str:
        """Return what loading is busy with."""
        ...

    @property
    def fraction(self) -> float | None:
        """Return how far that stage is, in 0..1."""
        ...

    @property
    def error(self) -> VllmMlxError | None:
        """Return why the engine is not ready."""
        ...

    @property
    def retry_after_s(self) -> float | None:
        """Return when trying again makes sense."""
        ...

    @property
    def pid(self) -> int | None:
        """Return the engine's process id."""
        ...

    @property
    def num_restarts(self) -> int:
        """Return how often the engine was started again."""
        ...


class EnginePort(Protocol):
    """Reach one engine; `vllm_mlx.engine.host.supervisor.EngineSupervisor` is the real one."""

    @property
    def state(self) -> EngineCondition:
        """Return the engine's condition now."""
        ...

    @property
    def info(self) -> ModelInfo | None:
        """Return what was loaded, once it is."""
        ...

    async def start(self) -> None:
        """Begin to load, in the background."""
        ...

    async def stop(self, drain_timeout_s: float) -> None:
        """Let running requests finish for so long, abort the rest and end the engine."""
        ...

    async def wait_ready(self) -> ModelInfo:
        """Wait until the model answers; raise why it never will."""
        ...

    async def wait_for_change(self, seen: Any) -> EngineCondition:
        """Wait until `state` is another one than `seen`, and return it."""
        ...

    def generate(self, request: GenerationRequest) -> OutputStream:
        """Start one request; raise `EngineUnavailableError` when the engine is not ready."""
        ...

    def abort(self, request_id: str) -> bool:
        """End a request early; its stream still gets its final output."""
        ...

    async def stats(self, timeout_s: float = 1.0) -> EngineStats:
        """Return what the engine has done, what is known of it after `timeout_s`.

        Raises `EngineUnavailableError`.
        """
        ...

    def on_stats(self, listener: StatsListener) -> None:
        """Have `listener` told whatever the engine says of its work, and by which process."""
        ...

    async def clear_cache(self, *, ram: bool, ssd: bool) -> CacheCleared:
        """Remove stored prefixes of these tiers; raise `EngineUnavailableError`."""
        ...
