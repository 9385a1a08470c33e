"""The columns of the result files: their names, order, units and meanings; schema version 1.

A column keeps its name and meaning within a schema version; new ones may be added at the end of
their group. `docs/benchmarking.md` lists them, and a test holds the lists equal.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

SCHEMA_VERSION = 1

Kind = Literal["text", "int", "float", "bool", "json"]
Unit = Literal["", "ms", "s", "tokens/s", "1/s", "ratio", "tokens", "GB", "us"]
#: How repetitions become one value: their mean, sum, largest, smallest; None: it is not a measure.
Pooling = Literal["mean", "sum", "max", "min"]


@dataclasses.dataclass(frozen=True, slots=True)
class Column:
    """Describe one column."""

    name: str
    kind: Kind
    meaning: str
    unit: Unit = ""
    #: Which direction is good; None where there is none.
    better: Literal["lower", "higher"] | None = None
    pooling: Pooling | None = None


def _text(name: str, meaning: str) -> Column:
    return Column(name, "text", meaning)


def _count(name: str, meaning: str, better: Literal["lower", "higher"] | None = None) -> Column:
    return Column(name, "int", meaning, better=better, pooling="sum")


_IDENTITY = (
    Column("schema_version", "int", "version of this list of columns"),
    _text("run_id", "random, the same in all rows of a run"),
    _text("timestamp", "when the repetition began, UTC, ISO 8601"),
    _text("tag", "what --tag said"),
    _text("url", "the server's address, without credentials"),
    _text("server", "what the server says it is: its Server header, or the API's own word"),
    _text("server_version", "its version, where it tells"),
    _text("model", "the name that requests carried"),
    _text("configuration", "short name of the configuration, for people"),
)

#: What makes a configuration: rows that agree in all of these are repetitions of one.
CONFIGURATION_COLUMNS = (
    _text("endpoint", "chat, completions, messages or responses"),
    Column("stream", "bool", "whether answers were streamed"),
    _text("prompt_set", "name of the built-in set, the file, the workload, or `tokens`"),
    Column("prompt_tokens_target", "int", "--prompt-tokens", "tokens"),
    Column("output_tokens_target", "int", "--output-tokens", "tokens"),
    Column("shared_prefix_tokens", "int", "--shared-prefix-tokens", "tokens"),
    Column("turns", "int", "turns of a conversation"),
    _text("cache_mode", "cold, warm, prefix-hit or preserve"),
    Column("concurrency", "int", "requests kept running (closed loop); empty in an open loop"),
    Column("request_rate_target", "float", "requests wanted per second (open loop)", "1/s"),
    _text("arrival", "closed, poisson or constant"),
    Column("burstiness", "float", "shape of the gaps between arrivals; 1 is Poisson"),
    Column("max_tokens", "int", "most tokens asked for", "tokens"),
    Column("temperature", "float", "temperature asked for"),
    Column("extra_body", "json", "fields added to every request"),
)

_HOW = (
    Column("repetition", "int", "counted from 1"),
    Column("is_partial", "bool", "the repetition was interrupted"),
    Column("seed", "int", "--seed"),
    Column("warmup", "int", "--warmup"),
    _text("prompt_tokens_source", "how lengths were counted: tokenize, count_tokens, usage"),
    _text(
        "output_control",
        "ignore_eos where the server takes that field, else none; see output_reached",
    ),
)

_COUNTS = (
    _count("requests", "requests sent"),
    _count("completed", "requests answered", "higher"),
    _count("failures", "requests not answered", "lower"),
    Column("failures_by_kind", "json", "number of failures by kind"),
    Column("success_rate", "float", "completed / requests", "ratio", "higher", "mean"),
    Column("duration_s", "float", "first request's start to last one's end", "s", "lower", "mean"),
)

_TOKENS = (
    Column("prompt_tokens", "int", "prompt tokens of answered requests", "tokens"),
    Column("prompt_tokens_mean", "float", "their mean", "tokens"),
    Column("prompt_tokens_min", "int", "the shortest prompt", "tokens"),
    Column("prompt_tokens_max", "int", "the longest prompt", "tokens"),
    Column("completion_tokens", "int", "tokens generated", "tokens"),
    Column("completion_tokens_mean", "float", "their mean", "tokens"),
    _text("token_count_source", "usage, or events where the server does not count"),
    Column("cached_tokens", "int", "prompt tokens that the server took from its cache", "tokens"),
    Column(
        "cached_token_rate", "float", "cached_tokens / prompt_tokens", "ratio", "higher", "mean"
    ),
    Column("tokens_per_event", "float", "completion tokens per streamed event"),
    Column("output_reached", "float", "share of answers with exactly max_tokens tokens", "ratio"),
)

_LATENCY_MEANINGS = {
    "ttft": "time to first output",
    "itl": "gap between one output and the next, all gaps of all requests",
    "tpot": "time per output token after the first, of each request",
    "e2el": "time to the last byte",
}
_PART_MEANINGS = {
    "mean": "mean",
    "sd": "standard deviation",
    "min": "smallest",
    "p50": "median",
    "p90": "90th percentile",
    "p95": "95th percentile",
    "p99": "99th percentile",
    "max": "largest",
}


def _latencies() -> tuple[Column, ...]:
    pooling: dict[str, Pooling] = {"min": "min", "max": "max"}
    return tuple(
        Column(
            f"{latency}_{part}",
            "float",
            f"{meaning}: {word}",
            "ms",
            "lower",
            pooling.get(part, "mean"),
        )
        for latency, meaning in _LATENCY_MEANINGS.items()
        for part, word in _PART_MEANINGS.items()
    )


_RATES = (
    Column("output_tps", "float", "completion_tokens / duration_s", "tokens/s", "higher", "mean"),
    Column("input_tps", "float", "prompt_tokens / duration_s", "tokens/s", "higher", "mean"),
    Column("request_rate", "float", "completed / duration_s", "1/s", "higher", "mean"),
    Column(
        "goodput",
        "float",
        "requests within every limit of --slo / duration_s",
        "1/s",
        "higher",
        "mean",
    ),
    Column(
        "slo_attainment",
        "float",
        "share of requests within every limit of --slo",
        "ratio",
        "higher",
        "mean",
    ),
    Column("slo", "json", "the limits of --slo in seconds"),
)

_QUALITY = (
    _count("quality_failures", "answers that failed a check of the workload", "lower"),
    _count("policy_timeouts", "answers later than the workload's policy allows", "lower"),
)

_SERVER = (
    Column("server_steps", "int", "engine steps during the repetition"),
    Column("server_prompt_tokens", "int", "prompt tokens by the server's own count", "tokens"),
    Column("server_cached_tokens", "int", "cached tokens by the server's own count", "tokens"),
    Column("server_completion_tokens", "int", "tokens generated by the server's count", "tokens"),
    Column("server_preemptions", "int", "rows that gave up their memory"),
    Column("server_active_memory_gb", "float", "device memory after it", "GB", "lower", "max"),
    Column("server_peak_memory_gb", "float", "device memory's peak", "GB", "lower", "max"),
    Column("server_metrics", "json", "growth of every counter of the server's /metrics"),
)

_CLIENT = (
    Column("client_cpu", "float", "share of a core that measuring took", "ratio", "lower", "mean"),
    Column("client_us_per_event", "float", "processor time per event", "us", "lower", "mean"),
    Column(
        "client_lag_max",
        "float",
        "longest time the client did not look at its sockets",
        "ms",
        "lower",
        "max",
    ),
    Column(
        "dispatch_lag_max",
        "float",
        "latest that a request was sent after its time",
        "ms",
        "lower",
        "max",
    ),
)

_ENVIRONMENT = (
    _text("server_device", "the device that the server computes on, where it tells"),
    Column("server_is_local", "bool", "the server runs on the machine that measured"),
    _text("chip", "processor of the machine that measured"),
    Column("cpu_cores", "int", "its logical cores"),
    Column("memory_gb", "float", "its memory", "GB"),
    _text("gpu", "its GPUs, where a tool names them"),
    _text("os", "its operating system"),
    _text("python_version", "Python that measured"),
    _text("client_version", "vllm-mlx that measured"),
    _text("git_revision", "revision of the working directory, `+` with changes"),
    _text("command", "the command line, without keys"),
)

#: One row for each configuration and repetition.
ROW_COLUMNS: tuple[Column, ...] = (
    *_IDENTITY, *CONFIGURATION_COLUMNS, *_HOW, *_COUNTS, *_TOKENS, *_latencies(), *_RATES,
    *_QUALITY, *_SERVER, *_CLIENT, *_ENVIRONMENT,
)  # fmt: skip

_WHICH = (
    Column("schema_version", "int", "version of this list of columns"),
    _text("run_id", "the run's"),
    _text("model", "the name that the request carried"),
    _text("configuration", "short name of the configuration"),
    _text("prompt_set", "name of the set, file or workload"),
    _text("cache_mode", "the configuration's"),
    Column("concurrency", "int", "the configuration's"),
    Column("request_rate_target", "float", "the configuration's", "1/s"),
    Column("repetition", "int", "counted from 1"),
)

_ONE_REQUEST = (
    Column("ttft", "float", "time to first output", "ms"),
    Column("tpot", "float", "time per output token after the first", "ms"),
    Column("e2el", "float", "time to the last byte", "ms"),
    Column("prompt_tokens", "int", "prompt tokens", "tokens"),
    Column("completion_tokens", "int", "tokens generated", "tokens"),
    Column("cached_tokens", "int", "prompt tokens from the server's cache", "tokens"),
    _text("finish_reason", "why the answer ended"),
    _text("failure", "kind of failure; empty for an answered request"),
    _text("failure_message", "what was wrong"),
)

#: One row for each request, with --raw.
REQUEST_COLUMNS: tuple[Column, ...] = (
    *_WHICH,
    _text("prompt_id", "which prompt of the set"),
    Column("conversation", "int", "which conversation"),
    Column("turn", "int", "which turn of it, from 0"),
    Column("index", "int", "order of sending"),
    Column("scheduled", "float", "when it was due, from the repetition's start", "ms"),
    Column("started", "float", "when it was sent, from the repetition's start", "ms"),
    Column("connect", "float", "time to open a connection; 0 on an open one", "ms"),
    Column("first_byte", "float", "time to the response's head", "ms"),
    *_ONE_REQUEST,
    Column("status", "int", "HTTP status"),
    Column("events", "int", "events that carried output"),
    Column("gaps", "json", "every gap between outputs", "ms"),
    Column("meets_slo", "bool", "within every limit of --slo"),
    _text("request_id", "the server's id of the answer"),
)

#: One row for each case of a workload and repetition.
CASE_COLUMNS: tuple[Column, ...] = (
    *_WHICH,
    _text("case_id", "the case's id"),
    Column("tags", "json", "the case's tags"),
    *_ONE_REQUEST,
    Column("max_tokens", "int", "most tokens asked for", "tokens"),
    Column("policy_timeout_ms", "float", "latest that the answer may end", "ms"),
    Column("within_policy_timeout", "bool", "it ended in time"),
    Column("quality_ok", "bool", "every check passed"),
    Column("quality_issues", "json", "the checks that did not, in words"),
    Column("tool_calls", "json", "names of the tools that were called"),
    Column("content_chars", "int", "length of the visible text"),
    _text("content_preview", "its beginning"),
)

BY_NAME = {column.name: column for column in ROW_COLUMNS}
#: What gates and comparisons may name.
MEASURES = {column.name: column for column in ROW_COLUMNS if column.pooling is not None}
