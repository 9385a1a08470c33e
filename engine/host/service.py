"""Engines of other kinds than text: the contract between a kind, its process and its callers.

A kind (`embedding`, `rerank`, `transcription`, `speech`) is declared once, as a `ServiceKind` at
the top level of a module that imports nothing heavy: its name, the frozen msgspec structs that
cross the process boundary, and where the process finds the code that computes.

    class EchoRequest(msgspec.Struct, frozen=True):
        text: str

    class EchoPart(msgspec.Struct, frozen=True):
        text: str

    ECHO = ServiceKind(
        name="echo",
        reference="vllm_mlx.engine.echo.kind:ECHO",
        loader="vllm_mlx.engine.echo.service:load_echo",
        config_type=EchoConfig,
        request_type=EchoRequest,
        part_type=EchoPart,
    )

The loader's module may import MLX: only the engine process imports it, after the backend has been
prepared. `load_echo(config, on_progress)` raises a `ModelLoadError` or returns a `Service`.

`Service.handle(request)` returns an iterator of parts. Everything, loading and every `next` of
every iterator, runs on the process's one MLX thread. One `next` is one piece of work and must end
(well) within the step timeout: between two of them other calls get their turn, a call whose client
has left is closed, and statistics are answered. An iterator that has worked but has nothing to say
yet yields None. An exception of an iterator ends its call only: a `RequestError` reaches the client
as it is, anything else as `RowFailedError`.

The HTTP process holds a `ServiceSupervisor` of the kind (`service_supervisor.py`), whose
`call(request)` returns a `CallStream` of the same parts.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, cast

from vllm_mlx.engine.host.messages import ServiceInfo

ConfigT = TypeVar("ConfigT")
RequestT = TypeVar("RequestT")
PartT = TypeVar("PartT")
RequestT_contra = TypeVar("RequestT_contra", contravariant=True)
PartT_co = TypeVar("PartT_co", covariant=True)

#: Says how far loading is: (stage in words, fraction in 0..1 or None).
ProgressCallback = Callable[[str, float | None], None]


class Service(Protocol[RequestT_contra, PartT_co]):
    """Answer calls with one loaded model; the MLX thread of its process only."""

    @property
    def info(self) -> ServiceInfo:
        """Return what was loaded; its `kind` and `pid` are filled in by the process."""
        ...

    def handle(self, request: RequestT_contra) -> Iterator[PartT_co | None]:
        """Return the parts of one answer, computed as they are asked for.

        Closed early when the client has left.
        """
        ...

    def close(self) -> None:
        """Free what must be freed in order."""
        ...


@dataclass(frozen=True)
class ServiceKind(Generic[ConfigT, RequestT, PartT]):
    """Declare one kind of engine; see the module's docstring."""

    name: str
    #: `module:NAME` of this very declaration, by which the engine process finds it.
    reference: str
    #: `module:function` that loads: (config, on_progress) to a `Service`.
    loader: str
    config_type: type[ConfigT]
    request_type: type[RequestT]
    part_type: type[PartT]
    #: Calls that advance in turn; more wait for one of them to end.
    max_active: int = 8
    #: Prepare MLX's backend before the loader is imported.
    uses_mlx: bool = True


def find_kind(reference: str) -> ServiceKind[Any, Any, Any]:
    """Return the declaration that `reference` names."""
    kind = _resolve(reference)
    assert isinstance(kind, ServiceKind), reference
    return kind


def find_loader(
    kind: ServiceKind[ConfigT, RequestT, PartT],
) -> Callable[[ConfigT, ProgressCallback], Service[RequestT, PartT]]:
    """Import and return the function that loads `kind`; only for the engine process."""
    return cast(
        "Callable[[ConfigT, ProgressCallback], Service[RequestT, PartT]]", _resolve(kind.loader)
    )


def _resolve(reference: str) -> Any:
    module, _, name = reference.partition(":")
    return getattr(importlib.import_module(module), name)
