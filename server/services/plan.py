"""What the server is told of the engines beside the chat model: which models, and their names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_mlx.engine.errors import UsageError
from vllm_mlx.engine.host.service import ServiceKind

#: The flag of `serve` that names the models of each kind.
FLAGS: Mapping[str, str] = {
    "embedding": "--embedding-model",
    "rerank": "--rerank-model",
    "transcription": "--stt-model",
    "speech": "--tts-model",
}


@dataclass(frozen=True)
class ServicePlan:
    """Say which model an engine of one kind loads, and what requests call it."""

    kind: ServiceKind[Any, Any, Any]
    #: The kind's own configuration.
    config: Any
    #: The model as the user gave it.
    model: str
    #: None shows the model as it was given.
    served_name: str | None = None

    @property
    def flag(self) -> str:
        """Return the flag that asked for it."""
        return FLAGS[self.kind.name]


def split_served_name(text: str) -> tuple[str | None, str]:
    """Return the name and the model of `[NAME=]MODEL`; raise `UsageError` where one is empty.

    A folder whose name has an equals sign goes by its own.
    """
    name, equals, model = text.partition("=")
    if not equals or "/" in name or Path(text).exists():
        return None, text
    if not name or not model:
        raise UsageError(f"a model is written MODEL or NAME=MODEL, not {text!r}")
    return name, model
