"""Sum up what a store holds: by namespace, as a tree of prefixes, and what is wrong with it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

import msgspec

from vllm_mlx.cache_tools.listing import ListedRun, StoreListing, by_parent
from vllm_mlx.cache_tools.selection import Selection

SortKey = Literal["used", "created", "hits", "size", "tokens"]
SORT_KEYS: tuple[SortKey, ...] = ("used", "created", "hits", "size", "tokens")

#: Returns the first words of a model's tokens, or None if they cannot be shown.
ShowText = Callable[[str, bytes], str | None]


class NamespaceReport(msgspec.Struct, frozen=True, kw_only=True):
    """Sum up what is stored of one model in one form."""

    namespace: str
    model: str
    weights: str
    adapter: str
    kv_dtype: str
    block_size: int
    libraries: tuple[str, ...]
    num_runs: int
    num_tokens: int
    num_bytes: int
    #: How often a chain of it was used.
    num_hits: int
    created: datetime
    last_used: datetime


class PrefixReport(msgspec.Struct, frozen=True, kw_only=True):
    """Sum up consecutive tokens after which nothing, or more than one thing, goes on.

    In a list each comes after its parent and its parent's earlier children.
    """

    id: int
    #: The prefix that it continues; None of one that begins, or whose parent is not shown.
    parent: int | None
    depth: int
    model: str
    namespace: str
    tokens_before: int | None
    num_tokens: int
    num_runs: int
    num_bytes: int
    num_hits: int
    created: datetime
    last_used: datetime
    #: Its first words, if they were asked for and can be told.
    text: str | None = None


class FaultReport(msgspec.Struct, frozen=True, kw_only=True):
    """Name a file that is of no use and say why."""

    file: str
    state: str
    num_bytes: int
    fault: str


class InspectReport(msgspec.Struct, frozen=True, kw_only=True):
    """Hold what a store has in it; only the totals are of all runs whatever was selected."""

    path: str
    num_runs: int
    num_bytes: int
    namespaces: list[NamespaceReport]
    prefixes: list[PrefixReport]
    faults: list[FaultReport]
    quarantined_bytes: int
    num_quarantined: int
    num_leftovers: int


@dataclass(slots=True)
class _Branch:
    """Hold the runs of one prefix, and the runs that begin what continues it."""

    runs: list[ListedRun]
    next: list[ListedRun]


def inspect_store(
    listing: StoreListing,
    selection: Selection,
    sort: SortKey = "used",
    show_text: ShowText | None = None,
) -> InspectReport:
    """Sum up the selected runs, the most used, largest or latest first, as `sort` says."""
    selected = selection.of(listing.runs)
    whole = [run for run in selected if run.header is not None and run.state == "whole"]
    return InspectReport(
        path=str(listing.path),
        num_runs=len(listing.runs),
        num_bytes=listing.num_bytes,
        namespaces=_by_namespace(whole, sort),
        prefixes=_prefixes(whole, sort, show_text),
        faults=[
            FaultReport(file=run.name, state=run.state, num_bytes=run.num_bytes, fault=run.fault)
            for run in selected
            if run.state != "whole"
        ],
        quarantined_bytes=sum(file.num_bytes for file in listing.quarantine),
        num_quarantined=len(listing.quarantine),
        num_leftovers=len(listing.leftovers),
    )


def _by_namespace(runs: Iterable[ListedRun], sort: SortKey) -> list[NamespaceReport]:
    by_digest: dict[str, list[ListedRun]] = {}
    for run in runs:
        by_digest.setdefault(run.namespace, []).append(run)
    ordered = sorted(by_digest.values(), key=lambda group: _rank(group, sort), reverse=True)
    return [_namespace_report(group) for group in ordered]


def _namespace_report(runs: Sequence[ListedRun]) -> NamespaceReport:
    header = runs[-1].header
    assert header is not None, "only runs with headers are summed up"
    namespace = header.namespace
    return NamespaceReport(
        namespace=header.digest.hex(),
        model=namespace.label,
        weights=namespace.weights,
        adapter=namespace.adapter,
        kv_dtype=namespace.kv_dtype,
        block_size=namespace.block_size,
        libraries=namespace.libraries,
        num_runs=len(runs),
        num_tokens=_num_tokens(runs),
        num_bytes=sum(run.num_bytes for run in runs),
        num_hits=_num_hits(runs),
        created=_moment(min(run.created_s for run in runs)),
        last_used=_moment(max(run.last_used_s for run in runs)),
    )


def _prefixes(
    runs: Sequence[ListedRun], sort: SortKey, show_text: ShowText | None
) -> list[PrefixReport]:
    """Return all prefixes, each before what continues it."""
    children = by_parent(runs)
    held = {block_hash for run in runs for block_hash in run.hashes}
    first = [run for run in runs if run.parent is None or run.parent not in held]
    found: list[PrefixReport] = []
    pending: list[tuple[_Branch, int | None, int]] = [
        (branch, None, 0) for branch in _ordered(first, children, sort)
    ]
    while pending:
        branch, parent, depth = pending.pop()
        report = _prefix_report(branch.runs, len(found), parent, depth, show_text)
        found.append(report)
        pending += [
            (following, report.id, depth + 1) for following in _ordered(branch.next, children, sort)
        ]
    return found


def _ordered(
    first: Iterable[ListedRun], children: dict[bytes | None, list[ListedRun]], sort: SortKey
) -> list[_Branch]:
    """Follow each run to where it ends or forks; the one to show first comes last."""
    branches = [_follow(run, children) for run in first]
    return sorted(branches, key=lambda branch: _rank(branch.runs, sort))


def _follow(run: ListedRun, children: dict[bytes | None, list[ListedRun]]) -> _Branch:
    runs = [run]
    while True:
        last = runs[-1]
        following = [child for block in last.hashes for child in children.get(block, ())]
        if len(following) != 1 or following[0].parent != last.hashes[-1]:
            return _Branch(runs, following)
        runs += following


def _prefix_report(
    runs: Sequence[ListedRun],
    number: int,
    parent: int | None,
    depth: int,
    show_text: ShowText | None,
) -> PrefixReport:
    first = runs[0]
    text = None
    if show_text is not None and first.header is not None:
        text = show_text(first.model, first.header.tokens)
    return PrefixReport(
        id=number,
        parent=parent,
        depth=depth,
        model=first.model,
        namespace=first.namespace,
        tokens_before=first.num_tokens_before,
        num_tokens=_num_tokens(runs),
        num_runs=len(runs),
        num_bytes=sum(run.num_bytes for run in runs),
        num_hits=max(run.num_hits for run in runs),
        created=_moment(min(run.created_s for run in runs)),
        last_used=_moment(max(run.last_used_s for run in runs)),
        text=text,
    )


def _rank(runs: Sequence[ListedRun], sort: SortKey) -> float:
    if sort == "used":
        return max(run.last_used_s for run in runs)
    if sort == "created":
        return max(run.created_s for run in runs)
    if sort == "hits":
        return max(run.num_hits for run in runs)
    if sort == "size":
        return sum(run.num_bytes for run in runs)
    return _num_tokens(runs)


def _num_tokens(runs: Sequence[ListedRun]) -> int:
    """Count tokens once, however many runs hold them."""
    per_block = {block: run.num_tokens // len(run.hashes) for run in runs for block in run.hashes}
    return sum(per_block.values())


def _num_hits(runs: Sequence[ListedRun]) -> int:
    """Count uses of chains: each use counts once in every run, so once in a first one."""
    return sum(run.num_hits for run in runs if run.parent is None)


def _moment(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)
