"""Run an engine on a thread of its own, so that Ctrl-C never strikes in the middle of a step."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Protocol

from vllm_mlx.engine.config import ModelInfo
from vllm_mlx.engine.core.outputs import RowOutput, StepOutputs
from vllm_mlx.engine.core.request import GenerationRequest
from vllm_mlx.engine.host.messages import AbortRequest, AddRequest, LoadProgress

ProgressCallback = Callable[[str, float | None], None]

#: Longest time that Ctrl-C can go unnoticed while nothing happens.
SIGNAL_CHECK_S = 0.1


class StepEngine(Protocol):
    """Name the part of `Engine` that this thread drives."""

    @property
    def info(self) -> ModelInfo:
        """Return what was loaded."""
        ...

    @property
    def has_work(self) -> bool:
        """Say whether a step would do something."""
        ...

    def add_request(self, request: GenerationRequest) -> None:
        """Take in one request."""
        ...

    def abort(self, request_id: str) -> None:
        """End a request early."""
        ...

    def step(self) -> StepOutputs:
        """Compute one step."""
        ...

    def close(self) -> None:
        """Free the model."""
        ...


class EngineThread:
    """Own an engine and the thread that loads it, runs its steps and closes it.

    MLX's state cannot cross threads, and the main thread must stay free for Ctrl-C. Every method
    is called from the main thread; `load` runs on the engine's.
    """

    def __init__(self, load: Callable[[ProgressCallback], StepEngine]) -> None:
        self._load = load
        self._inbox: queue.SimpleQueue[AddRequest | AbortRequest | None] = queue.SimpleQueue()
        self._events: queue.SimpleQueue[LoadProgress | ModelInfo | RowOutput | BaseException] = (
            queue.SimpleQueue()
        )
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self, on_progress: ProgressCallback) -> ModelInfo:
        """Load the engine and return what was loaded; raise what loading raised."""
        self._thread.start()
        while True:
            event = self._next_event()
            if isinstance(event, ModelInfo):
                return event
            if not self._thread.is_alive() and self._events.empty():
                raise RuntimeError("the engine's thread has ended")
            if isinstance(event, LoadProgress):
                on_progress(event.stage, event.fraction)

    def add(self, request: GenerationRequest) -> None:
        """Hand a request to the engine; its outputs come from `next_output`."""
        self._inbox.put(AddRequest(request))

    def abort(self, request_id: str) -> None:
        """End a request early."""
        self._inbox.put(AbortRequest(request_id))

    def next_output(self, request_id: str) -> RowOutput:
        """Wait for the next output of one request, dropping those of earlier ones.

        Raises what a step raised.
        """
        while True:
            event = self._next_event()
            if isinstance(event, RowOutput) and event.request_id == request_id:
                return event
            if not self._thread.is_alive() and self._events.empty():
                raise RuntimeError("the engine's thread has ended")

    def close(self, timeout_s: float) -> bool:
        """Close the engine; return whether its thread ended in time."""
        self._inbox.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _next_event(self) -> LoadProgress | ModelInfo | RowOutput:
        while True:
            # A signal that comes just before the wait begins does not interrupt it: look up.
            with contextlib.suppress(queue.Empty):
                event = self._events.get(timeout=SIGNAL_CHECK_S)
                if isinstance(event, BaseException):
                    raise event
                return event
            if not self._thread.is_alive() and self._events.empty():
                raise RuntimeError("the engine's thread has ended")

    def _run(self) -> None:
        try:
            engine = self._load(self._report)
            try:
                self._events.put(engine.info)
                self._serve(engine)
            finally:
                engine.close()
        except BaseException as error:  # noqa: BLE001
            # Whatever ends this thread is raised in the main thread, which waits for it.
            self._events.put(error)

    def _report(self, stage: str, fraction: float | None) -> None:
        self._events.put(LoadProgress(stage, fraction))

    def _serve(self, engine: StepEngine) -> None:
        while True:
            while not engine.has_work or not self._inbox.empty():
                message = self._inbox.get()
                if message is None:
                    return
                if isinstance(message, AddRequest):
                    engine.add_request(message.request)
                else:
                    engine.abort(message.request_id)
            for output in engine.step().rows:
                self._events.put(output)
