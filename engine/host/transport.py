"""Length-prefixed msgpack frames over a socket pair: a polling end and an asyncio end."""

from __future__ import annotations

import asyncio
import logging
import select
import socket
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar, cast

import msgspec

from vllm_mlx.engine.core.outputs import RowOutput, StepOutputs
from vllm_mlx.engine.host.delta import DeltaSlot
from vllm_mlx.engine.host.messages import FromEngine, LoadProgress, ToEngine

logger = logging.getLogger(__name__)

Message = TypeVar("Message")

_PREFIX_BYTES = 4
#: A longer frame can only be a broken stream: the largest real one is a prompt of 4 bytes a token.
MAX_FRAME_BYTES = 1 << 30
#: Below the allocator's threshold for mapping pages at every call.
_RECEIVE_BYTES = 1 << 16

_encoder = msgspec.msgpack.Encoder()


class BrokenFrameError(ValueError):
    """Report bytes that are no frame of the protocol; the connection is of no more use."""


def encode_frame(message: ToEngine | FromEngine) -> bytearray:
    """Encode one message with its length before it."""
    frame = bytearray(_PREFIX_BYTES)
    _encoder.encode_into(message, frame, _PREFIX_BYTES)
    frame[:_PREFIX_BYTES] = (len(frame) - _PREFIX_BYTES).to_bytes(_PREFIX_BYTES, "big")
    return frame


class FrameDecoder(Generic[Message]):
    """Cut a byte stream into messages, however the bytes arrive."""

    def __init__(self, message_type: Any) -> None:
        self._decoder = msgspec.msgpack.Decoder(message_type)
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """Return the messages that `data` completes, in order; raise `BrokenFrameError`."""
        self._buffer += data
        messages: list[Message] = []
        start = 0
        while len(self._buffer) - start >= _PREFIX_BYTES:
            body = start + _PREFIX_BYTES
            length = int.from_bytes(self._buffer[start:body], "big")
            if length > MAX_FRAME_BYTES:
                raise BrokenFrameError(f"a frame of {length} bytes, over {MAX_FRAME_BYTES}")
            end = body + length
            if len(self._buffer) < end:
                break
            try:
                messages.append(cast(Message, self._decoder.decode(self._buffer[body:end])))
            except msgspec.MsgspecError as error:
                raise BrokenFrameError(
                    f"a frame of {length} bytes is no message: {error}"
                ) from error
            start = end
        del self._buffer[:start]
        return messages


class WorkerConnection:
    """Exchange messages with the HTTP process and never wait for it while there is work.

    The engine process's end, owned by the thread that steps the engine; `sock` becomes
    non-blocking. Nothing is raised when the peer is gone: `is_closed` turns true.

    A message that the socket does not take is kept and the engine steps on. What is kept is
    bounded without a limit of its own: one frame that is partly written, at most one progress
    message and one stats answer (the peer asks again only when answered), and for each request the
    peer still waits for, one merged output: its text and 4 bytes a token, `max_tokens` at most.
    A peer that reads nothing adds no requests, so nothing grows while it is stopped.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._decoder: FrameDecoder[ToEngine] = FrameDecoder(ToEngine)
        self._partial = memoryview(b"")
        self._messages: deque[FromEngine] = deque()
        self._rows: dict[str, DeltaSlot] = {}
        self._is_closed = False

    @property
    def is_closed(self) -> bool:
        """Say whether the peer has closed its end or has died."""
        return self._is_closed

    @property
    def has_unsent(self) -> bool:
        """Say whether anything still waits for the socket."""
        return bool(self._partial or self._messages or self._rows)

    def receive(self) -> list[ToEngine]:
        """Return what has arrived, without waiting, and write what the socket takes by now."""
        self._write()
        messages: list[ToEngine] = []
        while not self._is_closed:
            try:
                data = self._sock.recv(_RECEIVE_BYTES)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            if not data:
                self._is_closed = True
            messages += self._decoder.feed(data)
            if len(data) < _RECEIVE_BYTES:
                break
        return messages

    def wait(self, timeout_s: float | None = None) -> None:
        """Sleep until a message arrives, the peer closes, or the socket takes what is unsent."""
        events = select.POLLIN | (select.POLLOUT if self.has_unsent else 0)
        poller = select.poll()
        poller.register(self._sock, events)
        poller.poll(None if timeout_s is None else timeout_s * 1000)

    def send(self, message: FromEngine) -> None:
        """Hand over one message; what the socket does not take goes out with later calls."""
        if isinstance(message, StepOutputs):
            self._keep_rows(message.rows)
        else:
            last = self._messages[-1] if self._messages else None
            if isinstance(message, LoadProgress) and isinstance(last, LoadProgress):
                self._messages.pop()
            self._messages.append(message)
        self._write()

    def flush(self, timeout_s: float) -> bool:
        """Write everything, waiting for the peer up to `timeout_s`; say whether all is out."""
        deadline = time.monotonic() + timeout_s
        self._write()
        while self.has_unsent and not self._is_closed:
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                return False
            poller = select.poll()
            poller.register(self._sock, select.POLLOUT)
            poller.poll(remaining_s * 1000)
            self._write()
        return not self.has_unsent

    def close(self) -> None:
        """Close the socket; what is unsent is lost."""
        self._is_closed = True
        self._sock.close()

    def _keep_rows(self, rows: tuple[RowOutput, ...]) -> None:
        for row in rows:
            slot = self._rows.get(row.request_id)
            if slot is None:
                slot = self._rows[row.request_id] = DeltaSlot()
            slot.put(row)

    def _write(self) -> None:
        """Write until the socket would block or nothing is left."""
        while not self._is_closed:
            if not self._partial:
                message = self._next_message()
                if message is None:
                    return
                self._partial = memoryview(encode_frame(message))
            try:
                sent = self._sock.send(self._partial)
            except BlockingIOError:
                return
            except OSError:
                self._is_closed = True
                return
            self._partial = self._partial[sent:]

    def _next_message(self) -> FromEngine | None:
        if self._messages:
            return self._messages.popleft()
        if not self._rows:
            return None
        rows = tuple(slot.take() for slot in self._rows.values())
        self._rows.clear()
        return StepOutputs(rows=rows)


class EngineChannel(asyncio.Protocol):
    """Exchange messages with the engine process from the event loop.

    `on_message` is called for each message in order, `on_lost` exactly once when the connection
    has ended for whatever reason; both on the loop's thread, and neither may block or raise.
    Writes never wait: what the engine does not read yet stays in this process, and is bounded by
    what the server admits.
    """

    def __init__(
        self, on_message: Callable[[FromEngine], None], on_lost: Callable[[], None]
    ) -> None:
        self._on_message = on_message
        self._on_lost = on_lost
        self._decoder: FrameDecoder[FromEngine] = FrameDecoder(FromEngine)
        self._transport: asyncio.Transport | None = None

    @property
    def is_open(self) -> bool:
        """Say whether a message sent now can still reach the engine."""
        return self._transport is not None and not self._transport.is_closing()

    def send(self, message: ToEngine) -> None:
        """Send one message; do nothing when the connection has ended (`on_lost` tells)."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(encode_frame(message))

    def close(self) -> None:
        """End the connection at once; `on_lost` follows from the event loop."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport; called by asyncio."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Decode and hand on; called by asyncio. A broken frame ends the connection."""
        try:
            messages = self._decoder.feed(data)
        except BrokenFrameError:
            logger.exception("the engine process sent what is no message; ending it")
            self.close()
            return
        for message in messages:
            self._on_message(message)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        """Report the end once; called by asyncio."""
        self._transport = None
        self._on_lost()
