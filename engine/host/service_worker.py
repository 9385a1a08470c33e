"""The engine process of a service: load the model of one kind and advance its calls in turn."""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from vllm_mlx.engine.core.outputs import ErrorInfo
from vllm_mlx.engine.errors import ModelLoadError, VllmMlxError
from vllm_mlx.engine.host.messages import (
    AbortRequest,
    CallEnd,
    CallPart,
    CallService,
    GetStats,
    LoadFailed,
    LoadProgress,
    LoadService,
    ServiceStats,
    Shutdown,
    ToEngine,
)
from vllm_mlx.engine.host.service import Service, ServiceKind, find_kind, find_loader
from vllm_mlx.engine.host.transport import WorkerConnection

logger = logging.getLogger(__name__)

#: How long the reason of a failed load may take to get through to a parent that is not reading.
_FLUSH_TIMEOUT_S = 5.0

AnyKind = ServiceKind[Any, Any, Any]


@dataclass
class _Call:
    """Hold one call that has begun."""

    request_id: str
    parts: Iterator[Any]


class CallTable:
    """Own the calls open at one service; the MLX thread of its process only."""

    def __init__(
        self, connection: WorkerConnection, service: Service[Any, Any], kind: AnyKind
    ) -> None:
        self._connection = connection
        self._service = service
        self._max_active = kind.max_active
        self._decoder = msgspec.msgpack.Decoder(kind.request_type)
        self._active: deque[_Call] = deque()
        self._waiting: deque[CallService] = deque()
        self._num_done = 0
        self._num_failed = 0

    @property
    def has_work(self) -> bool:
        """Say whether a call can advance now: what it says next would not pile up here."""
        return bool(self._active or self._waiting) and not self._connection.has_unsent

    def add(self, message: CallService) -> None:
        """Take a call; it begins when its turn comes."""
        self._waiting.append(message)

    def abort(self, request_id: str) -> None:
        """Close a call whose client has left; unknown ids are ignored, and nobody is told."""
        for waiting in self._waiting:
            if waiting.request_id == request_id:
                self._waiting.remove(waiting)
                return
        for call in self._active:
            if call.request_id == request_id:
                self._active.remove(call)
                _close(call)
                return

    def advance(self) -> None:
        """Do one piece of work of the call whose turn it is."""
        while self._waiting and len(self._active) < self._max_active:
            self._begin(self._waiting.popleft())
        if not self._active:
            return
        call = self._active.popleft()
        try:
            part = next(call.parts, _END)
        except Exception as error:  # noqa: BLE001 - whatever it was, it is this call's own fault
            self._fail(call.request_id, error)
            return
        if part is _END:
            self._num_done += 1
            self._connection.send(CallEnd(call.request_id))
            return
        self._active.append(call)
        if part is not None:
            payload = msgspec.Raw(msgspec.msgpack.encode(part))
            self._connection.send(CallPart(call.request_id, payload))

    def stats(self) -> ServiceStats:
        """Return a snapshot."""
        return ServiceStats(
            num_active=len(self._active),
            num_waiting=len(self._waiting),
            num_done=self._num_done,
            num_failed=self._num_failed,
        )

    def close(self) -> None:
        """Close what is open."""
        self._waiting.clear()
        while self._active:
            _close(self._active.popleft())

    def _begin(self, message: CallService) -> None:
        try:
            request = self._decoder.decode(message.request)
            parts = iter(self._service.handle(request))
        except Exception as error:  # noqa: BLE001 - the same as when it advances
            self._fail(message.request_id, error)
            return
        self._active.append(_Call(message.request_id, parts))

    def _fail(self, request_id: str, error: Exception) -> None:
        self._num_failed += 1
        if not isinstance(error, VllmMlxError):
            logger.error("request %s failed", request_id, exc_info=error)
        self._connection.send(CallEnd(request_id, ErrorInfo.of(error)))


#: In place of a part: the iterator has ended.
_END = object()


def run_service(connection: WorkerConnection, request: LoadService) -> bool:
    """Load what `request` names and serve until the end; say whether it could be loaded.

    Returns when asked to shut down or when the peer is gone. What is raised is a defect, after
    which a new process is the only repair.
    """
    if request.niceness:
        os.nice(request.niceness)
    kind = find_kind(request.kind)
    service = _load(connection, kind, request.config)
    if service is None:
        return False
    connection.send(msgspec.structs.replace(service.info, kind=kind.name, pid=os.getpid()))
    calls = CallTable(connection, service, kind)
    _serve(connection, calls)
    calls.close()
    service.close()
    return True


def _load(
    connection: WorkerConnection, kind: AnyKind, config: msgspec.Raw
) -> Service[Any, Any] | None:
    def report(stage: str, fraction: float | None) -> None:
        connection.send(LoadProgress(stage, fraction))

    error: VllmMlxError
    try:
        if kind.uses_mlx:
            from vllm_mlx.engine.platform import require_backend

            # Before anything else imports mlx, which binds to the BLAS that is there then.
            require_backend()
        load = find_loader(kind)
        return load(msgspec.msgpack.decode(config, type=kind.config_type), report)
    except VllmMlxError as known:
        error = known
    except Exception as unknown:  # any fault of files or libraries ends here
        logger.exception("loading the %s model failed", kind.name)
        error = ModelLoadError(
            f"loading the {kind.name} model failed: {type(unknown).__name__}: {unknown}"
        )
    connection.send(LoadFailed(ErrorInfo.of(error)))
    connection.flush(_FLUSH_TIMEOUT_S)
    return None


def _serve(connection: WorkerConnection, calls: CallTable) -> None:
    """Advance calls while there are any; sleep on the socket otherwise."""
    while True:
        if not calls.has_work:
            connection.wait()
        for message in connection.receive():
            if isinstance(message, Shutdown):
                return
            _take(connection, calls, message)
        if connection.is_closed:
            return
        if calls.has_work:
            calls.advance()


def _take(connection: WorkerConnection, calls: CallTable, message: ToEngine) -> None:
    match message:
        case CallService():
            calls.add(message)
        case AbortRequest():
            calls.abort(message.request_id)
        case GetStats():
            connection.send(calls.stats())
        case _:
            raise RuntimeError(f"not a message to a service: {type(message).__name__}")


def _close(call: _Call) -> None:
    close = getattr(call.parts, "close", None)
    if close is None:
        return
    try:
        close()
    except Exception:  # what a call leaves behind is no reason to end the others
        logger.exception("closing request %s failed", call.request_id)
