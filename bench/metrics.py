"""The measures of one request and of many: TTFT, ITL, TPOT, E2EL, throughput and goodput."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from vllm_mlx.bench.distribution import describe
from vllm_mlx.bench.timeline import RequestRecord
from vllm_mlx.engine.errors import UsageError

#: The four latencies, in the order of the columns.
LATENCIES = ("ttft", "itl", "tpot", "e2el")

_MS = 1e3


def ttft_s(record: RequestRecord) -> float | None:
    """Return the time to the first output; None when the answer was not streamed."""
    return record.event_times[0] - record.started_at if record.event_times else None


def gaps_s(record: RequestRecord) -> list[float]:
    """Return the gaps between one output and the next: one fewer than there are outputs."""
    return [after - before for before, after in pairwise(record.event_times)]


def tpot_s(record: RequestRecord) -> float | None:
    """Return the time per token after the first: n tokens have n - 1 gaps.

    None for fewer than two tokens, or when all of them came at once. The last token's arrival is
    that of the last output; of the finish reason where the server counts tokens, such as the one
    that ends the answer, which no output showed.
    """
    num_tokens = record.completion_tokens
    if num_tokens < 2 or len(record.event_times) < 2:
        return None
    last = record.event_times[-1]
    if num_tokens > len(record.event_times) and record.finished_at is not None:
        last = max(last, record.finished_at)
    return (last - record.event_times[0]) / (num_tokens - 1)


def e2el_s(record: RequestRecord) -> float:
    """Return the time to the last byte."""
    return record.ended_at - record.started_at


@dataclasses.dataclass(frozen=True)
class Slo:
    """Hold the service levels that a request must meet to count as good, in seconds."""

    limits_s: Mapping[str, float]

    @classmethod
    def parse(cls, text: str) -> Slo:
        """Read `ttft=500,itl=60` (milliseconds, or with a unit `ms` or `s`)."""
        limits: dict[str, float] = {}
        for part in filter(None, (piece.strip() for piece in text.split(","))):
            name, _, value = part.partition("=")
            name, value = name.strip(), value.strip()
            if name not in LATENCIES or name in limits:
                raise UsageError(f"'{part}': give one of {', '.join(LATENCIES)}, as ttft=500")
            scale = 1e-3
            if value.endswith("ms"):
                value = value[:-2]
            elif value.endswith("s"):
                value, scale = value[:-1], 1.0
            try:
                limit = float(value) * scale
            except ValueError:
                raise UsageError(f"'{part}': '{value}' is not a number") from None
            if not 0 < limit < float("inf"):
                raise UsageError(f"'{part}': a limit must be positive")
            limits[name] = limit
        if not limits:
            raise UsageError("--slo names no limit; write it as ttft=500,itl=60")
        return cls(limits)

    def meets(self, record: RequestRecord) -> bool:
        """Return whether an answered request is within every limit.

        `itl` limits the longest gap, `tpot` the mean one. A latency that was not measured, such
        as the TTFT of an answer that was not streamed, meets nothing.
        """
        if not record.is_ok:
            return False
        gaps = gaps_s(record)
        measured = {
            "ttft": ttft_s(record),
            # One token has no gap to be too long.
            "itl": max(gaps, default=0.0) if record.event_times else None,
            "tpot": tpot_s(record) if record.completion_tokens > 1 else 0.0,
            "e2el": e2el_s(record),
        }
        for name, limit in self.limits_s.items():
            value = measured[name]
            if value is None or value > limit:
                return False
        return True


def latencies_ms(records: Sequence[RequestRecord]) -> dict[str, list[float]]:
    """Return every value of the four latencies in milliseconds; `itl` holds all gaps."""
    found: dict[str, list[float]] = {name: [] for name in LATENCIES}
    for record in records:
        found["itl"] += [gap * _MS for gap in gaps_s(record)]
        for name, value in (
            ("ttft", ttft_s(record)),
            ("tpot", tpot_s(record)),
            ("e2el", e2el_s(record)),
        ):
            if value is not None:
                found[name].append(value * _MS)
    return found


def measures(records: Sequence[RequestRecord], slo: Slo | None) -> dict[str, Any]:
    """Return the measured columns of one repetition, by name.

    The duration runs from the first request's start to the last one's end. Latencies and
    throughput count answered requests only. Without any request all is None or 0.
    """
    good = [record for record in records if record.is_ok]
    failures = collections.Counter(r.failure.kind for r in records if r.failure is not None)
    duration = 0.0
    if records:
        duration = max(r.ended_at for r in records) - min(r.started_at for r in records)
    columns: dict[str, Any] = {
        "requests": len(records),
        "completed": len(good),
        "failures": len(records) - len(good),
        "failures_by_kind": dict(sorted(failures.items())),
        "success_rate": len(good) / len(records) if records else None,
        "duration_s": duration,
    }
    columns |= _tokens(good)
    for name, values in latencies_ms(good).items():
        columns |= {f"{name}_{part}": value for part, value in describe(values).items()}
    columns |= _rates(good, duration, slo, len(records))
    return columns


def _tokens(good: Sequence[RequestRecord]) -> dict[str, Any]:
    prompts = [r.answer.prompt_tokens for r in good if r.answer.prompt_tokens is not None]
    cached = [r.answer.cached_tokens for r in good if r.answer.cached_tokens is not None]
    completions = [r.completion_tokens for r in good]
    num_events = sum(len(r.event_times) for r in good)
    is_counted = all(r.answer.completion_tokens is not None for r in good)
    return {
        "prompt_tokens": sum(prompts) if prompts else None,
        "prompt_tokens_mean": _mean(prompts),
        "prompt_tokens_min": min(prompts, default=None),
        "prompt_tokens_max": max(prompts, default=None),
        "completion_tokens": sum(completions),
        "completion_tokens_mean": _mean(completions),
        "token_count_source": ("usage" if is_counted else "events") if good else None,
        "cached_tokens": sum(cached) if cached else None,
        "cached_token_rate": sum(cached) / sum(prompts) if cached and sum(prompts) else None,
        "tokens_per_event": sum(completions) / num_events if num_events else None,
        "output_reached": _mean([float(r.completion_tokens == r.max_tokens) for r in good]),
    }


def _rates(
    good: Sequence[RequestRecord], duration: float, slo: Slo | None, num_requests: int
) -> dict[str, Any]:
    prompts = [r.answer.prompt_tokens for r in good]
    input_tokens = sum(p for p in prompts if p is not None) if any(prompts) else None
    num_met = sum(slo.meets(r) for r in good) if slo is not None else None
    return {
        "output_tps": _rate(sum(r.completion_tokens for r in good), duration),
        "input_tps": _rate(input_tokens, duration),
        "request_rate": _rate(len(good), duration),
        "goodput": _rate(num_met, duration),
        "slo_attainment": num_met / num_requests if num_met is not None and num_requests else None,
    }


def _rate(amount: float | None, duration: float) -> float | None:
    return amount / duration if amount is not None and duration > 0 else None


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
