"""The frozen messages between the HTTP process and an engine process.

Frames are a 4-byte big-endian length, then msgpack. `LoadModel` is the first message to the
engine; it answers with `LoadProgress` messages, then `ModelInfo` or `LoadFailed`. From then on
every step that has something to say sends one `StepOutputs`; `EngineStats` answers `GetStats`, and
is sent unasked once a second while the engine works, and when it comes to rest; `CacheCleared`
answers `ClearCache`.
`Shutdown` ends the process in order; the end of the socket ends it at once.
"""

from __future__ import annotations

import signal

import msgspec

from vllm_mlx.engine.config import EngineConfig, ModelConfig, ModelInfo
from vllm_mlx.engine.core.outputs import ErrorInfo, StepOutputs
from vllm_mlx.engine.core.request import GenerationRequest
from vllm_mlx.engine.core.stats import CacheCleared, EngineStats

#: Not a message: makes the engine process write the stacks of its threads to its log.
STACKS_SIGNAL = signal.SIGUSR2


class LoadModel(msgspec.Struct, frozen=True, tag="load_model"):
    """Ask the engine process to load its one model."""

    model: ModelConfig
    engine: EngineConfig
    #: Least level that the engine process logs its own records at, as `logging` names it, or STEP.
    log_level: str = "INFO"


class AddRequest(msgspec.Struct, frozen=True, tag="add_request"):
    """Hand over one request; the engine owes it exactly one final output."""

    request: GenerationRequest


class AbortRequest(msgspec.Struct, frozen=True, tag="abort_request"):
    """End a request early; its final output has finish reason `abort`."""

    request_id: str


class GetStats(msgspec.Struct, frozen=True, tag="get_stats"):
    """Ask for one `EngineStats`."""


class ClearCache(msgspec.Struct, frozen=True, kw_only=True, tag="clear_cache"):
    """Ask for stored prefixes to be removed that are not in use; answered when they are."""

    ram: bool
    #: Those of this model only.
    ssd: bool


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """Ask the engine process to close its engine and end; open requests are forgotten."""


class LoadProgress(msgspec.Struct, frozen=True, tag="load_progress"):
    """Say how far loading is: `fraction` in 0..1, or None where the length is not known."""

    stage: str
    fraction: float | None = None


class LoadFailed(msgspec.Struct, frozen=True, tag="load_failed"):
    """Say why the model cannot be loaded; the engine process then exits."""

    error: ErrorInfo


ToEngine = LoadModel | AddRequest | AbortRequest | GetStats | ClearCache | Shutdown
FromEngine = LoadProgress | ModelInfo | LoadFailed | StepOutputs | EngineStats | CacheCleared
