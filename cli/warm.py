"""The command `warm`: compute prefixes once and store them on SSD, for servers to find."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from vllm_mlx.cli.cache_options import CacheOptions, cache_options
from vllm_mlx.cli.chat import REMOTE, server_options
from vllm_mlx.cli.chat_config_options import tool_parser_option
from vllm_mlx.cli.errors import ExitCode, printable
from vllm_mlx.cli.model_options import ModelOptions, model_argument, model_options
from vllm_mlx.cli.options import (
    Decorator,
    RunSettings,
    given_on_command_line,
    stacked,
    verbose_option,
)
from vllm_mlx.cli.prefix_options import normalize_option

if TYPE_CHECKING:
    from vllm_mlx.cli.loading import LoadingProgress
    from vllm_mlx.cli.warm_plan import PlannedPrefix
    from vllm_mlx.cli.warm_report import WarmCounts
    from vllm_mlx.engine.config import EngineConfig, ModelConfig
    from vllm_mlx.server.warm_prompts import WarmPrompts

prompt_options: Decorator[Any] = stacked(
    click.option(
        "--prompts",
        type=click.Path(path_type=Path),
        required=True,
        metavar="PATH",
        help="JSON, JSON Lines, or a folder of them: lists of messages, request bodies, or what "
        "'vllm-mlx serve --record' wrote.",
    ),
    click.option(
        "--system-only",
        is_flag=True,
        help="Of each prompt only what comes before the first question: system prompt and tools.",
    ),
    click.option(
        "--check", is_flag=True, help="Only say what is missing, and exit with 1 if anything is."
    ),
    click.option(
        "--wait",
        is_flag=True,
        help="Wait for another 'warm' that is at work in the folder, rather than leave it to that.",
    ),
    click.option("--json", "as_json", is_flag=True, help="Print the counts as one JSON object."),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WarmOptions(ModelOptions, CacheOptions):
    """Hold the parsed options of `warm`, by the names of their flags."""

    tool_call_parser: str | None
    prompts: Path
    normalize_prompts: bool
    system_only: bool
    check: bool
    wait: bool
    as_json: bool
    url: str | None
    api_key: str | None
    timeout: float

    def chat_fields(self) -> dict[str, Any]:
        """Return the fields of `ChatConfig`; the form of calls may be told to the model."""
        return {**super().chat_fields(), "tool_parser": self.tool_call_parser}

    def engine_config(self) -> EngineConfig:
        """Return the configuration that keys prefixes as a server with these options does."""
        from vllm_mlx.engine.config import EngineConfig

        return EngineConfig(
            max_num_seqs=1, kv_memory_bytes=self.kv_memory_bytes, **self.cache_fields()
        )


@click.command()
@model_argument
@prompt_options
@normalize_option
@server_options
@cache_options
@tool_parser_option
@model_options
@verbose_option
@click.pass_context
def warm(ctx: click.Context, /, **values: Any) -> int:
    """Compute the prefixes of prompts and store them, so that no request waits for them.

    MODEL and its options must be those of the server that is to find them. What is stored already
    is not computed again, nor is the model loaded for it; where nothing has to be done, nothing is
    said. Beside a running server --url spares the memory of a second model: the server computes,
    and stores what it has computed within seconds of being idle.

    \b
    Examples:
      vllm-mlx warm --prompts agent.json --ssd-cache-dir ~/prefixes
      vllm-mlx warm mlx-community/Qwen3-4B-4bit --prompts recorded/ --system-only \\
          --ssd-cache-dir ~/prefixes
      vllm-mlx warm --prompts agent.json --ssd-cache-dir ~/prefixes --check || echo missing
      vllm-mlx warm --prompts agent.json --url http://localhost:8000
    """
    options = WarmOptions(**values)
    given_names = given_on_command_line(ctx)
    _check_together(ctx, options, given_names)

    from vllm_mlx.cli.logs import configure_logging
    from vllm_mlx.server.warm_prompts import read_prompts

    settings = ctx.ensure_object(RunSettings)
    configure_logging("debug" if settings.verbose else "warning")
    prompts = read_prompts(options.prompts, system_only=options.system_only)
    if options.url is not None:
        return _by_server(options, prompts, options.model if "model" in given_names else None)
    if options.check:
        return _check(options, prompts)
    return _in_process(options, prompts, settings)


def _check_together(ctx: click.Context, options: WarmOptions, given_names: frozenset[str]) -> None:
    """Raise `UsageError` for options that are missing or would have no effect.

    Only the command line counts: a variable may be meant for other runs.
    """
    if options.url is None:
        flags = [flag for name, flag in REMOTE.items() if name in given_names]
        if flags:
            raise click.UsageError(f"{', '.join(flags)} needs --url")
        if options.ssd_cache_dir is None:
            raise click.UsageError(
                "say where to store prefixes, with --ssd-cache-dir; or let a server do it: --url"
            )
        return
    kinds = (ModelOptions, CacheOptions)
    local = {field.name for kind in kinds for field in dataclasses.fields(kind)}
    ineffective = (local - {"model"}) | {"check", "wait", "tool_call_parser", "normalize_prompts"}
    flags = [p.opts[0] for p in ctx.command.params if p.name in ineffective & given_names]
    if flags:
        raise click.UsageError(f"{', '.join(flags)} cannot be used with --url: the server decides")


def _check(options: WarmOptions, prompts: WarmPrompts) -> int:
    """Print what is missing; loads no MLX, fetches no model and changes nothing."""
    from vllm_mlx.cli.cache_text import folder_of_model
    from vllm_mlx.cli.warm_plan import plan_for_model, stored_prefixes
    from vllm_mlx.cli.warm_report import print_json, raise_failures
    from vllm_mlx.engine.errors import ModelNotFoundError

    model, engine = options.model_config(), options.engine_config()
    folder = folder_of_model(options.model)
    if folder is None:
        raise ModelNotFoundError(f"{options.model} is not on this machine: nothing is stored of it")
    plan = plan_for_model(
        prompts.prompts, folder, model, engine, normalize=options.normalize_prompts
    )
    assert engine.ssd_cache_dir is not None
    if (Path(engine.ssd_cache_dir) / "runs").is_dir():
        with stored_prefixes(folder, model, engine) as stored:
            plan = plan.looked_up(stored)
    missing = plan.missing
    if options.as_json:
        listed = [
            {"where": prefix.where, "tokens": len(prefix.blocks), "stored": prefix.num_stored}
            for prefix in missing
        ]
        print_json({"stored": len(plan.prefixes) - len(missing), "missing": listed})
    else:
        for prefix in missing:
            num_stored, num_tokens = prefix.num_stored, len(prefix.blocks)
            where = printable(prefix.where)
            click.echo(f"{where}: {num_stored:,} of {num_tokens:,} tokens are stored")
    raise_failures([*prompts.faults, *plan.faults])
    return ExitCode.GATE_FAILED if missing else ExitCode.DONE


def _by_server(options: WarmOptions, prompts: WarmPrompts, named: str | None) -> int:
    from vllm_mlx.cli.warm_http import warm_by_server
    from vllm_mlx.cli.warm_report import WarmReport, progress_bar, raise_failures

    assert options.url is not None
    report = WarmReport(options.url, as_json=options.as_json)
    with progress_bar(len(prompts.prompts), "asking the server") as on_done:
        warm_by_server(
            options.url,
            prompts.prompts,
            model=named,
            api_key=options.api_key,
            timeout_s=options.timeout,
            counts=report.counts,
            on_done=on_done,
        )
    report.counts.failures[:0] = prompts.faults
    report.print_counts()
    raise_failures(report.counts.failures)
    return ExitCode.DONE


def _in_process(options: WarmOptions, prompts: WarmPrompts, settings: RunSettings) -> int:
    from vllm_mlx.cli.warm_lock import warm_lock

    assert options.ssd_cache_dir is not None
    folder = Path(options.ssd_cache_dir)

    def say_waiting() -> None:
        click.echo(f"waiting for another 'warm' that is at work in {folder} ...", err=True)

    with warm_lock(folder, say_waiting if options.wait else None) as is_ours:
        if is_ours:
            return _warm_folder(options, prompts, settings)
    click.echo(f"another 'warm' is at work in {folder}; --wait would wait for it", err=True)
    return ExitCode.DONE


def _warm_folder(options: WarmOptions, prompts: WarmPrompts, settings: RunSettings) -> int:
    """Compute what is missing in the folder, whose lock is held."""
    from vllm_mlx.cli.loading import LoadingProgress
    from vllm_mlx.cli.warm_plan import plan_for_model, stored_prefixes
    from vllm_mlx.cli.warm_report import WarmReport, raise_failures
    from vllm_mlx.engine.errors import CacheError
    from vllm_mlx.engine.models.progress import ignore_progress
    from vllm_mlx.engine.models.resolve import resolve_model

    model, engine = options.model_config(), options.engine_config()
    report = WarmReport(str(options.ssd_cache_dir), as_json=options.as_json)
    loading = LoadingProgress() if sys.stderr.isatty() else None
    # Threads of a download must not outlive the interpreter's end.
    settings.must_exit_at_once = not Path(options.model).is_dir()
    with loading or contextlib.nullcontext():
        folder = resolve_model(model, loading or ignore_progress)
    plan = plan_for_model(
        prompts.prompts, folder, model, engine, normalize=options.normalize_prompts
    )
    disk_faults: dict[str, int] = {}
    with stored_prefixes(folder, model, engine) as stored:
        plan = plan.looked_up(stored)
        report.counts.failures += [*prompts.faults, *plan.faults]
        report.counts.too_short = plan.num_too_short
        report.counts.skipped = len(plan.prefixes) - len(plan.missing)
        try:
            if plan.missing:
                # Nor must MLX's.
                settings.must_exit_at_once = True
                disk_faults = _compute(plan.missing, model, engine, report.counts, loading)
        finally:
            # Also after Ctrl-C: what is finished is stored, and said.
            report.print_counts()
        raise_failures(report.counts.failures)
        lost = [prefix for prefix in plan.prefixes if not stored.is_whole(prefix.blocks)]
    if lost:
        raise CacheError(_loss(lost, len(plan.prefixes), disk_faults))
    return ExitCode.DONE


def _compute(
    missing: list[PlannedPrefix],
    model: ModelConfig,
    engine: EngineConfig,
    counts: WarmCounts,
    loading: LoadingProgress | None,
) -> dict[str, int]:
    """Compute and store prefixes, count them, and return the faults of the disk."""
    from vllm_mlx.cli.warm_engine import WarmingThread, load_prefix_engine
    from vllm_mlx.cli.warm_report import progress_bar
    from vllm_mlx.engine.models.progress import ignore_progress

    thread = WarmingThread(load_prefix_engine(model, engine))
    with contextlib.ExitStack() as stack:
        stack.callback(thread.close)
        with loading or contextlib.nullcontext():
            thread.start(loading or ignore_progress)
        total = sum(len(prefix.blocks) for prefix in missing)
        on_done = stack.enter_context(progress_bar(total, "warming"))
        for prefix, output in thread.warm(missing, on_done):
            if output.error is not None:
                counts.failures.append(f"{prefix.where}: {output.error.message}")
            else:
                counts.stored += 1
                counts.computed_tokens += len(prefix.blocks) - output.num_cached_tokens
    return thread.faults


def _loss(lost: list[PlannedPrefix], num_prefixes: int, faults: dict[str, int]) -> str:
    reasons = ", ".join(f"{reason} ({count})" for reason, count in sorted(faults.items()))
    return (
        f"{len(lost)} of {num_prefixes} prefixes are not stored, the first of them "
        f"{lost[0].where}: {reasons or 'they do not fit under --ssd-cache-max-gb together'}"
    )
