"""Say on stderr what will be loaded: weights, KV bytes a token, rows and context that fit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click
import msgspec

from vllm_mlx.engine.config import EngineConfig, ModelConfig
from vllm_mlx.engine.errors import HubUnreachableError
from vllm_mlx.engine.memory import format_bytes, host_limits
from vllm_mlx.engine.models.fit import fit_lines, plan_kv_budget
from vllm_mlx.engine.models.resolve import resolve_model
from vllm_mlx.engine.models.summary import CheckpointSummary, summarize_checkpoint
from vllm_mlx.engine.platform import installed_backend


class _WorkNeededError(Exception):
    """Stop resolving a model at the first piece of work."""


def announce_if_local(model: ModelConfig, engine: EngineConfig) -> None:
    """Describe the model if it is on this machine; say that it must be fetched if it is not.

    Returns at once: nothing is downloaded or converted. Raises `ModelLoadError` for a model that
    cannot be loaded, such as a wrong path or one that does not fit.
    """

    def refuse_work(stage: str, fraction: float | None) -> None:
        del fraction
        if stage != "resolving":
            raise _WorkNeededError

    try:
        folder = resolve_model(msgspec.structs.replace(model, offline=True), refuse_work)
    except _WorkNeededError:
        click.echo(f"{model.model}: used for the first time, it must be made ready", err=True)
    except HubUnreachableError:
        if model.offline:
            raise
        click.echo(f"{model.model}: not on this machine yet, it must be downloaded", err=True)
    else:
        announce(model, engine, folder)


def announce(model: ModelConfig, engine: EngineConfig, folder: Path) -> None:
    """Describe the model in `folder`; raise `ModelLoadError` if it cannot be loaded here."""
    click.echo(f"{model.model}: {folder}", err=True)
    for line in describe(summarize_checkpoint(folder, model), engine):
        click.echo(f"  {line}", err=True)


def describe(summary: CheckpointSummary, engine: EngineConfig) -> Iterator[str]:
    """Yield the lines on weights, KV, rows and context.

    Raises `InsufficientMemoryError` where it is certain that the model does not fit.
    """
    if installed_backend() == "cuda":
        # How much of the GPU is free is known only to a process that opens it.
        yield fit_lines(summary, engine.kv_memory_bytes or 0, engine.max_num_seqs)[0]
        yield f"KV       {format_bytes(summary.kv_bytes_per_token)} a token"
        return
    budget = plan_kv_budget(summary, engine, host_limits())
    yield from fit_lines(summary, budget, engine.max_num_seqs)
