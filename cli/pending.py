"""List the flags that are known but not built yet, and refuse each by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import click

Decorated = TypeVar("Decorated", bound=Callable[..., Any])

#: Flags of `serve` that take no value.
PENDING_SWITCHES = (
    "--deterministic",
    "--enable-mtp",
    "--kv-cache-quantization",
    "--lazy-load-model",
    "--mllm",
    "--mtp",
    "--spec-prefill",
    "--specprefill",
    "--use-paged-cache",
)

#: Flags of `serve` that take a value.
PENDING_VALUES = (
    "--auto-unload-idle-seconds",
    "--kv-cache-quantization-bits",
    "--kv-cache-quantization-group-size",
    "--max-cache-blocks",
    "--max-kv-size",
    "--max-tts-input-chars",
    "--mcp-config",
    "--memory-budget-gb",
    "--models-config",
    "--mtp-num-draft-tokens",
    "--paged-cache-block-size",
    "--specprefill-draft-model",
    "--specprefill-keep-pct",
    "--specprefill-threshold",
)

#: Flags of other servers of this kind, and the one that has their job here.
RENAMED_FLAGS = {
    "--chunked-prefill-tokens": "--prefill-tokens-per-step",
    "--completion-batch-size": "--max-num-seqs",
    "--disable-prefix-cache": "--no-prefix-cache",
    "--enable-prefix-cache": "--prefix-cache",
    "--gpu-memory-utilization": "--kv-memory-mb",
    "--max-audio-upload-mb": "--max-audio-mb",
    "--prefill-batch-size": "--prefill-tokens-per-step",
    "--prefill-step-size": "--prefill-tokens-per-step",
}

_REFUSED = "vllm_mlx.cli.refused_flags"


def env_name(flag: str) -> str:
    """Return the environment variable that stands for `flag`."""
    return "VLLM_MLX_" + flag.removeprefix("--").replace("-", "_").upper()


def pending_options(function: Decorated) -> Decorated:
    """Accept the pending flags of `serve` in the parser, hidden, so that they can be refused."""
    for flag in reversed((*PENDING_SWITCHES, *PENDING_VALUES, *RENAMED_FLAGS)):
        click.option(
            flag,
            is_flag=flag in PENDING_SWITCHES,
            hidden=True,
            expose_value=False,
            envvar=env_name(flag),
            callback=_remember,
        )(function)
    return function


def _remember(ctx: click.Context, param: click.Parameter, value: object) -> None:
    if value is not None and value is not False:
        ctx.meta.setdefault(_REFUSED, []).append(param.opts[0])


class RefusingCommand(click.Command):
    """Parse a command line, then refuse the pending flags that it names."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse `args`; raise `UsageError` naming every flag that is not built."""
        rest = super().parse_args(ctx, args)
        refused: list[str] = ctx.meta.get(_REFUSED, [])
        if refused and not ctx.resilient_parsing:
            raise click.UsageError(_refusal(refused), ctx)
        return rest


def _refusal(flags: Sequence[str]) -> str:
    pending = [flag for flag in flags if flag not in RENAMED_FLAGS]
    parts = [
        f"instead of {flag} use {RENAMED_FLAGS[flag]}" for flag in flags if flag in RENAMED_FLAGS
    ]
    if pending:
        verb = "is" if len(pending) == 1 else "are"
        parts.insert(0, f"{', '.join(pending)} {verb} not in this build yet")
    return "; ".join(parts)
