"""The engines beside the chat model: found by kind and name, started and stopped together."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

from vllm_mlx.engine.errors import ModelUnknownError
from vllm_mlx.server.services.hosted import HostedService
from vllm_mlx.server.services.plan import FLAGS


class ServiceRegistry:
    """Own the services of one server. Event loop only."""

    def __init__(self, services: Sequence[HostedService] = ()) -> None:
        self._services = tuple(services)

    def __iter__(self) -> Iterator[HostedService]:
        return iter(self._services)

    def __len__(self) -> int:
        return len(self._services)

    @property
    def is_ready(self) -> bool:
        """Say whether every service that loads at the start has done so, and one answers now.

        One that dies later is no reason to send nobody here any more: its own routes say so.
        """
        answers = any(s.loads_on_demand or s.is_ready for s in self._services)
        return answers and self.is_loaded

    @property
    def is_loaded(self) -> bool:
        """Say whether every service that loads at the start has done so; true without any."""
        return all(s.loads_on_demand or s.created is not None for s in self._services)

    def find(self, kind: str, name: str | None) -> HostedService:
        """Return the service of `kind` that a request calls `name`; the first one without a name.

        Raises `ModelUnknownError` that names the flag.
        """
        services = [service for service in self._services if service.kind == kind]
        if not services:
            raise ModelUnknownError(
                f"no {kind} model is served here: start the server with {FLAGS[kind]} MODEL",
                param="model",
            )
        for service in services:
            if name is None or service.names.knows(name):
                return service
        served = ", ".join(repr(service.names.primary) for service in services)
        raise ModelUnknownError(
            f"the {kind} model {name!r} does not exist here; this server serves {served} (also as "
            f"'default'); others are named at its start with {FLAGS[kind]}",
            param="model",
        )

    def named(self, name: str) -> HostedService | None:
        """Return the service of any kind with this name of its own, not `default`."""
        for service in self._services:
            if service.names.is_own(name):
                return service
        return None

    async def start(self) -> None:
        """Begin to load all that load at the start."""
        for service in self._services:
            await service.start()

    async def wait_loaded(self) -> None:
        """Wait until all that load at the start have; raise the first reason why one cannot."""
        await asyncio.gather(*(service.wait_loaded() for service in self._services))

    async def stop(self, drain_timeout_s: float) -> None:
        """Stop all, each within the time given."""
        await asyncio.gather(*(service.stop(drain_timeout_s) for service in self._services))
