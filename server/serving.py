"""Run the server in this process: bind, start the engine, serve, drain on a signal, clean up."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from hypercorn.asyncio import serve
from hypercorn.config import Config

from vllm_mlx.engine.config import ChatConfig, EngineConfig, ModelConfig
from vllm_mlx.engine.errors import ModelLoadError, UsageError, VllmMlxError
from vllm_mlx.engine.host.supervisor import EngineSupervisor
from vllm_mlx.engine.logs import level_name
from vllm_mlx.engine.text.chat_template_file import read_chat_template
from vllm_mlx.engine.text.tokenizer import Tokenizer, load_tokenizer
from vllm_mlx.server import connections
from vllm_mlx.server.admission import describe_progress
from vllm_mlx.server.app import create_app
from vllm_mlx.server.config import ServerConfig
from vllm_mlx.server.engine_port import EngineCondition, EnginePort
from vllm_mlx.server.listener import bind, url_of
from vllm_mlx.server.no_chat import NoChatEngine
from vllm_mlx.server.ready_file import ReadyFile
from vllm_mlx.server.recording import open_recorder
from vllm_mlx.server.runtime import ServerRuntime
from vllm_mlx.server.served_model import ServedModel
from vllm_mlx.server.services.plan import ServicePlan
from vllm_mlx.server.services.port import ServicePort
from vllm_mlx.server.services.supervised import supervised
from vllm_mlx.server.startup_warming import warm_whenever_ready
from vllm_mlx.server.warm_prompts import WarmPrompt, read_prompts

logger = logging.getLogger(__name__)

#: What the last events get, after the engine has ended all streams, to reach their clients.
_FLUSH_S = 1.0

#: Signals that follow the first one within this time are the same one.
_SAME_SIGNAL_S = 1.0

#: What a forced stop leaves the engine process to end by itself.
_FORCED_GRACE_S = 1.0

#: Longer than clients keep idle connections, so that none is closed just as it is used again.
_IDLE_CONNECTION_S = 75

#: How often a long stage of loading is reported.
_PROGRESS_EVERY_S = 5.0

#: What tasks get to end when they are cancelled.
_CANCEL_S = 0.5

_BACKLOG = 512

#: How much more of a request's head is read than is accepted.
_HEAD_FACTOR = 2


def run_server(
    server: ServerConfig,
    model: ModelConfig,
    engine: EngineConfig,
    announce: Callable[[], None] = lambda: None,
    services: Sequence[ServicePlan] = (),
) -> int:
    """Serve until a signal, and return 130 (SIGINT) or 143 (SIGTERM). Blocks.

    `announce` is called once the address is had, before anything is loaded; what it raises ends
    the server. Raises what ended it otherwise: `UsageError` when the address or the ready file
    cannot be had, `ModelLoadError` when the model cannot be loaded, a plain `VllmMlxError` when the
    engine died again and again. Leaves no process, socket or ready file behind. For the main
    thread: it handles the process's signals.
    """
    ready_file = ReadyFile(server.ready_file)
    ready_file.prepare()
    if model.chat.chat_template is not None:
        # A template that cannot be used is known before anything is loaded.
        read_chat_template(Path(model.chat.chat_template))
    prompts = _prompts_to_warm(server, engine)
    recorder = open_recorder(Path(server.record_dir)) if server.record_dir else None
    with bind(server.host, server.port) as listener:
        announce()
        logger.info("listening on %s", url_of(listener))
        # The engine's process logs what this one does.
        chat: EnginePort = NoChatEngine()
        if server.serves_chat:
            _import_tokenizers_early()
            chat = EngineSupervisor(model, engine, log_level=level_name())
        load = partial(_load_tokenizer, model.chat)
        hosted = supervised(services, engine.step_timeout_s, beside_chat=server.serves_chat)
        runtime = ServerRuntime(server, model, engine, chat, load, recorder, hosted)
        try:
            return asyncio.run(Serving(runtime, listener, ready_file, prompts).run())
        finally:
            ready_file.remove()


#: Held by who imports the tokenizer's libraries.
_importing = threading.Lock()


class Serving:
    """Own one server's life from its start to its end; event loop only."""

    def __init__(
        self,
        runtime: ServerRuntime,
        listener: socket.socket,
        ready_file: ReadyFile,
        prompts: Sequence[WarmPrompt] = (),
    ) -> None:
        """Prepare; `listener` is taken over, and `prompts` are warmed when the model answers."""
        self._runtime = runtime
        self._url = url_of(listener)
        self._host, self._port = listener.getsockname()[:2]
        self._listener = listener
        self._ready_file = ready_file
        self._prompts = prompts
        self._warming: set[asyncio.Task[None]] = set()
        self._signals: asyncio.Queue[int] = asyncio.Queue()
        self._stop_accepting = asyncio.Event()

    async def run(self) -> int:
        """Serve until a signal and return the exit code; raise what ended it otherwise."""
        with _signals_to(self._signals.put_nowait):
            await self._runtime.engine.start()
            await self._runtime.services.start()
            http = asyncio.create_task(self._serve_http(), name="http")
            watch = asyncio.create_task(self._watch_engine(), name="engine-watch")
            stop = asyncio.create_task(self._signals.get(), name="signal")
            try:
                done, _ = await asyncio.wait(
                    {http, watch, stop}, return_when=asyncio.FIRST_COMPLETED
                )
                drain_s = self._runtime.config.drain_timeout_s if stop in done else 0.0
                await self._shut_down(http, drain_s)
            finally:
                await _cancel_all(http, watch, stop)
                self._runtime.close()
        if stop in done:
            return 128 + stop.result()
        # Neither task ends by itself but with an exception.
        return next(iter(done)).result() or 0

    async def _serve_http(self) -> None:
        connections.install()
        await serve(
            create_app(self._runtime),
            _hypercorn_config(self._listener.detach(), self._runtime.config),
            shutdown_trigger=self._stop_accepting.wait,
        )

    async def _watch_engine(self) -> None:
        """Say when the model is ready; raise when there will be none, or none any more."""
        engine = self._runtime.engine
        report = asyncio.create_task(self._report_loading())
        try:
            served = await self._load_all()
        except ModelLoadError:
            raise
        except VllmMlxError as error:
            raise VllmMlxError(error.message) from error
        finally:
            report.cancel()
        name = self._runtime.names.primary
        self._ready_file.write(url=self._url, host=self._host, port=self._port, model=name)
        if served is not None:
            logger.info("chats are read with: %s", served.formats.reason)
        logger.info("ready: %s on %s", name, self._url)
        if self._prompts:
            warming = warm_whenever_ready(self._runtime, self._prompts)
            self._warming.add(asyncio.create_task(warming, name="warming"))
        state = engine.state
        while state.phase != "failed":
            state = await engine.wait_for_change(state)
        raise _final_error(state)

    async def _load_all(self) -> ServedModel | None:
        """Wait for every model that loads at the start; the first that cannot load ends it."""
        services = asyncio.create_task(self._runtime.services.wait_loaded(), name="services")
        try:
            if not self._runtime.config.serves_chat:
                await services
                return None
            loading = asyncio.create_task(self._runtime.load(), name="chat-model")
            try:
                await asyncio.gather(loading, services)
            finally:
                loading.cancel()
            return loading.result()
        finally:
            services.cancel()

    async def _report_loading(self) -> None:
        """Log each stage of loading as it begins, and how far a long one is now and then."""
        engine, stage, logged_at = self._runtime.engine, "", 0.0
        state = engine.state
        while True:
            now = time.monotonic()
            if state.stage and (state.stage != stage or now - logged_at >= _PROGRESS_EVERY_S):
                stage, logged_at = state.stage, now
                logger.info("loading%s", describe_progress(state))
            state = await engine.wait_for_change(state)

    async def _shut_down(self, http: asyncio.Task[None], drain_s: float) -> None:
        """Accept nothing new, let what runs finish for `drain_s`, end the rest and the engine.

        A further signal ends the waiting.
        """
        self._ready_file.remove()
        self._stop_accepting.set()
        # Or its request would be waited for as a client's is.
        await _cancel_all(*self._warming)
        num_open = self._runtime.generations.num_open_rows
        if num_open:
            logger.info("waiting up to %g s for %d open requests", drain_s, num_open)
        stopping = asyncio.create_task(self._stop_engines(drain_s), name="engine-stop")
        forced = asyncio.create_task(self._second_signal(), name="second-signal")
        try:
            await asyncio.wait({stopping, forced}, return_when=asyncio.FIRST_COMPLETED)
            if not stopping.done():
                await self._force(stopping)
            await stopping
        finally:
            await _cancel_all(forced)
        # The streams have their last events by now; a client that does not read is not waited for.
        await asyncio.wait({http}, timeout=_FLUSH_S)

    async def _second_signal(self) -> None:
        """Wait for a signal that was meant as another one.

        `uv run` and `timeout` hand on what the terminal or they themselves have sent to the whole
        group already, so one keystroke may arrive twice.
        """
        await asyncio.sleep(_SAME_SIGNAL_S)
        while not self._signals.empty():
            self._signals.get_nowait()
        await self._signals.get()

    async def _force(self, stopping: asyncio.Task[None]) -> None:
        """End all requests now, and the engine's process if it does not end by itself."""
        logger.warning("second signal: stopping at once")
        ports: list[EnginePort | ServicePort] = [self._runtime.engine]
        ports += [service.port for service in self._runtime.services]
        now = asyncio.create_task(self._stop_engines(0.0), name="engine-stop-now")
        await asyncio.wait({stopping}, timeout=_FORCED_GRACE_S)
        for pid in [port.state.pid for port in ports if not stopping.done()]:
            if pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        await now

    async def _stop_engines(self, drain_s: float) -> None:
        runtime = self._runtime
        await asyncio.gather(runtime.engine.stop(drain_s), runtime.services.stop(drain_s))


def _prompts_to_warm(server: ServerConfig, engine: EngineConfig) -> list[WarmPrompt]:
    """Read what is to be warmed, before anything is loaded; raise `UsageError`."""
    if server.warm_prompts is None:
        return []
    if not engine.prefix_cache:
        raise UsageError("--warm-prompts needs the prefix cache, which is switched off")
    found = read_prompts(Path(server.warm_prompts))
    if found.faults:
        raise UsageError(found.faults[0])
    return found.prompts


def _final_error(state: EngineCondition) -> VllmMlxError:
    """Return what ends the program: a model that cannot load is one thing, a dying engine another.

    The supervisor's other errors describe requests; as the end of the program they are internal.
    """
    if isinstance(state.error, ModelLoadError):
        return state.error
    return VllmMlxError(state.error.message if state.error is not None else "the engine failed")


def _hypercorn_config(listener: int, server: ServerConfig) -> Config:
    config = Config()
    config.bind = [f"fd://{listener}"]
    config.backlog = _BACKLOG
    # Ends a connection whose request's head has not come whole in that time, too: a client that
    # sends it byte by byte holds nothing for longer.
    config.keep_alive_timeout = _IDLE_CONNECTION_S
    # What is far over the limit is not even read; what is a little over is answered by the routes'
    # guards, in the API's own shape.
    config.h11_max_incomplete_size = _HEAD_FACTOR * server.max_header_bytes
    config.h2_max_header_list_size = _HEAD_FACTOR * server.max_header_bytes
    # The drain is ours: `Serving` ends all streams and then the server. The default of 3 s
    # would cut them first.
    config.graceful_timeout = 24 * 3600.0
    config.include_server_header = False
    # Its access log cannot name requests; ours does.
    config.accesslog = None
    http_logger = logging.getLogger("vllm_mlx.http")
    http_logger.setLevel(logging.WARNING)
    config.errorlog = http_logger
    return config


def _load_tokenizer(chat: ChatConfig, folder: Path, trust_remote_code: bool) -> Tokenizer:
    # Two threads that import transformers at once: one can find it without what it asks for.
    with _importing:
        return load_tokenizer(folder, trust_remote_code=trust_remote_code, chat=chat)


def _import_tokenizers_early() -> None:
    """Import the tokenizer's libraries while the engine loads, instead of after it.

    A daemon: a signal in the first seconds does not wait for an import.
    """

    def import_them() -> None:
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
        with _importing, contextlib.suppress(ImportError):
            from transformers import AutoTokenizer  # noqa: F401

    threading.Thread(target=import_them, name="import-transformers", daemon=True).start()


@contextlib.contextmanager
def _signals_to(receive: Callable[[int], None]) -> Iterator[None]:
    """Hand SIGINT and SIGTERM to `receive` instead of to Python's handlers."""
    loop = asyncio.get_running_loop()
    caught = (signal.SIGINT, signal.SIGTERM)
    for number in caught:
        loop.add_signal_handler(number, receive, int(number))
    try:
        yield
    finally:
        for number in caught:
            loop.remove_signal_handler(number)


async def _cancel_all(*tasks: asyncio.Task[Any]) -> None:
    """Cancel and wait, but not for ever: a connection to a client that does not read resists.

    What is left then is cancelled once more by the end of the event loop, which frees it.
    """
    for task in tasks:
        task.cancel()
    if not tasks:
        return
    done, _ = await asyncio.wait(tasks, timeout=_CANCEL_S)
    for task in done:
        if not task.cancelled() and task.exception() is not None:
            logger.debug("%s ended with %r", task.get_name(), task.exception())
