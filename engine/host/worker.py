"""The engine process: `python -m vllm_mlx.engine.host.worker --fd N` loads one model and steps it.

One thread, the main one, owns MLX: it loads, runs every step, and polls the socket in between.
The first message says whether it is a text engine or a service of another kind.
"""

from __future__ import annotations

import argparse
import faulthandler
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from vllm_mlx.engine.config import EngineConfig, ModelConfig, ModelInfo
from vllm_mlx.engine.core.outputs import ErrorInfo, StepOutputs
from vllm_mlx.engine.core.prefixes import Clearing
from vllm_mlx.engine.core.request import GenerationRequest
from vllm_mlx.engine.core.stats import EngineStats
from vllm_mlx.engine.errors import ModelLoadError, VllmMlxError
from vllm_mlx.engine.host.messages import (
    STACKS_SIGNAL,
    AbortRequest,
    AddRequest,
    ClearCache,
    GetStats,
    LoadFailed,
    LoadModel,
    LoadProgress,
    LoadService,
    Shutdown,
)
from vllm_mlx.engine.host.parent_watch import watch_parent
from vllm_mlx.engine.host.transport import WorkerConnection
from vllm_mlx.engine.logs import RecordFormatter, set_level

logger = logging.getLogger(__name__)

EXIT_DONE = 0
EXIT_LOAD_FAILED = 3
EXIT_INTERNAL = 70

#: How long the reason of a failed load may take to get through to a parent that is not reading.
_FLUSH_TIMEOUT_S = 5.0
#: How often an engine at work says unasked what it has done; it also does when it comes to rest.
_STATS_EVERY_S = 1.0
#: How often an engine without work looks whether prefixes have been removed.
_CLEARING_POLL_S = 0.01

ProgressCallback = Callable[[str, float | None], None]


class SteppedEngine(Protocol):
    """Name what the worker needs of an engine; `vllm_mlx.engine.engine.Engine` is the real one."""

    @property
    def info(self) -> ModelInfo:
        """Return what was loaded."""

    @property
    def has_work(self) -> bool:
        """Say whether `step` has anything to do, a final output still owed included."""

    def add_request(self, request: GenerationRequest) -> None:
        """Take a request; its own faults come out of `step`."""

    def abort(self, request_id: str) -> None:
        """End a request early; unknown ids are ignored."""

    def step(self) -> StepOutputs:
        """Compute one step; an exception means that the engine is of no more use."""

    def idle(self) -> bool:
        """Do a little of what can wait; return whether there is more."""
        ...

    def stats(self) -> EngineStats:
        """Return a snapshot."""

    def clear_prefixes(self, *, ram: bool, ssd: bool) -> Clearing:
        """Remove stored prefixes; return what follows the removal, which steps do not wait for."""
        ...

    def close(self) -> None:
        """Free what must be freed in order."""


EngineFactory = Callable[[ModelConfig, EngineConfig, ProgressCallback], SteppedEngine]


def load_model(
    model: ModelConfig, engine: EngineConfig, on_progress: ProgressCallback
) -> SteppedEngine:
    """Load the real engine; raise `ModelLoadError`."""
    from vllm_mlx.engine.platform import require_backend

    # Before anything else imports mlx, which binds to the BLAS that is there then.
    require_backend()
    from vllm_mlx.engine.models.loader import load_engine

    return load_engine(model, engine, on_progress)


def run_worker(connection: WorkerConnection, load: EngineFactory) -> int:
    """Load the model that the first message names and serve until the end; return the exit code.

    Returns when asked to shut down, when the peer is gone, when loading failed, or when a step
    raised: then the engine's state is unknown, and a new process is the only repair.
    """
    request = _first_message(connection)
    if request is None:
        return EXIT_DONE
    set_level(request.log_level)
    if isinstance(request, LoadService):
        return _run_service(connection, request)
    engine = _load(connection, request, load)
    if engine is None:
        return EXIT_LOAD_FAILED
    info = engine.info
    connection.send(msgspec.structs.replace(info, pid=os.getpid()))
    try:
        _serve(connection, engine)
        engine.close()
    except Exception:  # whatever it was, the supervisor must learn of it
        logger.exception("the engine failed; ending its process")
        return EXIT_INTERNAL
    return EXIT_DONE


def _first_message(connection: WorkerConnection) -> LoadModel | LoadService | None:
    while not connection.is_closed:
        connection.wait()
        for message in connection.receive():
            assert isinstance(message, LoadModel | LoadService), message
            return message
    return None


def _run_service(connection: WorkerConnection, request: LoadService) -> int:
    from vllm_mlx.engine.host.service_worker import run_service

    try:
        return EXIT_DONE if run_service(connection, request) else EXIT_LOAD_FAILED
    except Exception:  # whatever it was, the supervisor must learn of it
        logger.exception("the service failed; ending its process")
        return EXIT_INTERNAL


def _load(
    connection: WorkerConnection, request: LoadModel, load: EngineFactory
) -> SteppedEngine | None:
    def report(stage: str, fraction: float | None) -> None:
        connection.send(LoadProgress(stage, fraction))

    error: VllmMlxError
    try:
        return load(request.model, request.engine, report)
    except VllmMlxError as known:
        error = known
    except Exception as unknown:  # any fault of files or libraries ends here
        logger.exception("loading %s failed", request.model.model)
        error = ModelLoadError(
            f"loading {request.model.model} failed: {type(unknown).__name__}: {unknown}"
        )
    connection.send(LoadFailed(ErrorInfo.of(error)))
    connection.flush(_FLUSH_TIMEOUT_S)
    return None


def _serve(connection: WorkerConnection, engine: SteppedEngine) -> None:
    """Step while there is work; without any, do what can wait, then sleep on the socket."""
    clearings: list[Clearing] = []
    told_at, is_told = time.monotonic(), True
    while True:
        if not engine.has_work:
            if not is_told:
                is_told = True
                connection.send(engine.stats())
            idle_s = _CLEARING_POLL_S if clearings else None
            connection.wait(0 if engine.idle() else idle_s)
        for message in connection.receive():
            match message:
                case AddRequest():
                    engine.add_request(message.request)
                case AbortRequest():
                    engine.abort(message.request_id)
                case GetStats():
                    connection.send(engine.stats())
                case ClearCache():
                    clearings.append(engine.clear_prefixes(ram=message.ram, ssd=message.ssd))
                case Shutdown():
                    return
                case _:
                    raise RuntimeError(f"not a message to a text engine: {type(message).__name__}")
        if connection.is_closed:
            return
        clearings = [clearing for clearing in clearings if not _answer(connection, clearing)]
        if engine.has_work:
            outputs = engine.step()
            if outputs.rows:
                connection.send(outputs)
            is_told = time.monotonic() - told_at >= _STATS_EVERY_S
            if is_told:
                # Whoever asks cannot always wait for the end of a step, and after a death nobody
                # could ask.
                told_at = time.monotonic()
                connection.send(engine.stats())


def _answer(connection: WorkerConnection, clearing: Clearing) -> bool:
    """Say what a removal has removed; return whether it was done."""
    result = clearing.result()
    if result is not None:
        connection.send(result)
    return result is not None


def _configure_process() -> None:
    faulthandler.enable()
    # The supervisor asks for the stacks before it ends a process whose step hangs.
    faulthandler.register(STACKS_SIGNAL, all_threads=True)
    # The parent logs each record again as its own user wants it.
    handler = logging.StreamHandler()
    handler.setFormatter(RecordFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    logging.captureWarnings(True)
    # Ctrl-C is for the parent, which then drains; SIGTERM, even if inherited ignored, is for us.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def main(argv: Sequence[str] | None = None, *, load: EngineFactory = load_model) -> int:
    """Run the engine process on the inherited socket `--fd`; return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fd", type=int, required=True, help="the inherited end of a socket pair")
    arguments = parser.parse_args(argv)
    _configure_process()
    sock = socket.socket(fileno=arguments.fd)
    # A compiler that MLX starts must not hold the socket open after this process has died.
    sock.set_inheritable(False)
    connection = WorkerConnection(sock)
    watch_parent(sock)
    return run_worker(connection, load)


def end_process(code: int) -> None:
    """End this process without the interpreter's and the libraries' tear-down.

    What had to be closed in order is closed; a crash of native threads or destructors on the way
    out would hide the exit code, and a hang would cost the supervisor its grace.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    end_process(main())
