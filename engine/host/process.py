"""One engine process: its start, its log, its end and the words for how it ended."""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Sequence
from typing import cast

import msgspec

from vllm_mlx.engine.host.messages import STACKS_SIGNAL, FromEngine, ToEngine
from vllm_mlx.engine.host.transport import EngineChannel
from vllm_mlx.engine.logs import read_record

logger = logging.getLogger("vllm_mlx.engine.process")

#: `-P` keeps the working directory, which may hold a `random.py`, out of the module path.
WORKER_COMMAND = (sys.executable, "-P", "-m", "vllm_mlx.engine.host.worker")

_NUM_LAST_WORDS = 20
_MAX_LINE_BYTES = 1 << 16
#: How often to look for an exit that the socket does not tell, as when a child of it holds it open.
_POLL_S = 0.25
#: What a dead process left in its log pipe is there at once, unless a child of it holds the pipe.
_LAST_WORDS_TIMEOUT_S = 0.2
_KILL_TIMEOUT_S = 2.0
#: What writing the stacks may take.
_STACKS_S = 0.3


class ExitReport(msgspec.Struct, frozen=True):
    """Say how an engine process ended and what it printed last."""

    #: As `Popen.returncode`: negative for a signal; None if it could not be started or reaped.
    returncode: int | None
    last_words: tuple[str, ...] = ()
    #: Why it could not be started.
    start_error: str | None = None
    #: How long its last step had taken when it was ended for that; None if it was not.
    hung_s: float | None = None

    @property
    def headline(self) -> str:
        """Say in one line how it ended."""
        if self.start_error is not None:
            return f"the engine process could not be started: {self.start_error}"
        if self.hung_s is not None:
            return (
                f"the engine process was ended: a step did not finish within {self.hung_s:g} s "
                "(--step-timeout)"
            )
        if self.returncode is None:
            return "the engine process closed its connection and could not be ended"
        if self.returncode < 0:
            number = -self.returncode
            try:
                name = signal.Signals(number).name
            except ValueError:
                name = "unknown"
            return f"the engine process was killed by signal {number} ({name})"
        return f"the engine process ended with exit code {self.returncode}"

    def describe(self) -> str:
        """Say how it ended, with its last words on lines of their own."""
        if not self.last_words:
            return self.headline
        return "\n  ".join([f"{self.headline}; its last words:", *self.last_words])


class ProcessLog(asyncio.Protocol):
    """Log a process's output line by line and remember the last lines.

    A record that the process logged is logged here as it was there. Any other line that starts
    with the name of a log level is logged at that level, and what follows it too. Of a line that
    was redrawn by carriage returns only the last state counts.
    """

    def __init__(self) -> None:
        self.ended = asyncio.Event()
        self._lines: deque[str] = deque(maxlen=_NUM_LAST_WORDS)
        self._partial = b""
        self._level = logging.INFO

    @property
    def last_words(self) -> tuple[str, ...]:
        """Return the last lines, oldest first."""
        return tuple(self._lines)

    def data_received(self, data: bytes) -> None:
        """Cut into lines; called by asyncio."""
        *lines, self._partial = (self._partial + data).split(b"\n")
        for line in lines:
            self._log(line)
        if len(self._partial) > _MAX_LINE_BYTES:
            self._log(self._partial)
            self._partial = b""

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        """Log what is left; called by asyncio."""
        self._log(self._partial)
        self._partial = b""
        self.ended.set()

    def _log(self, line: bytes) -> None:
        text = line.rstrip().rpartition(b"\r")[2].decode("utf-8", "replace")
        if not text:
            return
        record = read_record(text)
        if record is not None:
            self._pass_on(record)
            return
        first, _, rest = text.partition(" ")
        level = logging.getLevelNamesMapping().get(first)
        if level is not None:
            self._level, text = level, rest
        self._lines.append(text)
        logger.log(self._level, "%s", text)

    def _pass_on(self, record: logging.LogRecord) -> None:
        # Its traceback is part of it: what comes next is of nobody knows which level.
        self._level = logging.INFO
        words = f"{record.name}: {record.getMessage()}\n{record.exc_text or ''}"
        self._lines.extend(line for line in words.splitlines() if line)
        owner = logging.getLogger(record.name)
        if owner.isEnabledFor(record.levelno):
            owner.handle(record)


class EngineProcess:
    """Own one engine process from start to reaping; made by `start_process`. Event loop only."""

    def __init__(
        self,
        popen: subprocess.Popen[bytes],
        channel: EngineChannel,
        log: ProcessLog,
        log_transport: asyncio.ReadTransport,
        lost: asyncio.Event,
    ) -> None:
        self._popen = popen
        self._channel = channel
        self._log = log
        self._log_transport = log_transport
        self._lost = lost

    @property
    def pid(self) -> int:
        """Return the process id."""
        return self._popen.pid

    def send(self, message: ToEngine) -> None:
        """Send one message; nothing happens when the process has gone."""
        self._channel.send(message)

    async def wait_ended(self) -> None:
        """Wait until the connection has ended or the process has."""
        while not self._lost.is_set() and self._popen.poll() is None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._lost.wait(), _POLL_S)

    async def show_stacks(self) -> None:
        """Have the process write to its log where its threads are, and give it time to."""
        self._popen.send_signal(STACKS_SIGNAL)
        await asyncio.sleep(_STACKS_S)

    async def finish(self, grace_s: float) -> ExitReport:
        """Reap the process, killing it if it has not ended within `grace_s`, and free all of it."""
        try:
            if not await self._wait_exit(grace_s):
                self._popen.kill()
                await self._wait_exit(_KILL_TIMEOUT_S)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._log.ended.wait(), _LAST_WORDS_TIMEOUT_S)
        finally:
            if self._popen.poll() is None:
                self._popen.kill()
                logger.error("engine process %d does not end; killed, left behind", self.pid)
            self._channel.close()
            self._log_transport.close()
        return ExitReport(self._popen.returncode, self._log.last_words)

    async def _wait_exit(self, timeout_s: float) -> bool:
        """Poll for the exit: no portable way lets an event loop wait for one process."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        pause_s = 0.001
        while self._popen.poll() is None:
            if loop.time() >= deadline:
                return False
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 1.5, 0.02)
        return True


async def start_process(
    command: Sequence[str],
    on_message: Callable[[FromEngine], None],
    on_lost: Callable[[], None],
) -> EngineProcess:
    """Start `command` with the other end of a socket pair as `--fd`; raise OSError if it cannot.

    The callbacks are `EngineChannel`'s. The process gets a session of its own, so a terminal's
    Ctrl-C does not reach it; all it prints goes to the log, none to this process's own output.
    Call it on a thread that lives as long as the process may: on Linux the engine process is
    killed when the thread that started it ends.
    """
    ours, theirs = socket.socketpair()
    try:
        popen = subprocess.Popen(
            [*command, "--fd", str(theirs.fileno())],
            pass_fds=(theirs.fileno(),),
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            bufsize=0,
        )
    except OSError:
        ours.close()
        raise
    finally:
        theirs.close()
    lost = asyncio.Event()

    def report_lost() -> None:
        lost.set()
        on_lost()

    channel = EngineChannel(on_message, report_lost)
    log = ProcessLog()
    output = cast(io.RawIOBase, popen.stdout)
    try:
        loop = asyncio.get_running_loop()
        await loop.create_connection(lambda: channel, sock=ours)
        log_transport, _ = await loop.connect_read_pipe(lambda: log, output)
    except BaseException:
        # Cancelled half-way: nobody else knows of the process yet.
        popen.kill()
        popen.wait()
        channel.close()
        ours.close()
        output.close()
        raise
    return EngineProcess(popen, channel, log, log_transport, lost)
