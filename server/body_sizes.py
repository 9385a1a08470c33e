"""How large the body of a request may be, where one route takes more than the others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from quart import Request

from vllm_mlx.engine.audio.kind import TRANSCRIPTION
from vllm_mlx.server.runtime import ServerRuntime

#: The routes that take sound files.
SOUND_PATHS = ("/v1/audio/transcriptions", "/v1/audio/translations")

#: What a form is larger than its file, twice over: forms of a little too much are told why.
_ROOM_BYTES = 2 * 1024 * 1024


class SizedRequest(Request):
    """A request whose body has a limit by its path, before the route is known."""

    sizes: ClassVar[Mapping[str, int]] = {}

    def __init__(
        self,
        method: str,
        scheme: str,
        path: str,
        *arguments: Any,
        max_content_length: int | None = None,
        **options: Any,
    ) -> None:
        limit = self.sizes.get(path, max_content_length)
        super().__init__(method, scheme, path, *arguments, max_content_length=limit, **options)


def request_class(runtime: ServerRuntime) -> type[SizedRequest]:
    """Return the class of requests to a server with these models."""
    sizes = {
        path: service.plan.config.limits.max_bytes + _ROOM_BYTES
        for service in runtime.services
        if service.kind == TRANSCRIPTION.name
        for path in SOUND_PATHS
    }
    return type("ServerRequest", (SizedRequest,), {"sizes": sizes})
