"""Print what the commands of `cache` found: tables for people, JSON and CSV for scripts."""

from __future__ import annotations

import csv
import io
import sys
import time
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click
import msgspec

from vllm_mlx.cache_tools.inspect import SORT_KEYS, InspectReport, PrefixReport, SortKey
from vllm_mlx.cache_tools.listing import ListedRun
from vllm_mlx.cli.errors import printable
from vllm_mlx.engine.memory import format_bytes

if TYPE_CHECKING:
    from vllm_mlx.cache_tools.prune import PrunePlan, PruneResult
    from vllm_mlx.cache_tools.verify import Verification

#: Columns of a table that is not shown in a terminal.
_WIDE = 240
_SHORT_HEX = 8
_UNITS = (("d", 86400), ("h", 3600), ("m", 60))

_CSV_COLUMNS = (
    *("state", "model", "namespace", "id", "parent", "depth", "tokens_before", "num_tokens"),
    *("num_runs", "num_bytes", "num_hits", "created", "last_used", "text", "file"),
)


def sort_key(name: str) -> SortKey:
    """Return the key that a command line names."""
    return next(key for key in SORT_KEYS if key == name)


def print_json(value: Any) -> None:
    """Print a report as indented JSON."""
    click.echo(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def print_prefixes_csv(report: InspectReport) -> None:
    """Print one line a prefix, and one a file that is of no use."""
    text = io.StringIO()
    writer = csv.DictWriter(text, _CSV_COLUMNS, restval="", lineterminator="\n")
    writer.writeheader()
    for prefix in report.prefixes:
        writer.writerow({"state": "whole", **msgspec.to_builtins(prefix)})
    for fault in report.faults:
        row = {"state": fault.state, "num_bytes": fault.num_bytes, "file": fault.file}
        writer.writerow({**row, "num_runs": 1})
    click.echo(text.getvalue(), nl=False)


def print_report(report: InspectReport, limit: int | None, *, with_text: bool) -> None:
    """Print totals, the tree of prefixes and what is wrong."""
    click.echo(f"{report.path}: {_files(report.num_runs)}, {format_bytes(report.num_bytes)}")
    namespaces = [
        (
            found.model,
            found.namespace[:_SHORT_HEX],
            found.kv_dtype + (" + adapter" if found.adapter else ""),
            f"{found.num_tokens:,}",
            format_bytes(found.num_bytes),
            str(found.num_hits),
            _ago(found.last_used),
            _ago(found.created),
        )
        for found in report.namespaces
    ]
    columns = ("model", "namespace", "KV", "tokens", "size", "hits", "last used", "oldest")
    _print_table(columns, namespaces, numbers=range(3, 8))
    _print_prefixes(report.prefixes, limit, with_text=with_text)
    _print_faults((f.state, f.file, f.num_bytes, f.fault) for f in report.faults)
    if report.num_quarantined:
        size = format_bytes(report.quarantined_bytes)
        click.echo(f"quarantine: {_files(report.num_quarantined)}, {size}")
    if report.num_leftovers:
        click.echo(f"left by killed writers: {_files(report.num_leftovers)}")


def _print_prefixes(
    prefixes: Sequence[PrefixReport], limit: int | None, *, with_text: bool
) -> None:
    rows = []
    for prefix in prefixes[:limit]:
        indent = "  " * prefix.depth + ("└ " if prefix.depth else "")
        row = [
            f"{indent}{prefix.num_tokens:,}",
            prefix.model,
            "?" if prefix.tokens_before is None else f"{prefix.tokens_before:,}",
            format_bytes(prefix.num_bytes),
            str(prefix.num_hits),
            _ago(prefix.last_used),
            _ago(prefix.created),
        ]
        rows.append([*row, prefix.text or ""] if with_text else row)
    columns = ["tokens", "model", "after", "size", "hits", "last used", "stored"]
    _print_table([*columns, "first words"] if with_text else columns, rows, numbers=range(2, 7))
    if limit is not None and len(prefixes) > limit:
        click.echo(f"{len(prefixes) - limit} more prefixes: --limit 0 shows all")


def print_plan(plan: PrunePlan) -> None:
    """Print what would be removed and what stays although it was meant."""
    if not plan.num_files:
        click.echo("Nothing to remove.")
    else:
        size, total = format_bytes(plan.num_bytes), format_bytes(plan.listing.num_bytes)
        click.echo(
            f"To be removed from {plan.listing.path}: {_files(plan.num_files)}, {size} "
            f"(of {len(plan.listing.runs)} stored, {total})"
        )
    groups: dict[tuple[str, str, str], list[ListedRun]] = {}
    for run in plan.runs:
        groups.setdefault((run.model, run.namespace[:_SHORT_HEX], run.state), []).append(run)
    rows = [
        (
            *names,
            str(len(runs)),
            f"{sum(run.num_tokens for run in runs):,}",
            format_bytes(sum(run.num_bytes for run in runs)),
            _ago(_moment(max(run.last_used_s for run in runs))),
        )
        for names, runs in sorted(groups.items())
    ]
    columns = ("model", "namespace", "state", "files", "tokens", "size", "last used")
    _print_table(columns, rows, numbers=range(3, 7))
    if plan.others:
        size = format_bytes(sum(size for _, size in plan.others))
        click.echo(f"quarantine and leftovers: {_files(len(plan.others))}, {size}")
    if plan.needed:
        click.echo(f"{_files(len(plan.needed))} meant but kept: what stays continues them")


def print_result(plan: PrunePlan, result: PruneResult) -> None:
    """Print what was removed."""
    click.echo(f"Removed {_files(result.num_files)}, {format_bytes(result.num_bytes)}.")
    if result.num_files < plan.num_files:
        left = plan.num_files - result.num_files
        click.echo(f"{_files(left)} not removed: needed again or gone by then.")


def print_plan_json(plan: PrunePlan, result: PruneResult | None) -> None:
    """Print the plan and, if it was carried out, the result."""
    removed = None
    if result is not None:
        removed = {"num_files": result.num_files, "num_bytes": result.num_bytes}
    print_json(
        {
            "path": str(plan.listing.path),
            "num_files": plan.num_files,
            "num_bytes": plan.num_bytes,
            "store_bytes": plan.listing.num_bytes,
            "runs": [_run_fields(run) for run in plan.runs],
            "others": [{"file": str(p), "num_bytes": size} for p, size in plan.others],
            "needed": [_run_fields(run) for run in plan.needed],
            "removed": removed,
        }
    )


def print_verification(found: Verification) -> None:
    """Print whether everything is whole, and what is not."""
    listing = found.listing
    click.echo(f"{listing.path}: {_files(len(listing.runs))}, {format_bytes(listing.num_bytes)}")
    _print_faults(
        (run.state, run.name, run.num_bytes, run.fault)
        for run in listing.runs
        if run.state != "whole"
    )
    if listing.quarantine:
        click.echo(f"quarantine: {_files(len(listing.quarantine))}")
    if not found.damaged:
        click.echo("No damage.")


def print_verification_json(found: Verification) -> None:
    """Print what a check found."""
    print_json(
        {
            "path": str(found.listing.path),
            "num_files": len(found.listing.runs),
            "num_bytes": found.listing.num_bytes,
            "damaged": [_run_fields(run) for run in found.damaged],
            "orphaned": [_run_fields(run) for run in found.orphaned],
            "other_version": [_run_fields(run) for run in found.other_version],
            "num_quarantined": len(found.listing.quarantine),
        }
    )


def _print_faults(faults: Iterable[tuple[str, str, int, str]]) -> None:
    """Print files that are of no use: state, name, bytes and what is wrong."""
    rows = [
        (state, _short_name(name), format_bytes(num_bytes), fault)
        for state, name, num_bytes, fault in faults
    ]
    _print_table(("state", "file", "size", "what is wrong"), rows, numbers=[2])


def _short_name(name: str) -> str:
    """Return a beginning of a run's name that tells it from others; JSON has all of it."""
    folder, _, file = name.partition("/")
    return f"{folder[:_SHORT_HEX]}…/{file[: 2 * _SHORT_HEX]}…"


def _files(count: int) -> str:
    return "1 file" if count == 1 else f"{count} files"


def _run_fields(run: ListedRun) -> dict[str, Any]:
    return {
        "file": run.name,
        "state": run.state,
        "model": run.model,
        "namespace": run.namespace,
        "num_tokens": run.num_tokens,
        "num_bytes": run.num_bytes,
        "num_hits": run.num_hits,
        "created": _moment(run.created_s),
        "last_used": _moment(run.last_used_s),
        "fault": run.fault or None,
    }


def _moment(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


def _ago(moment: datetime) -> str:
    """Say how long ago something was, in its largest unit."""
    seconds = time.time() - moment.timestamp()
    for unit, length in _UNITS:
        if seconds >= length:
            return f"{seconds / length:.0f}{unit} ago"
    return "now"


def _print_table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], numbers: Iterable[int]
) -> None:
    """Print a table on stdout, or nothing if it has no rows."""
    rows = list(rows)
    if not rows:
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    right = set(numbers)
    table = Table(box=box.SIMPLE, pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number in right else "left", overflow="fold")
    for row in rows:
        # Names and words come from elsewhere: neither markup nor control characters.
        table.add_row(*(Text(printable(cell).replace("\n", " ")) for cell in row))
    width = None if sys.stdout.isatty() else _WIDE
    Console(file=sys.stdout, width=width, soft_wrap=False).print(table)
