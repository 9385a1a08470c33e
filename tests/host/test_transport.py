"""Frames arrive whole however they are cut, and a slow peer never blocks who writes."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from vllm_mlx.engine.config import EngineConfig, ModelConfig
from vllm_mlx.engine.core.outputs import RowOutput, StepOutputs, pack_tokens, unpack_tokens
from vllm_mlx.engine.core.request import GenerationRequest, SamplingParams
from vllm_mlx.engine.core.stats import EngineStats
from vllm_mlx.engine.host.messages import (
    AbortRequest,
    AddRequest,
    FromEngine,
    GetStats,
    LoadModel,
    LoadProgress,
    Shutdown,
    ToEngine,
)
from vllm_mlx.engine.host.transport import (
    MAX_FRAME_BYTES,
    BrokenFrameError,
    EngineChannel,
    FrameDecoder,
    WorkerConnection,
    encode_frame,
)

MESSAGES: list[ToEngine] = [
    LoadModel(ModelConfig(offline=True), EngineConfig(max_num_seqs=3)),
    AddRequest(
        GenerationRequest(
            request_id="a", prompt=pack_tokens(range(300)), sampling=SamplingParams(stop=("é",))
        )
    ),
    AbortRequest("a"),
    GetStats(),
    Shutdown(),
]


@pytest.fixture
def pair() -> Iterator[tuple[WorkerConnection, socket.socket]]:
    """Return a worker's connection and the plain socket at its other end."""
    ours, theirs = socket.socketpair()
    theirs.settimeout(5.0)
    connection = WorkerConnection(ours)
    with theirs:
        yield connection, theirs
    connection.close()


def read_frames(sock: socket.socket, connection: WorkerConnection) -> list[FromEngine]:
    """Read all that `connection` has to send, letting it write in between."""
    decoder: FrameDecoder[FromEngine] = FrameDecoder(FromEngine)
    messages: list[FromEngine] = []
    sock.setblocking(False)
    while True:
        try:
            messages += decoder.feed(sock.recv(1 << 16))
        except BlockingIOError:
            if not connection.has_unsent:
                return messages
            connection.receive()


@pytest.mark.parametrize("size", [1, 2, 3, 5, 17, 4096])
def test_messages_survive_any_cut(size: int) -> None:
    """A byte stream cut anywhere gives the same messages."""
    stream = b"".join(encode_frame(message) for message in MESSAGES)
    decoder: FrameDecoder[ToEngine] = FrameDecoder(ToEngine)
    decoded: list[ToEngine] = []
    for start in range(0, len(stream), size):
        decoded += decoder.feed(stream[start : start + size])
    assert decoded == MESSAGES


@pytest.mark.parametrize(
    "frame",
    [
        (MAX_FRAME_BYTES + 1).to_bytes(4, "big"),
        b"\x00\x00\x00\x01\xc1",
        b"\x00\x00\x00\x02\x81\xa4",
        bytes(encode_frame(GetStats())).replace(b"get_stats", b"get_state"),
    ],
    ids=["too long", "no msgpack", "cut msgpack", "unknown message"],
)
def test_broken_frames_are_refused(frame: bytes) -> None:
    """Bytes that are no message of the protocol raise instead of being skipped."""
    with pytest.raises(BrokenFrameError):
        FrameDecoder[ToEngine](ToEngine).feed(frame)


def test_receiving_never_waits(pair: tuple[WorkerConnection, socket.socket]) -> None:
    """An empty socket gives no messages at once, a full one all of them in order."""
    connection, peer = pair
    assert connection.receive() == []
    for message in MESSAGES:
        peer.sendall(encode_frame(message))
    assert connection.receive() == MESSAGES
    assert connection.receive() == []
    assert not connection.is_closed


def test_a_long_message_is_received_in_one_call(
    pair: tuple[WorkerConnection, socket.socket],
) -> None:
    """A prompt longer than one read arrives whole."""
    connection, peer = pair
    message = AddRequest(
        GenerationRequest(request_id="a", prompt=bytes(400_000), sampling=SamplingParams())
    )
    writer = threading.Thread(target=peer.sendall, args=(encode_frame(message),))
    writer.start()
    received: list[ToEngine] = []
    while not received:
        connection.wait(1.0)
        received = connection.receive()
    writer.join()
    assert received == [message]


def test_the_peers_end_is_seen(pair: tuple[WorkerConnection, socket.socket]) -> None:
    """What was sent before the end still arrives; then the connection is closed, silently."""
    connection, peer = pair
    peer.sendall(encode_frame(GetStats()))
    peer.close()
    messages = connection.receive()
    connection.wait(5.0)
    messages += connection.receive()
    assert messages == [GetStats()]
    assert connection.is_closed
    connection.send(EngineStats())
    assert not connection.flush(0.1)


def test_waiting_ends_with_a_message(pair: tuple[WorkerConnection, socket.socket]) -> None:
    """A sleeping worker wakes for a message, and after its timeout without one."""
    connection, peer = pair
    started = time.monotonic()
    connection.wait(0.05)
    assert time.monotonic() - started >= 0.05
    timer = threading.Timer(0.05, peer.sendall, (encode_frame(GetStats()),))
    timer.start()
    connection.wait(5.0)
    assert connection.receive() == [GetStats()]
    timer.join()


def test_a_peer_that_does_not_read_blocks_nothing(
    pair: tuple[WorkerConnection, socket.socket],
) -> None:
    """Twenty thousand steps for a stopped reader merge: all text comes, in a few messages."""
    connection, peer = pair
    num_steps = 20_000
    for step in range(num_steps):
        is_last = step == num_steps - 1
        rows = tuple(
            RowOutput(
                request_id=name,
                text="x",
                token_ids=pack_tokens([step]),
                finish_reason="length" if is_last else None,
                num_completion_tokens=step + 1,
            )
            for name in ("a", "b")
        )
        connection.send(StepOutputs(rows=rows))
        connection.receive()
    assert connection.has_unsent
    messages = read_frames(peer, connection)
    steps = [message for message in messages if isinstance(message, StepOutputs)]
    assert len(steps) == len(messages) < num_steps / 2
    for name in ("a", "b"):
        rows = tuple(row for step in steps for row in step.rows if row.request_id == name)
        assert "".join(row.text for row in rows) == "x" * num_steps
        tokens = [token for row in rows for token in unpack_tokens(row.token_ids)]
        assert tokens == list(range(num_steps))
        assert [row.finish_reason for row in rows if row.finish_reason] == ["length"]
        assert rows[-1].num_completion_tokens == num_steps


def test_unread_progress_is_replaced(pair: tuple[WorkerConnection, socket.socket]) -> None:
    """A load that reports often keeps one report for a reader that does not read."""
    connection, peer = pair
    num_reports = 50_000
    for report in range(num_reports):
        connection.send(LoadProgress("loading weights", report / num_reports))
    messages = read_frames(peer, connection)
    assert len(messages) < num_reports / 2
    assert messages[-1] == LoadProgress("loading weights", (num_reports - 1) / num_reports)


def test_flush_waits_for_a_slow_reader(pair: tuple[WorkerConnection, socket.socket]) -> None:
    """Flushing gives up on a reader that does not read and succeeds with one that does."""
    connection, peer = pair
    connection.send(StepOutputs(rows=(RowOutput(request_id="a", text="x" * 3_000_000),)))
    assert not connection.flush(0.05)
    received: list[int] = []

    def read() -> None:
        while sum(received) < 3_000_000:
            received.append(len(peer.recv(1 << 16)))

    reader = threading.Thread(target=read)
    reader.start()
    assert connection.flush(5.0)
    reader.join()


async def test_the_event_loops_end_delivers_in_order_and_reports_the_end_once() -> None:
    """Messages come in order, the end comes once, and sending after it does nothing."""
    ours, theirs = socket.socketpair()
    connection = WorkerConnection(theirs)
    received: list[FromEngine] = []
    ended: list[bool] = []
    channel = EngineChannel(received.append, lambda: ended.append(True))
    await asyncio.get_running_loop().create_connection(lambda: channel, sock=ours)
    channel.send(GetStats())
    channel.send(Shutdown())
    connection.wait(5.0)
    assert connection.receive() == [GetStats(), Shutdown()]
    sent: list[FromEngine] = [LoadProgress("one"), EngineStats(steps_executed=2)]
    for message in sent:
        connection.send(message)
    connection.close()
    while not ended:
        await asyncio.sleep(0.001)
    assert received == sent
    assert not channel.is_open
    channel.send(GetStats())
    channel.close()
    await asyncio.sleep(0.01)
    assert ended == [True]
