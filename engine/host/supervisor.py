"""The supervisor of one model's text engine: generation, statistics and stored prefixes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from vllm_mlx.engine.config import EngineConfig, ModelConfig, ModelInfo
from vllm_mlx.engine.core.request import GenerationRequest
from vllm_mlx.engine.core.stats import CacheCleared, EngineStats
from vllm_mlx.engine.host.client import EngineClient
from vllm_mlx.engine.host.messages import FromService, FromTextEngine, LoadModel, ToEngine
from vllm_mlx.engine.host.restart import RestartPolicy
from vllm_mlx.engine.host.stream import RequestStream
from vllm_mlx.engine.host.supervision import ProcessSupervisor

#: Called with statistics and the id of the process that they are of.
StatsListener = Callable[[EngineStats, int], None]


class EngineSupervisor(ProcessSupervisor[EngineClient, ModelInfo]):
    """Own the engine process of one model and every request open at it. Event loop only.

    Each request gets exactly one final output: the engine's own, `abort`, or `error` with
    `EngineDiedError`.
    """

    def __init__(
        self,
        model: ModelConfig,
        engine: EngineConfig,
        *,
        restart: RestartPolicy | None = None,
        command: Sequence[str] | None = None,
        stop_grace_s: float = 5.0,
        log_level: str = "INFO",
    ) -> None:
        """Prepare; `command` starts another worker than ours and gets `--fd N` appended.

        `stop_grace_s` is how long a process asked to shut down may take before it is killed, and
        `log_level` what it logs, as `logging` names levels, or STEP.
        """
        super().__init__(
            name="engine",
            restart=restart,
            command=command,
            stop_grace_s=stop_grace_s,
            step_timeout_s=engine.step_timeout_s,
        )
        self._model = model
        self._engine = engine
        self._log_level = log_level
        self._stats_listener: StatsListener = _nobody

    def generate(self, request: GenerationRequest) -> RequestStream:
        """Hand a request to the engine and return its stream.

        Its id must be new. Raises `EngineUnavailableError` unless the engine is ready.
        """
        client = self._client
        if self._state.phase != "ready" or client is None:
            raise self._unavailable()
        return client.generate(request)

    def abort(self, request_id: str) -> bool:
        """End a request early, its final output then says `abort`; say whether it was open."""
        return self._client is not None and self._client.abort(request_id)

    async def stats(self, timeout_s: float = 1.0) -> EngineStats:
        """Return the engine's statistics, or its last known ones when it does not answer in time.

        The last known ones have an `age_s` above 0.
        Raises `EngineUnavailableError` when there is no engine or it has never answered. They
        begin again at zero with each process.
        """
        if self._client is None or self._state.phase not in ("ready", "draining"):
            raise self._unavailable()
        return await self._client.stats(timeout_s)

    def on_stats(self, listener: StatsListener) -> None:
        """Have `listener` told whatever the engine says of its work, and by which process."""
        self._stats_listener = listener

    async def clear_cache(self, *, ram: bool, ssd: bool) -> CacheCleared:
        """Remove stored prefixes that are not in use, those on SSD of this model only.

        Raises `EngineUnavailableError` when there is no engine, or none any more.
        """
        if self._client is None or self._state.phase != "ready":
            raise self._unavailable()
        return await self._client.clear_cache(ram=ram, ssd=ssd)

    def _load_message(self) -> LoadModel:
        return LoadModel(self._model, self._engine, self._log_level)

    def _make_client(self, send: Callable[[ToEngine], None]) -> EngineClient:
        return EngineClient(send)

    def _receive(self, client: EngineClient, message: FromTextEngine | FromService) -> None:
        assert isinstance(message, FromTextEngine), message
        if isinstance(message, EngineStats) and self._process is not None:
            self._stats_listener(message, self._process.pid)
        client.deliver(message)


def _nobody(stats: EngineStats, pid: int) -> None:
    del stats, pid
