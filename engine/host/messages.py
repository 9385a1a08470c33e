"""The frozen messages between the HTTP process and an engine process.

Frames are a 4-byte big-endian length, then msgpack. `LoadModel` is the first message to the
engine; it answers with `LoadProgress` messages, then `ModelInfo` or `LoadFailed`. From then on
every step that has something to say sends one `StepOutputs`; `EngineStats` answers `GetStats`, and
is sent unasked once a second while the engine works, and when it comes to rest; `CacheCleared`
answers `ClearCache`.
`Shutdown` ends the process in order; the end of the socket ends it at once.

A process of another kind (`service.py`) is told by `LoadService` and answers with `LoadProgress`,
then `ServiceInfo` or `LoadFailed`. Each `CallService` gets any number of `CallPart`s and one
`CallEnd`, or nothing more after its `AbortRequest`; `ServiceStats` answers `GetStats`.
"""

from __future__ import annotations

import signal
from typing import Any

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


class LoadService(msgspec.Struct, frozen=True, kw_only=True, tag="load_service"):
    """Ask the process to load the one model of a service."""

    #: `ServiceKind.reference`.
    kind: str
    #: The kind's own configuration.
    config: msgspec.Raw
    log_level: str = "INFO"
    #: Added to the process's niceness: how far other processes go before it.
    niceness: int = 0


class CallService(msgspec.Struct, frozen=True, tag="call_service"):
    """Hand over one call; `request` is of the kind's own type."""

    request_id: str
    request: msgspec.Raw


class ServiceInfo(msgspec.Struct, frozen=True, kw_only=True, tag="service_ready"):
    """Say what a service has loaded; the process's word that it is ready."""

    #: What the user asked for.
    model: str
    #: The folder that the weights came from.
    path: str
    model_type: str
    dtype: str = "float32"
    weights_bytes: int = 0
    #: MLX's device: `gpu (Metal)`, `gpu (CUDA)` or `cpu`.
    device: str = "cpu"
    #: What else clients and routes may know of the model: limits, dimensions, voices.
    details: dict[str, Any] = {}
    kind: str = ""
    pid: int = 0


class CallPart(msgspec.Struct, frozen=True, tag="call_part"):
    """Carry a part of an answer, of the kind's own type."""

    request_id: str
    part: msgspec.Raw


class CallEnd(msgspec.Struct, frozen=True, tag="call_end"):
    """End a call, with an error if it has failed."""

    request_id: str
    error: ErrorInfo | None = None


class ServiceStats(msgspec.Struct, frozen=True, kw_only=True, tag="service_stats"):
    """Say what a service does and has done."""

    num_active: int = 0
    num_waiting: int = 0
    num_done: int = 0
    num_failed: int = 0


ToEngine = (
    LoadModel
    | AddRequest
    | AbortRequest
    | GetStats
    | ClearCache
    | Shutdown
    | LoadService
    | CallService
)
FromTextEngine = StepOutputs | EngineStats | CacheCleared
FromService = CallPart | CallEnd | ServiceStats
FromEngine = LoadProgress | LoadFailed | ModelInfo | ServiceInfo | FromTextEngine | FromService
