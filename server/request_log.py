"""One log line for each HTTP request that is over, and prompts where they are asked for."""

from __future__ import annotations

import logging
from collections.abc import Iterator, MutableMapping
from typing import Any
from urllib.parse import quote

import msgspec

from vllm_mlx.server.request_context import RequestContext
from vllm_mlx.server.request_record import RequestRecord

access_logger = logging.getLogger("vllm_mlx.access")
prompt_logger = logging.getLogger("vllm_mlx.prompts")

#: Probes ask every few seconds; their lines would bury the others.
_QUIET_PATHS = frozenset({"/health", "/ready", "/metrics"})

#: Written with the text line, in this order, by these names.
_TEXT_FIELDS = (
    *(("finish_reason", "%s"), ("prompt_tokens", "prompt=%d"), ("cached_tokens", "cached=%d")),
    *(("completion_tokens", "completion=%d"), ("queue_s", "queue=%.3fs")),
    *(("prefill_s", "prefill=%.3fs"), ("ttft_s", "ttft=%.3fs"), ("tpot_s", "tpot=%.4fs")),
    ("error", "%s"),
)


def log_request(
    scope: MutableMapping[str, Any],
    context: RequestContext,
    *,
    status: int,
    seconds: float,
    outcome: str,
) -> None:
    """Write one line: no query, no header and no body, where keys and prompts would be."""
    level = logging.DEBUG if scope["path"] in _QUIET_PATHS else logging.INFO
    if not access_logger.isEnabledFor(level):
        return
    fields: dict[str, Any] = {
        "client": (scope.get("client") or ("-",))[0],
        "method": scope["method"],
        # The path was unquoted: quoting it again keeps line breaks out of the log.
        "path": quote(scope["path"], safe="/:@"),
        "status": status,
        "duration_s": round(seconds, 6),
        "request_id": context.id,
        "outcome": outcome,
    }
    fields |= dict(_row_fields(context.record))
    if context.error_code is not None:
        fields["error"] = context.error_code
    line = "{client} {method} {path} {status} {duration_s:.3f}s {request_id}".format_map(fields)
    parts = [line, *(form % fields[name] for name, form in _TEXT_FIELDS if name in fields)]
    access_logger.log(level, "%s", " ".join(parts), extra={"fields": fields})


def log_prompt(request_id: str, body: bytes) -> None:
    """Write what an accepted request asks, as compact JSON; for `--log-prompts` only."""
    text = msgspec.json.format(body, indent=-1).decode("utf-8", "replace")
    fields = {"request_id": request_id, "body": text}
    prompt_logger.info("%s asks %s", request_id, text, extra={"fields": fields})


def _row_fields(record: RequestRecord) -> Iterator[tuple[str, Any]]:
    """Yield what the rows have cost: sums of tokens, and the longest times."""
    if not record.rows:
        return
    rows = list(record.rows.values())
    yield "rows", len(rows)
    yield "prompt_tokens", record.total(lambda row: row.num_prompt_tokens)
    yield "cached_tokens", record.total(lambda row: row.num_cached_tokens)
    yield "completion_tokens", record.total(lambda row: row.num_completion_tokens)
    yield "finish_reason", ",".join(sorted({row.finish_reason or "open" for row in rows}))
    times = {
        "queue_s": record.latest(lambda row: row.timings.queue_s),
        "prefill_s": record.latest(lambda row: row.timings.prefill_s),
        "ttft_s": record.latest(lambda row: row.ttft_s),
        "tpot_s": record.latest(lambda row: row.tpot_s),
    }
    for name, seconds in times.items():
        if seconds is not None:
            yield name, round(seconds, 6)
