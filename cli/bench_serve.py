"""The command `bench-serve`: load a server, measure it, and gate CI with what was measured."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import click

from vllm_mlx.cli.bench_serve_files import compare, report
from vllm_mlx.cli.bench_serve_options import (
    gate_options,
    load_options,
    output_options,
    prompt_options,
    server_options,
    split_options,
)
from vllm_mlx.cli.options import given, given_on_command_line, verbose_option


@click.group(invoke_without_command=True, subcommand_metavar="[compare|report]")
@server_options
@load_options
@prompt_options
@output_options
@gate_options
@verbose_option
@click.pass_context
def bench_serve(ctx: click.Context, /, **values: Any) -> int | None:
    """Load a server, measure it, and fail a build when it has become slower.

    Speaks HTTP only, to any server of the OpenAI or Anthropic API. Without a subcommand it
    measures; compare and report read the files that this writes. docs/benchmarking.md says what
    each measure means.

    \b
    Examples:
      vllm-mlx bench-serve --url http://localhost:8000
      vllm-mlx bench-serve --concurrency 1,2,4,8,16 --prompts medium,long -o results.csv
      vllm-mlx bench-serve --prompt-tokens 2048 --output-tokens 128 --cache-mode cold
      vllm-mlx bench-serve --request-rate 0.5,1,2 --slo ttft=500,itl=60 -o results.db --raw
      vllm-mlx bench-serve --workload chat --repetitions 3 -o results.json
      vllm-mlx bench-serve --assert 'ttft_p95<800ms' --assert failures==0 --junit gates.xml
      vllm-mlx bench-serve --baseline main.json --max-regression ttft_p50=10%,output_tps=5%
    """
    if ctx.invoked_subcommand is not None:
        _refuse_measuring_options(ctx, ctx.invoked_subcommand)
        return None
    return _measure(values, given(ctx))


bench_serve.add_command(compare)
bench_serve.add_command(report)


def _refuse_measuring_options(ctx: click.Context, subcommand: str) -> None:
    """Refuse options before a subcommand's name: they would have no effect."""
    names = given_on_command_line(ctx)
    flags = [p.opts[0] for p in ctx.command.params if p.name in names]
    if flags:
        raise click.UsageError(f"{', '.join(flags)} before '{subcommand}' has no effect there")


def _measure(values: Mapping[str, Any], given_names: frozenset[str]) -> int:
    from vllm_mlx.bench.environment import command_line

    command = command_line(["vllm-mlx", *sys.argv[1:]])
    settings, gates, outputs = split_options(values, given_names, command)

    from vllm_mlx.bench.metrics import Slo
    from vllm_mlx.cli.bench_serve_run import measure

    slo = Slo.parse(values["slo"]) if values["slo"] is not None else None
    return measure(settings, slo, gates, outputs)
