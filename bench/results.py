"""Build the rows of a run, and hold them together with what the run says of itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from vllm_mlx.bench.columns import (
    CASE_COLUMNS,
    REQUEST_COLUMNS,
    ROW_COLUMNS,
    SCHEMA_VERSION,
    Column,
)
from vllm_mlx.bench.metrics import Slo, e2el_s, gaps_s, tpot_s, ttft_s
from vllm_mlx.bench.timeline import RequestRecord
from vllm_mlx.bench.workload import Case
from vllm_mlx.engine.errors import UnreachableError

Row = dict[str, Any]

_MS = 1e3
_PREVIEW_CHARS = 200


@dataclasses.dataclass
class Results:
    """Gather a run's rows; its owner is the session until it returns them."""

    rows: list[Row] = dataclasses.field(default_factory=list)
    cases: list[Row] = dataclasses.field(default_factory=list)
    requests: list[Row] = dataclasses.field(default_factory=list)
    #: What a reader should know before using the figures.
    notes: list[str] = dataclasses.field(default_factory=list)
    is_interrupted: bool = False
    #: Why the run stopped before its end, where the server is to blame.
    failure: UnreachableError | None = None

    def note(self, text: str) -> None:
        """Add a note, once."""
        if text not in self.notes:
            self.notes.append(text)


def ordered(values: Mapping[str, Any], columns: Sequence[Column]) -> Row:
    """Return a row with exactly `columns`, in their order; raises `KeyError` for any other."""
    names = [column.name for column in columns]
    unknown = values.keys() - set(names)
    if unknown:
        raise KeyError(f"no such column: {', '.join(sorted(unknown))}")
    return {name: values.get(name) for name in names}


def bench_row(*parts: Mapping[str, Any]) -> Row:
    """Return one row of a configuration and repetition, put together from `parts`."""
    values: Row = {"schema_version": SCHEMA_VERSION}
    for part in parts:
        values |= part
    return ordered(values, ROW_COLUMNS)


def request_row(
    which: Mapping[str, Any], record: RequestRecord, began_at: float, slo: Slo | None
) -> Row:
    """Return the row of one request; times count from `began_at`."""
    first_byte = record.first_byte_at
    values = {
        **which,
        **_one_request(record),
        "prompt_id": record.place.prompt_id,
        "conversation": record.place.conversation,
        "turn": record.place.turn,
        "index": record.place.index,
        "scheduled": (record.scheduled_at - began_at) * _MS,
        "started": (record.started_at - began_at) * _MS,
        "connect": record.connect_s * _MS,
        "first_byte": (first_byte - record.started_at) * _MS if first_byte is not None else None,
        "status": record.status,
        "events": len(record.event_times),
        "gaps": [round(gap * _MS, 4) for gap in gaps_s(record)],
        "meets_slo": slo.meets(record) if slo is not None else None,
        "request_id": record.answer.request_id,
    }
    return ordered(values, REQUEST_COLUMNS)


def case_row(which: Mapping[str, Any], record: RequestRecord, case: Case) -> Row:
    """Return the row of one case of a workload; a request that failed passes no check."""
    answer = record.answer
    if record.failure is not None:
        issues = [f"{record.failure.kind}: {record.failure.message}"]
    else:
        issues = case.checks.issues(answer)
    limit = case.policy_timeout_ms
    is_in_time = record.is_ok and (limit is None or e2el_s(record) * _MS <= limit)
    values = {
        **which,
        **_one_request(record),
        "case_id": case.prompt.id,
        "tags": list(case.tags),
        "max_tokens": record.max_tokens,
        "policy_timeout_ms": limit,
        "within_policy_timeout": is_in_time,
        "quality_ok": not issues,
        "quality_issues": issues,
        "tool_calls": [answer.tool_calls[index].name for index in sorted(answer.tool_calls)],
        "content_chars": len(answer.content),
        "content_preview": answer.content[:_PREVIEW_CHARS],
    }
    return ordered(values, CASE_COLUMNS)


def quality_columns(cases: Sequence[Row]) -> dict[str, Any]:
    """Return the columns that sum up a repetition's cases."""
    return {
        "quality_failures": sum(not case["quality_ok"] for case in cases),
        "policy_timeouts": sum(not case["within_policy_timeout"] for case in cases),
    }


def _one_request(record: RequestRecord) -> dict[str, Any]:
    ttft, tpot = ttft_s(record), tpot_s(record)
    failure = record.failure
    return {
        "ttft": ttft * _MS if ttft is not None else None,
        "tpot": tpot * _MS if tpot is not None else None,
        "e2el": e2el_s(record) * _MS,
        "prompt_tokens": record.answer.prompt_tokens,
        "completion_tokens": record.completion_tokens,
        "cached_tokens": record.answer.cached_tokens,
        "finish_reason": record.answer.finish_reason,
        "failure": failure.kind if failure is not None else None,
        "failure_message": failure.message if failure is not None else None,
    }
