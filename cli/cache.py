"""The commands of `cache`: see, trim and check stored prefixes without loading a model."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from vllm_mlx.cli.cache_selection import build_selection, directory_argument, selection_options
from vllm_mlx.cli.options import FiniteRange

if TYPE_CHECKING:
    from vllm_mlx.cache_tools.listing import StoreListing
    from vllm_mlx.cache_tools.prune import PruneCriteria, PrunePlan

_GIB = 2**30
_SORT_KEYS = ("used", "created", "hits", "size", "tokens")
_LIMIT = 20


@click.group()
def cache() -> None:
    """Inspect, prune and verify the stored prefixes.

    DIR is what 'vllm-mlx serve --ssd-cache-dir' was given; servers may go on using it meanwhile.

    \b
    Examples:
      vllm-mlx cache inspect ~/prefixes                      what is there
      vllm-mlx cache prune ~/prefixes --unused-since 14d     what nobody used
      vllm-mlx cache verify ~/prefixes                       whether it is whole
    """


@cache.command()
@directory_argument
@selection_options
@click.option("--min-hits", type=click.IntRange(min=0), help="Only what was used so often.")
@click.option(
    "--sort",
    type=click.Choice(_SORT_KEYS),
    default="used",
    show_default=True,
    help="What comes first: the latest, the most, or the largest.",
)
@click.option(
    "--limit",
    type=click.IntRange(min=0),
    default=_LIMIT,
    show_default=True,
    help="Most prefixes in the table; 0 shows all.",
)
@click.option("--show-text", is_flag=True, help="Show the first words of each prefix: private!")
@click.option(
    "--tokenizer",
    type=click.Path(exists=True, path_type=Path),
    help="Decode with this tokenizer.json, or a folder's; default: the model's own, if it is here.",
)
@click.option("--json", "output", flag_value="json", help="Print everything as JSON.")
@click.option("--csv", "output", flag_value="csv", help="Print one line a prefix as CSV.")
def inspect(
    directory: Path,
    models: tuple[str, ...],
    namespaces: tuple[str, ...],
    older_than: float | None,
    unused_since: float | None,
    min_hits: int | None,
    sort: str,
    limit: int,
    show_text: bool,
    tokenizer: Path | None,
    output: str | None,
) -> None:
    """Show what is stored in DIR: by model, as a tree of prefixes, and what is wrong.

    Prompts are private: their words are shown only with --show-text.

    \b
    Examples:
      vllm-mlx cache inspect ~/prefixes
      vllm-mlx cache inspect ~/prefixes --sort size --model 'Qwen*' --limit 0
      vllm-mlx cache inspect ~/prefixes --json | jq .namespaces
    """
    from vllm_mlx.cache_tools.inspect import inspect_store
    from vllm_mlx.cache_tools.text import FirstWords
    from vllm_mlx.cli import cache_tables
    from vllm_mlx.cli.cache_text import folder_of_model

    if tokenizer is not None and not show_text:
        raise click.UsageError("--tokenizer needs --show-text")
    selection = build_selection(models, namespaces, older_than, unused_since, min_hits)
    words = FirstWords(tokenizer, folder_of_model) if show_text else None
    with _progress("reading") as advance:
        listing = _list(directory, advance)
    report = inspect_store(listing, selection, cache_tables.sort_key(sort), words)
    if output == "json":
        cache_tables.print_json(report)
    elif output == "csv":
        cache_tables.print_prefixes_csv(report)
    else:
        cache_tables.print_report(report, limit or None, with_text=show_text)
    for model in words.models_without if words is not None else ():
        click.echo(f"No tokenizer of {model!r} is on this machine: give --tokenizer", err=True)


@cache.command()
@directory_argument
@selection_options
@click.option(
    "--max-gb",
    type=FiniteRange(min=0),
    metavar="GIB",
    help="Remove the least recently used until DIR is no larger than this.",
)
@click.option("--corrupt", is_flag=True, help="Remove what is damaged or can never be found.")
@click.option("--all", "is_all", is_flag=True, help="Remove everything.")
@click.option("--dry-run", is_flag=True, help="Only show what would be removed.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--json", "is_json", is_flag=True, help="Print the plan and the result as JSON.")
def prune(
    directory: Path,
    models: tuple[str, ...],
    namespaces: tuple[str, ...],
    older_than: float | None,
    unused_since: float | None,
    max_gb: float | None,
    corrupt: bool,
    is_all: bool,
    dry_run: bool,
    yes: bool,
    is_json: bool,
) -> None:
    """Remove stored prefixes from DIR, after showing which and asking.

    What is removed meets all of the conditions. With --max-gb only as much of it goes, the least
    recently used first, as must. A prefix that something else continues stays as long as that does.

    \b
    Examples:
      vllm-mlx cache prune ~/prefixes --older-than 30d --unused-since 7d
      vllm-mlx cache prune ~/prefixes --max-gb 20 --yes       for cron
      vllm-mlx cache prune ~/prefixes --model 'Qwen*' --dry-run
    """
    from vllm_mlx.cache_tools.prune import PruneCriteria, execute_prune, plan_prune
    from vllm_mlx.cli import cache_tables

    is_narrowed = bool(models or namespaces or older_than is not None or unused_since is not None)
    _check_criteria(is_narrowed, max_gb, corrupt=corrupt, is_all=is_all)
    selection = build_selection(models, namespaces, older_than, unused_since)
    criteria = PruneCriteria(
        selection=selection,
        selected=is_all or (is_narrowed and max_gb is None),
        max_bytes=int(max_gb * _GIB) if max_gb is not None else None,
        unusable=corrupt or is_all,
    )
    plan = plan_prune(_listing_for(directory, criteria), criteria)
    if not is_json:
        cache_tables.print_plan(plan)
    is_wanted = plan.num_files > 0 and not dry_run and (yes or _is_confirmed(plan))
    result = execute_prune(plan) if is_wanted else None
    if is_json:
        cache_tables.print_plan_json(plan, result)
    elif result is not None:
        cache_tables.print_result(plan, result)


@cache.command()
@directory_argument
@click.option("--json", "is_json", is_flag=True, help="Print what was found as JSON.")
def verify(directory: Path, is_json: bool) -> None:
    """Check every byte in DIR against its checksums; exit with 4 on damage.

    Nothing is changed: 'vllm-mlx cache prune --corrupt' removes what is found here.

    \b
    Example:
      vllm-mlx cache verify ~/prefixes || vllm-mlx cache prune ~/prefixes --corrupt --yes
    """
    from vllm_mlx.cache_tools.verify import verify_store
    from vllm_mlx.cli import cache_tables
    from vllm_mlx.engine.errors import CacheDamagedError

    with _progress("checking") as advance:
        found = verify_store(directory, advance)
    if is_json:
        cache_tables.print_verification_json(found)
    else:
        cache_tables.print_verification(found)
    if found.damaged:
        raise CacheDamagedError(
            f"{len(found.damaged)} of {len(found.listing.runs)} files in {directory} are damaged; "
            "'vllm-mlx cache prune --corrupt' removes them"
        )


def _check_criteria(
    is_narrowed: bool, max_gb: float | None, *, corrupt: bool, is_all: bool
) -> None:
    """Raise `UsageError` unless the conditions together mean something."""
    if is_all and (is_narrowed or max_gb is not None or corrupt):
        raise click.UsageError("--all leaves no room for other conditions")
    if corrupt and (is_narrowed or max_gb is not None):
        raise click.UsageError("--corrupt cannot be combined with other conditions")
    if not (is_all or corrupt or is_narrowed or max_gb is not None):
        raise click.UsageError(
            "say what to remove: --max-gb, --older-than, --unused-since, --model, --namespace, "
            "--corrupt or --all"
        )


def _listing_for(directory: Path, criteria: PruneCriteria) -> StoreListing:
    """List the store; damage is only found by reading all of it."""
    from vllm_mlx.cache_tools.verify import verify_store

    if criteria.unusable and not criteria.selected:
        with _progress("checking") as advance:
            return verify_store(directory, advance).listing
    with _progress("reading") as advance:
        return _list(directory, advance)


def _list(directory: Path, advance: Callable[[int, int], None] | None) -> StoreListing:
    from vllm_mlx.cache_tools.listing import list_store

    return list_store(directory, advance)


def _is_confirmed(plan: PrunePlan) -> bool:
    if not sys.stdin.isatty():
        raise click.UsageError(
            f"nobody can be asked whether to remove {plan.num_files} files: "
            "give --yes, or --dry-run to only see them"
        )
    return click.confirm("Remove them?", err=True)


@contextlib.contextmanager
def _progress(what: str) -> Iterator[Callable[[int, int], None] | None]:
    """Give what shows progress in a terminal, and None elsewhere."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
