"""The supervision of one engine process of any kind: start it, watch it, restart it, stop it."""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Generic, Literal, Protocol, TypeVar, cast

import msgspec

from vllm_mlx.engine.config import ModelInfo
from vllm_mlx.engine.core.outputs import ErrorInfo
from vllm_mlx.engine.errors import EngineDiedError, EngineUnavailableError, VllmMlxError
from vllm_mlx.engine.host.messages import (
    FromEngine,
    FromService,
    FromTextEngine,
    LoadFailed,
    LoadProgress,
    ServiceInfo,
    Shutdown,
    ToEngine,
)
from vllm_mlx.engine.host.process import WORKER_COMMAND, EngineProcess, ExitReport, start_process
from vllm_mlx.engine.host.restart import RestartBackoff, RestartPolicy
from vllm_mlx.engine.host.watchdog import StepWatchdog, WatchedClient, is_stopped

logger = logging.getLogger(__name__)

EnginePhase = Literal["loading", "ready", "restarting", "failed", "draining", "stopped"]

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


class HostedClient(WatchedClient, Protocol):
    """Name what supervision needs of who holds the requests open at a process."""

    @property
    def has_produced(self) -> bool:
        """Say whether the process has produced anything for anybody."""
        ...

    def end_all(
        self, finish_reason: Literal["abort", "error"], error: ErrorInfo | None = None
    ) -> int:
        """End every open request now, without the process; return how many there were."""
        ...

    async def wait_idle(self) -> None:
        """Wait until no request is open."""
        ...

    def ask_stats(self) -> asyncio.Future[Any]:
        """Ask for statistics unless they are asked for already; return the answer to come."""
        ...


ClientT = TypeVar("ClientT", bound=HostedClient)
InfoT = TypeVar("InfoT", ModelInfo, ServiceInfo)


class ProcessSupervisor(ABC, Generic[ClientT, InfoT]):
    """Own one engine process, started anew when it dies, and its open requests. Event loop only.

    Whatever happens to the process, each request ends exactly once: by the engine's own word, by
    an abort, or by `EngineDiedError`, then within a second of the death.
    A model that cannot be loaded fails at once; a process that dies is started again after a wait
    that grows, until `restart` gives up. A process whose step takes longer than the configured
    limit is ended and counts as dead; one that was stopped is waited for.
    """

    def __init__(
        self,
        *,
        name: str,
        restart: RestartPolicy | None,
        command: Sequence[str] | None,
        stop_grace_s: float,
        step_timeout_s: float,
    ) -> None:
        """Prepare; `name` is what tasks and log lines call the engine."""
        self._name = name
        self._restart = restart or RestartPolicy()
        self._command = tuple(command or WORKER_COMMAND)
        self._stop_grace_s = stop_grace_s
        self._step_timeout_s = step_timeout_s
        self._state = EngineState(phase="stopped")
        self._changed = asyncio.Event()
        self._info: InfoT | None = None
        self._process: EngineProcess | None = None
        self._client: ClientT | None = None
        self._run_task: asyncio.Task[None] | None = None
        self._stop_task: asyncio.Task[None] | None = None
        self._drain_ended = asyncio.Event()
        self._load_error: VllmMlxError | None = None
        self._started_at = 0.0
        self._ready_at: float | None = None
        self._load_s = _UNKNOWN_LOAD_S

    @abstractmethod
    def _load_message(self) -> ToEngine:
        """Return the first message to a new process."""

    @abstractmethod
    def _make_client(self, send: Callable[[ToEngine], None]) -> ClientT:
        """Return what is to hold the requests open at a new process."""

    @abstractmethod
    def _receive(self, client: ClientT, message: FromTextEngine | FromService) -> None:
        """Take what a ready process says."""

    @property
    def state(self) -> EngineState:
        """Return where the engine is now."""
        return self._state

    @property
    def info(self) -> InfoT | None:
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
        self._run_task = asyncio.create_task(self._supervise(), name=f"{self._name}-supervisor")

    async def stop(self, drain_timeout_s: float) -> None:
        """Refuse new requests, let open ones finish, abort the rest, end the process.

        Open requests get up to `drain_timeout_s` seconds, then a final `abort`. Nothing is left
        behind on return. A second call while one is under way can only shorten the wait; a
        cancelled call does not stop the stopping.
        """
        if self._run_task is None or self._state.phase == "stopped":
            return
        if self._stop_task is None:
            self._stop_task = asyncio.create_task(self._shut_down(), name=f"{self._name}-shutdown")
        loop = asyncio.get_running_loop()
        timer = loop.call_later(drain_timeout_s, self._drain_ended.set)
        try:
            await asyncio.shield(self._stop_task)
        finally:
            timer.cancel()

    async def wait_ready(self) -> InfoT:
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
        self._client = client = self._make_client(process.send)
        self._set_state(pid=process.pid)
        process.send(self._load_message())
        report = ExitReport(None)
        try:
            is_hung = await self._wait_ended(process, client)
            self._on_lost()
            if is_hung:
                await process.show_stacks()
            report = await process.finish(0.0 if is_hung else _DEATH_GRACE_S)
            if is_hung:
                report = msgspec.structs.replace(report, hung_s=self._step_timeout_s)
        except asyncio.CancelledError:
            report = await process.finish(grace_s=0.0)
            raise
        finally:
            self._end_streams(client, report)
            self._process = None
            self._client = None
            self._set_state(pid=None, stage="", fraction=None)
        return report, client.has_produced

    async def _wait_ended(self, process: EngineProcess, client: ClientT) -> bool:
        """Wait until the process has ended, or must be ended because it hangs; say if it hangs."""
        watchdog = StepWatchdog(client, self._step_timeout_s, lambda: is_stopped(process.pid))
        ended = asyncio.create_task(process.wait_ended(), name="engine-end")
        hung = asyncio.create_task(watchdog.wait_hung(), name="engine-watchdog")
        try:
            await asyncio.wait({ended, hung}, return_when=asyncio.FIRST_COMPLETED)
            return hung.done() and not ended.done()
        finally:
            for task in (ended, hung):
                task.cancel()
            await asyncio.wait({ended, hung})

    def _end_streams(self, client: ClientT, report: ExitReport) -> None:
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
        elif isinstance(message, ModelInfo | ServiceInfo):
            self._become_ready(cast(InfoT, message))
        elif isinstance(message, LoadFailed):
            self._load_error = message.error.to_error()
        elif self._client is not None:
            self._receive(self._client, message)

    def _become_ready(self, info: InfoT) -> None:
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
        self, client: ClientT, process: EngineProcess, run_task: asyncio.Task[None]
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

    async def _drain(self, client: ClientT) -> None:
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
