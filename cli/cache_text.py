"""Find the folder of a model that prefixes are stored of, without fetching or making anything."""

from __future__ import annotations

from pathlib import Path

from vllm_mlx.engine.config import ModelConfig
from vllm_mlx.engine.errors import VllmMlxError
from vllm_mlx.engine.models.resolve import resolve_model


class _WorkNeededError(Exception):
    """Stop resolving a model at the first piece of work."""


def folder_of_model(name: str) -> Path | None:
    """Return where a model's files are on this machine, or None if they are not."""
    try:
        return resolve_model(ModelConfig(model=name, offline=True), _refuse_work)
    except (_WorkNeededError, VllmMlxError):
        return None


def _refuse_work(stage: str, fraction: float | None) -> None:
    del fraction
    if stage != "resolving":
        raise _WorkNeededError
