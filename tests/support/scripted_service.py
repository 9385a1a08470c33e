"""A service without a model: the real worker around a kind that does as each request says.

Run as a script, it takes the place of the worker module, and is imported by it for the kind.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from vllm_mlx.engine.errors import InvalidRequestError, UnsupportedModelError
from vllm_mlx.engine.host.messages import ServiceInfo
from vllm_mlx.engine.host.service import ProgressCallback, ServiceKind
from vllm_mlx.engine.host.worker import end_process, main


class ScriptedConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Say how the service loads."""

    load_s: float = 0.0
    is_unsupported: bool = False


class ScriptedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Say what to answer: `num_parts` parts, each after `part_s`; then how to end."""

    num_parts: int = 3
    part_s: float = 0.0
    #: `refuse`, `bug`, `kill` or nothing.
    end: str = ""
    #: Bytes of each part.
    num_bytes: int = 0
    #: Written when the iterator is closed before its end.
    closed_file: str = ""


class ScriptedPart(msgspec.Struct, frozen=True, kw_only=True):
    """Carry a number, and as many bytes as asked for."""

    number: int
    data: bytes = b""


class ScriptedService:
    """Follow the script of each request."""

    info = ServiceInfo(model="script", path="", model_type="scripted", details={"dimensions": 3})

    def handle(self, request: ScriptedRequest) -> Iterator[ScriptedPart | None]:
        """Yield the parts, with a piece of silent work before each."""
        is_over = False
        try:
            for number in range(request.num_parts):
                yield None
                time.sleep(request.part_s)
                yield ScriptedPart(number=number, data=b"x" * request.num_bytes)
            is_over = True
        finally:
            if not is_over and request.closed_file:
                Path(request.closed_file).write_text("closed")
        if request.end == "refuse":
            raise InvalidRequestError("too long", param="input[1]")
        if request.end == "bug":
            raise ValueError("a bug")
        if request.end == "kill":
            os.kill(os.getpid(), signal.SIGKILL)

    def close(self) -> None:
        """Have nothing to free."""


def load_scripted(config: ScriptedConfig, on_progress: ProgressCallback) -> ScriptedService:
    """Load as told."""
    on_progress("loading weights", 0.5)
    time.sleep(config.load_s)
    if config.is_unsupported:
        raise UnsupportedModelError("no such kind of model")
    return ScriptedService()


SCRIPTED: ServiceKind[ScriptedConfig, ScriptedRequest, ScriptedPart] = ServiceKind(
    name="scripted",
    reference="support.scripted_service:SCRIPTED",
    loader="support.scripted_service:load_scripted",
    config_type=ScriptedConfig,
    request_type=ScriptedRequest,
    part_type=ScriptedPart,
    max_active=2,
    uses_mlx=False,
)

if __name__ == "__main__":
    # The kind is found as the tests name it.
    sys.path.insert(0, str(Path(__file__).parents[1]))
    end_process(main())
