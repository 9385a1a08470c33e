"""The part of a service's supervisor that the server uses; tests put a small one behind it."""

from __future__ import annotations

from typing import Any, Protocol

from vllm_mlx.engine.host.messages import ServiceInfo
from vllm_mlx.server.engine_port import EngineCondition


class PartStream(Protocol):
    """Iterate over the parts of one answer; raises the error of a call that has failed.

    A cancelled `__anext__` loses nothing. `aclose` ends what has not ended.
    """

    async def __anext__(self) -> Any: ...

    async def aclose(self) -> None:
        """End the call if it has not ended."""
        ...


class ServicePort(Protocol):
    """Reach one service; `vllm_mlx.engine.host.service_supervisor.ServiceSupervisor` is real."""

    @property
    def state(self) -> EngineCondition:
        """Return the service's condition now."""
        ...

    @property
    def info(self) -> ServiceInfo | None:
        """Return what was loaded, once it is."""
        ...

    @property
    def num_open(self) -> int:
        """Count the calls that have not ended."""
        ...

    async def start(self) -> None:
        """Begin to load, in the background."""
        ...

    async def stop(self, drain_timeout_s: float) -> None:
        """Let open calls finish for so long, end the rest and the process."""
        ...

    async def wait_ready(self) -> ServiceInfo:
        """Wait until the model answers; raise why it never will."""
        ...

    def call(self, request_id: str, request: Any) -> PartStream:
        """Start one call; raise `EngineUnavailableError` when the service is not ready."""
        ...
