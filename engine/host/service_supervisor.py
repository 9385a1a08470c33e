"""The supervisor of one service's process: any kind of engine but the text engine."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Generic

import msgspec

from vllm_mlx.engine.errors import VllmMlxError
from vllm_mlx.engine.host.messages import (
    FromService,
    FromTextEngine,
    LoadService,
    ServiceInfo,
    ToEngine,
)
from vllm_mlx.engine.host.restart import RestartPolicy
from vllm_mlx.engine.host.service import ConfigT, PartT, RequestT, ServiceKind
from vllm_mlx.engine.host.service_client import CallStream, ServiceClient
from vllm_mlx.engine.host.supervision import ProcessSupervisor

logger = logging.getLogger(__name__)


class ServiceSupervisor(
    ProcessSupervisor[ServiceClient[PartT], ServiceInfo], Generic[ConfigT, RequestT, PartT]
):
    """Own the process of one service and every call open at it. Event loop only.

    A process that dies ends the calls that it held with `EngineDiedError`, and is started again as
    a text engine is; nothing else is touched by it.
    """

    def __init__(
        self,
        kind: ServiceKind[ConfigT, RequestT, PartT],
        config: ConfigT,
        *,
        restart: RestartPolicy | None = None,
        command: Sequence[str] | None = None,
        stop_grace_s: float = 5.0,
        step_timeout_s: float = 300.0,
        log_level: str = "INFO",
        niceness: int = 0,
    ) -> None:
        """Prepare; one piece of work may take `step_timeout_s`, 0 for any time."""
        super().__init__(
            name=kind.name,
            restart=restart,
            command=command,
            stop_grace_s=stop_grace_s,
            step_timeout_s=step_timeout_s,
        )
        self.kind = kind
        self._config = config
        self._log_level = log_level
        self._niceness = niceness

    def call(self, request_id: str, request: RequestT) -> CallStream[PartT]:
        """Hand a request to the service and return its stream of parts.

        Its id must be new. Raises `EngineUnavailableError` unless the service is ready.
        """
        client = self._client
        if self._state.phase != "ready" or client is None:
            raise self._unavailable()
        return client.call(request_id, request)

    def _fail(self, error: VllmMlxError) -> None:
        super()._fail(error)
        if self._info is not None:
            # Nobody else says so: the server goes on without it.
            logger.error("the %s engine is not started again: %s", self._name, error.message)

    def _load_message(self) -> LoadService:
        return LoadService(
            kind=self.kind.reference,
            config=msgspec.Raw(msgspec.msgpack.encode(self._config)),
            log_level=self._log_level,
            niceness=self._niceness,
        )

    def _make_client(self, send: Callable[[ToEngine], None]) -> ServiceClient[PartT]:
        return ServiceClient(send, self.kind.part_type)

    def _receive(self, client: ServiceClient[PartT], message: FromTextEngine | FromService) -> None:
        assert isinstance(message, FromService), message
        client.deliver(message)
