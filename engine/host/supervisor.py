"""The supervisor of one model's engine: starts its process, watches it, restarts it, stops it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec

from vllm_mlx.engine.config import EngineConfig, ModelConfig, ModelInfo
from vllm_mlx.engine.core.outputs import ErrorInfo
from vllm_mlx.engine.core.request import GenerationRequest
from vllm_mlx.engine.core.stats import CacheCleared, EngineStats
from vllm_mlx.engine.errors import EngineDiedError, EngineUnavailableError, VllmMlxError
from vllm_mlx.engine.host.client import EngineClient
from vllm_mlx.engine.host.messages import (
    FromEngine,
    LoadFailed,
    LoadModel,
    LoadProgress,
    Shutdown,
)
from vllm_mlx.engine.host.process import WORKER_COMMAND, EngineProcess, ExitReport, start_process
from vllm_mlx.engine.host.restart import RestartBackoff, RestartPolicy
from vllm_mlx.engine.host.stream import RequestStream
from vllm_mlx.engine.host.watchdog import StepWatchdog, is_stopped

logger = logging.getLogger(__name__)

EnginePhase = Literal["loading", "ready", "restarting", "failed", "draining", "stopped"]

#: Called with statistics and the id of the process that they are of.
StatsListener = Callable[[EngineStats, int], None]

#: What to tell a client to wait for a load whose length nobody has seen yet.
_UNKNOWN_LOAD_S = 5.0
#: A process whose connection has ended is as good as dead; it gets this long to be so by itself.
_DEATH_GRACE_S = 0.3
#: How long a step that nobody waits for may hold up a stop.
_STEP_END_S = 1.0


class EngineState(msgspec.Struct, frozen=True, kw_only=True):
    """Say where an engine is between its start and its end; a snapshot."""

    #: `restarting` lasts from a death until the next process is ready; before the first process is
    #: ready the phase is `loading`; before `start` and after `stop` it is `stopped`.
    phase: EnginePhase
    #: What loading is doing, in words; empty when nothing is loading.
    stage: str = ""
    #: How far that stage is, 0..1; None where unknown.
    fraction: float | None = None
    #: Why the phase is `failed`, or what the last death was while `restarting`.
    error: VllmMlxError | None = None
    #: When a refused client should come again; None when ready or when there is no use.
    retry_after_s: float | None = None
    #: The engine process; None when there is none.
    pid: int | None = None
    num_restarts: int = 0


class EngineSupervisor:
    """Own the engine process of one model and every request open at it. Event loop only.

    Whatever happens to the process, each request gets exactly one final output: the engine's own,
    `abort`, or `error` with `EngineDiedError`, then within a second of the death.
    A model that cannot be loaded fails at once; a process that dies is started again after a wait
    that grows, until `restart` gives up. A process whose step takes longer than the configured
    limit is ended and counts as dead; one that was stopped is waited for.
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
        self._model = model
        self._engine = engine
        self._restart = restart or RestartPolicy()
        self._command = tuple(command or WORKER_COMMAND)
        self._stop_grace_s = stop_grace_s
        self._log_level = log_level
        self._state = EngineState(phase="stopped")
        self._changed = asyncio.Event()
        self._info: ModelInfo | None = None
        self._process: EngineProcess | None = None
        self._client: EngineClient | None = None
        self._run_task: asyncio.Task[None] | None = None
        self._stop_task: asyncio.Task[None] | None = None
        self._drain_ended = asyncio.Event()
        self._load_error: VllmMlxError | None = None
        self._stats_listener: StatsListener = _nobody
        self._started_at = 0.0
        self._ready_at: float | None = None
        self._load_s = _UNKNOWN_LOAD_S

    @property
    def state(self) -> EngineState:
        """Return where the engine is now."""
        return self._state

    @property
    def info(self) -> ModelInfo | None:
        """Return what was loaded last; kept while restarting, None before the first load."""
        return self._info

    @property
    def num_open(self) -> int:
        """Count the requests that have no final output yet."""
        return self._client.num_open if self._client is not None else 0

    async def start(self) -> None:
        """Start loading in the background and return at once.

        May be called again after `stop` or after it failed; otherwise a second call is a bug.
        """
        assert self._state.phase in ("stopped", "failed"), self._state.phase
        self._stop_task = None
        self._drain_ended.clear()
        self._set_state(
            phase="loading",
            stage="starting",
            fraction=None,
            error=None,
            retry_after_s=self._load_s,
            num_restarts=0,
        )
        self._run_task = asyncio.create_task(self._supervise(), name="engine-supervisor")

    async def stop(self, drain_timeout_s: float) -> None:
        """Refuse new requests, let open ones finish, abort the rest, end the process.

        Open requests get up to `drain_timeout_s` seconds, then a final `abort`. Nothing is left
        behind on return. A second call while one is under way can only shorten the wait; a
        cancelled call does not stop the stopping.
        """
        if self._run_task is None or self._state.phase == "stopped":
            return
        if self._stop_task is None:
            self._stop_task = asyncio.create_task(self._shut_down(), name="engine-shutdown")
        loop = asyncio.get_running_loop()
        timer = loop.call_later(drain_timeout_s, self._drain_ended.set)
        try:
            await asyncio.shield(self._stop_task)
        finally:
            timer.cancel()

    async def wait_ready(self) -> ModelInfo:
        """Wait for the model, restarts included, and return what was loaded.

        Raises the `ModelLoadError` or `EngineDiedError` that made the supervisor give up, and
        `EngineUnavailableError` when it is being stopped.
        """
        while True:
            state = self._state
            if state.phase == "ready" and self._info is not None:
                return self._info
            if state.phase == "failed" and state.error is not None:
                # A new exception: one that is raised twice collects both tracebacks.
                raise ErrorInfo.of(state.error).to_error()
            if state.phase in ("draining", "stopped"):
                raise EngineUnavailableError(f"the engine is {state.phase}")
            await self.wait_for_change(state)

    async def wait_for_change(self, seen: EngineState) -> EngineState:
        """Wait until the state is another one than `seen`, and return it."""
        while self._state is seen:
            await self._changed.wait()
        return self._state

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

    def _unavailable(self) -> EngineUnavailableError:
        state = self._state
        message = f"the engine is {state.phase}"
        if state.phase == "failed" and state.error is not None:
            message = f"the engine has failed and is not started again: {state.error.message}"
        elif state.stage:
            message += f" ({state.stage})"
        return EngineUnavailableError(message, retry_after_s=state.retry_after_s)

    def _set_state(self, **changes: Any) -> None:
        self._state = msgspec.structs.replace(self._state, **changes)
        self._changed.set()
        # A new event rather than `clear`: who waits on the old one is certain to wake.
        self._changed = asyncio.Event()

    async def _supervise(self) -> None:
        try:
            await self._run()
        except Exception as error:  # a bug of ours must not leave anyone waiting
            logger.exception("the supervisor itself failed")
            self._fail(VllmMlxError(f"the supervisor failed: {type(error).__name__}: {error}"))

    async def _run(self) -> None:
        """Run one process after another until it is stopped, fails to load, or dies too often."""
        backoff = RestartBackoff(self._restart)
        has_loaded = False
        while True:
            report, has_produced = await self._live()
            if self._stop_task is not None:
                return
            if self._load_error is not None and not has_loaded and self._ready_at is None:
                self._fail(self._load_error)
                return
            has_loaded = has_loaded or self._ready_at is not None
            ready_s = 0.0 if self._ready_at is None else time.monotonic() - self._ready_at
            delay_s = backoff.record_death(has_produced=has_produced, ready_s=ready_s)
            cause = self._load_error or EngineDiedError(report.describe())
            if delay_s is None:
                self._fail(_given_up(cause, backoff.num_useless))
                return
            logger.error("%s; restarting in %.1f s", report.headline, delay_s)
            self._set_state(
                phase="restarting", error=cause, retry_after_s=max(1.0, delay_s + self._load_s)
            )
            await asyncio.sleep(delay_s)
            self._set_state(
                stage="starting",
                retry_after_s=max(1.0, self._load_s),
                num_restarts=self._state.num_restarts + 1,
            )

    async def _live(self) -> tuple[ExitReport, bool]:
        """Run one process from its start to its reaping; say how it ended and if it was of use."""
        self._load_error = None
        self._ready_at = None
        self._started_at = time.monotonic()
        try:
            process = await start_process(self._command, self._on_message, self._on_lost)
        except OSError as error:
            return ExitReport(None, start_error=str(error)), False
        self._process = process
        self._client = client = EngineClient(process.send)
        self._set_state(pid=process.pid)
        process.send(LoadModel(self._model, self._engine, self._log_level))
        report = ExitReport(None)
        try:
            is_hung = await self._wait_ended(process, client)
            self._on_lost()
            if is_hung:
                await process.show_stacks()
            report = await process.finish(0.0 if is_hung else _DEATH_GRACE_S)
            if is_hung:
                report = msgspec.structs.replace(report, hung_s=self._engine.step_timeout_s)
        except asyncio.CancelledError:
            report = await process.finish(grace_s=0.0)
            raise
        finally:
            self._end_streams(client, report)
            self._process = None
            self._client = None
            self._set_state(pid=None, stage="", fraction=None)
        return report, client.has_produced

    async def _wait_ended(self, process: EngineProcess, client: EngineClient) -> bool:
        """Wait until the process has ended, or must be ended because it hangs; say if it hangs."""
        watchdog = StepWatchdog(
            client, self._engine.step_timeout_s, lambda: is_stopped(process.pid)
        )
        ended = asyncio.create_task(process.wait_ended(), name="engine-end")
        hung = asyncio.create_task(watchdog.wait_hung(), name="engine-watchdog")
        try:
            await asyncio.wait({ended, hung}, return_when=asyncio.FIRST_COMPLETED)
            return hung.done() and not ended.done()
        finally:
            for task in (ended, hung):
                task.cancel()
            await asyncio.wait({ended, hung})

    def _end_streams(self, client: EngineClient, report: ExitReport) -> None:
        error = EngineDiedError(
            f"{report.headline} while it held this request", retry_after_s=self._state.retry_after_s
        )
        num_ended = client.end_all("error", ErrorInfo.of(error))
        if num_ended:
            logger.error("%s; %d open requests ended with an error", report.headline, num_ended)

    def _on_message(self, message: FromEngine) -> None:
        if isinstance(message, LoadProgress):
            if self._ready_at is None and self._state.phase in ("loading", "restarting"):
                self._set_state(stage=message.stage, fraction=message.fraction)
        elif isinstance(message, ModelInfo):
            self._become_ready(message)
        elif isinstance(message, LoadFailed):
            self._load_error = message.error.to_error()
        elif self._client is not None:
            if isinstance(message, EngineStats) and self._process is not None:
                self._stats_listener(message, self._process.pid)
            self._client.deliver(message)

    def _become_ready(self, info: ModelInfo) -> None:
        self._info = info
        self._ready_at = time.monotonic()
        self._load_s = self._ready_at - self._started_at
        if self._stop_task is None:
            self._set_state(phase="ready", stage="", fraction=None, error=None, retry_after_s=None)

    def _on_lost(self) -> None:
        """Refuse requests from this moment; `_live` then finds out what happened.

        Without a process it is the late word of one that has been dealt with.
        """
        if self._process is not None and self._stop_task is None and self._load_error is None:
            self._set_state(phase="restarting", retry_after_s=max(1.0, self._load_s))

    def _fail(self, error: VllmMlxError) -> None:
        # Whoever waits for the engine is told by the exception; an error here would say it twice.
        logger.debug("the engine has failed: %s", error.message)
        self._set_state(phase="failed", error=error, retry_after_s=None)

    async def _shut_down(self) -> None:
        """Drain, then end the process; the run task does the reaping."""
        assert self._run_task is not None
        try:
            if self._state.phase != "failed":
                self._set_state(phase="draining", retry_after_s=None)
            client, process = self._client, self._process
            if client is not None and process is not None and self._ready_at is not None:
                await self._drain(client)
                await self._let_close(client, process, self._run_task)
        finally:
            self._run_task.cancel()
            await asyncio.wait([self._run_task])
            self._set_state(phase="stopped", retry_after_s=None)

    async def _let_close(
        self, client: EngineClient, process: EngineProcess, run_task: asyncio.Task[None]
    ) -> None:
        """Let an engine that is between two steps close in order; do not wait for a long step.

        Nobody is left whom the step computes for, and what is on SSD is whole at any moment.
        """
        # Answered at the end of the step, when the engine also learns that it is to shut down.
        taken = client.ask_stats()
        process.send(Shutdown())
        either: list[asyncio.Future[Any]] = [run_task, taken]
        await asyncio.wait(
            either,
            timeout=min(_STEP_END_S, self._stop_grace_s),
            return_when=asyncio.FIRST_COMPLETED,
        )
        if taken.done():
            await asyncio.wait([run_task], timeout=self._stop_grace_s)
        elif not run_task.done():
            logger.info("the engine is in the middle of a step; its process is ended")

    async def _drain(self, client: EngineClient) -> None:
        """Wait for open requests until `_drain_ended`, then abort the rest."""
        waiting = [
            asyncio.create_task(client.wait_idle()),
            asyncio.create_task(self._drain_ended.wait()),
        ]
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waiting:
                task.cancel()
        num_aborted = client.end_all("abort")
        if num_aborted:
            logger.warning("aborted %d requests that did not finish in time", num_aborted)


def _given_up(cause: VllmMlxError, num_deaths: int) -> VllmMlxError:
    """Say that no restart follows, in an error of the cause's kind."""
    info = ErrorInfo.of(cause)
    message = (
        f"gave up after {num_deaths} deaths in a row before any output; the last: {cause.message}"
    )
    return msgspec.structs.replace(info, message=message).to_error()


def _nobody(stats: EngineStats, pid: int) -> None:
    del stats, pid
