"""Every metric of `/metrics`: its name, kind, labels, and what it counts, in words."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from vllm_mlx.engine.core.histogram import TOKEN_GAP_BOUNDS_S
from vllm_mlx.engine.core.stats import DiskPrefixStats, EngineStats, PrefixStats

#: All names begin so; behind it stands vLLM's own name wherever vLLM has the metric.
PREFIX = "vllm_mlx_"

Kind = Literal["counter", "gauge", "histogram"]
Source = Literal["server", "engine"]

_WAIT_BOUNDS_S = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0),
    *(10.0, 25.0, 50.0, 100.0, 250.0, 500.0, 1000.0),
)
_TOKEN_BOUNDS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144)


@dataclass(frozen=True)
class Metric:
    """Describe one metric; `labels` come after `model`, which each has."""

    name: str
    kind: Kind
    help: str
    #: Who takes the figure: the HTTP process as it answers, or the engine process.
    source: Source
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


def _counter(source: Source, name: str, text: str, *labels: str) -> Metric:
    return Metric(name, "counter", text, source, labels)


def _gauge(source: Source, name: str, text: str, *labels: str) -> Metric:
    return Metric(name, "gauge", text, source, labels)


def _histogram(
    source: Source, name: str, text: str, buckets: tuple[float, ...], *labels: str
) -> Metric:
    return Metric(name, "histogram", text, source, labels, buckets)


_HTTP = (
    _counter(
        "server",
        "http_requests_total",
        "HTTP requests that are over, by route, method, status (499: the client left before its "
        "answer was complete) and outcome: success, aborted (cancelled), client_closed, refused "
        "(4xx) or error (5xx, or an error within a stream).",
        *("route", "method", "status", "outcome"),
    ),
    _counter(
        "server",
        "request_errors_total",
        "Errors that clients were told of, by their code, within streams too.",
        "code",
    ),
    _counter(
        "server",
        "request_success_total",
        "Rows (one for each choice of each prompt) that have ended, by finish reason. abort is a "
        "row that was cancelled or whose client left, error one that failed.",
        "finished_reason",
    ),
)

_TOKENS = (
    _counter(
        "server",
        "prompt_tokens_total",
        "Prompt tokens of rows whose answer has begun, found ones included.",
    ),
    _counter(
        "server",
        "prompt_tokens_cached_total",
        "Prompt tokens of these rows that were found in the prefix cache and not computed.",
    ),
    _counter("server", "generation_tokens_total", "Tokens generated for clients."),
    _histogram(
        "server",
        "request_prompt_tokens",
        "Prompt tokens of a row that ended by stop or length.",
        _TOKEN_BOUNDS,
    ),
    _histogram(
        "server",
        "request_generation_tokens",
        "Generated tokens of a row that ended by stop or length.",
        _TOKEN_BOUNDS,
    ),
)

_TIMES = (
    _histogram(
        "server",
        "time_to_first_token_seconds",
        "From the arrival of a request's head to the first token of a row, as the HTTP process "
        "sees both.",
        _WAIT_BOUNDS_S,
    ),
    _histogram(
        "engine",
        "inter_token_latency_seconds",
        "From one token of a row to its next, preemptions included, on the engine's clock.",
        TOKEN_GAP_BOUNDS_S,
    ),
    _histogram(
        "engine",
        "request_time_per_output_token_seconds",
        "Mean time of a token after the first, of a row that ended by stop or length with two "
        "tokens or more, on the engine's clock.",
        TOKEN_GAP_BOUNDS_S,
    ),
    _histogram(
        "server",
        "e2e_request_latency_seconds",
        "From the arrival of a request's head to the end of a row by stop or length.",
        _WAIT_BOUNDS_S,
    ),
    _histogram(
        "engine",
        "request_queue_time_seconds",
        "From a row's arrival at the engine to the first step that computed for it, of a row that "
        "ended by stop or length.",
        _WAIT_BOUNDS_S,
    ),
    _histogram(
        "engine",
        "request_prefill_time_seconds",
        "From there to the first token, of a row that ended by stop or length.",
        _WAIT_BOUNDS_S,
    ),
    _histogram(
        "engine",
        "request_decode_time_seconds",
        "From the first token to the last, of a row that ended by stop or length.",
        _WAIT_BOUNDS_S,
    ),
)

_ENGINE = (
    _gauge("engine", "num_requests_running", "Rows that decode."),
    _gauge("engine", "num_requests_waiting", "Rows that wait, or whose prompt is being computed."),
    _gauge("engine", "kv_cache_usage_perc", "Part of the KV budget that is in use; 1 is all."),
    _gauge("engine", "kv_cache_bytes", "KV of running rows and of prompts being computed."),
    _gauge("engine", "kv_cache_limit_bytes", "The KV budget."),
    _gauge(
        "engine",
        "device_memory_bytes",
        "What MLX holds on its device: in use (active), at most so far (peak), freed buffers kept "
        "for reuse (cache).",
        "kind",
    ),
    _counter("engine", "engine_steps_total", "Steps of the engine."),
    _counter(
        "engine",
        "prefill_tokens_total",
        "Prompt tokens that were really computed, those of warming and of preempted rows included.",
    ),
    _counter("engine", "num_preemptions_total", "Rows sent back to wait for want of memory."),
    _counter("server", "engine_restarts_total", "Engine processes started after one had died."),
    _gauge("server", "engine_up", "1 while the engine answers requests, 0 otherwise."),
    _gauge(
        "server",
        "engine_stats_age_seconds",
        "How old the engine's figures on this page are; NaN while there are none.",
    ),
)

_PREFIXES = (
    _counter("engine", "prefix_cache_queries_total", "Prompt tokens looked for."),
    _counter("engine", "prefix_cache_hits_total", "Prompt tokens found and not computed."),
    _counter("engine", "prefix_cache_evictions_total", "Blocks dropped from RAM."),
    _gauge("engine", "prefix_cache_blocks", "Blocks held in RAM."),
    _gauge("engine", "prefix_cache_bytes", "RAM that they take."),
    _gauge("engine", "prefix_cache_limit_bytes", "Most RAM that they may take."),
)

_SSD = (
    _counter("engine", "ssd_cache_spilled_blocks_total", "Blocks handed over to be written."),
    _counter("engine", "ssd_cache_restored_blocks_total", "Blocks read back."),
    _counter(
        "engine",
        "ssd_cache_declined_restores_total",
        "Restores not begun because computing was predicted to be faster.",
    ),
    _counter("engine", "ssd_cache_written_bytes_total", "Bytes written."),
    _counter("engine", "ssd_cache_read_bytes_total", "Bytes read."),
    _counter("engine", "ssd_cache_read_seconds_total", "Time of reading, over all its threads."),
    _counter("engine", "ssd_cache_evicted_files_total", "Files removed to stay within the limit."),
    _counter(
        "engine", "ssd_cache_dropped_files_total", "Files not written because too many waited."
    ),
    _counter("engine", "ssd_cache_faults_total", "Faults, by kind; each was a miss.", "kind"),
    _gauge("engine", "ssd_cache_files", "Files held, of all processes that share the folder."),
    _gauge("engine", "ssd_cache_bytes", "What they take on the disk."),
    _gauge("engine", "ssd_cache_limit_bytes", "Most that they may take; 0 without an SSD tier."),
    _gauge("engine", "ssd_cache_waiting_files", "Files that wait to be written."),
)

#: Their `model` is the name of their own model, not of the chat model.
_SERVICES = (
    _gauge("server", "service_up", "1 while the engine answers requests, 0 otherwise.", "kind"),
    _gauge("server", "service_requests_open", "Requests that wait or are computed.", "kind"),
    _counter(
        "server",
        "service_requests_total",
        "Requests that are over, by outcome: success, refused (the request's fault), error or "
        "aborted (its client left, or the server stopped).",
        *("kind", "outcome"),
    ),
    _counter("server", "service_tokens_total", "Tokens of texts in answered requests.", "kind"),
    _counter(
        "server",
        "service_truncated_texts_total",
        "Texts of answered requests that were longer than the model reads, and cut.",
        "kind",
    ),
    _counter("server", "service_restarts_total", "Processes started after one had died.", "kind"),
    _histogram(
        "server",
        "service_request_duration_seconds",
        "From handing a request to the engine to the end of its answer.",
        _WAIT_BOUNDS_S,
        "kind",
    ),
)

_ABOUT = (
    _gauge(
        "server",
        "build_info",
        "1; the labels are the versions of vllm-mlx, Python, MLX and mlx-lm.",
        *("version", "python", "mlx", "mlx_lm"),
    ),
    _gauge(
        "server",
        "model_info",
        "1 once a model is loaded; the labels say what kind it is and where it computes.",
        *("model_type", "dtype", "device", "max_model_len"),
    ),
    _gauge("server", "start_time_seconds", "When the server started, in seconds of Unix time."),
)

#: By what they are about, in the order of the page.
CATALOG: Mapping[str, tuple[Metric, ...]] = {
    "Requests": _HTTP,
    "Tokens": _TOKENS,
    "Times": _TIMES,
    "Engine": _ENGINE,
    "Prefix cache in RAM": _PREFIXES,
    "Prefix cache on SSD": _SSD,
    "Engines of other kinds": _SERVICES,
    "About": _ABOUT,
}


def _prefixes(stats: EngineStats) -> PrefixStats:
    return stats.prefixes or PrefixStats()


def _disk(stats: EngineStats) -> DiskPrefixStats:
    return _prefixes(stats).disk or DiskPrefixStats()


#: Counters that the engine keeps, which begin again at zero with each process.
ENGINE_COUNTERS: Mapping[str, Callable[[EngineStats], float]] = {
    "engine_steps_total": lambda stats: stats.steps_executed,
    "prefill_tokens_total": lambda stats: stats.prefilled_tokens,
    "num_preemptions_total": lambda stats: stats.num_preemptions,
    "prefix_cache_queries_total": lambda stats: _prefixes(stats).query_tokens,
    "prefix_cache_hits_total": lambda stats: _prefixes(stats).hit_tokens,
    "prefix_cache_evictions_total": lambda stats: _prefixes(stats).num_evicted,
    "ssd_cache_spilled_blocks_total": lambda stats: _disk(stats).num_spilled,
    "ssd_cache_restored_blocks_total": lambda stats: _disk(stats).num_restored,
    "ssd_cache_declined_restores_total": lambda stats: _disk(stats).num_declined,
    "ssd_cache_written_bytes_total": lambda stats: _disk(stats).written_bytes,
    "ssd_cache_read_bytes_total": lambda stats: _disk(stats).read_bytes,
    "ssd_cache_read_seconds_total": lambda stats: _disk(stats).read_s,
    "ssd_cache_evicted_files_total": lambda stats: _disk(stats).num_evicted,
    "ssd_cache_dropped_files_total": lambda stats: _disk(stats).num_dropped,
}

#: Gauges that are read off what the engine says; 0 while there is no engine.
ENGINE_GAUGES: Mapping[str, Callable[[EngineStats], float]] = {
    "num_requests_running": lambda stats: stats.num_running,
    "kv_cache_usage_perc": lambda stats: stats.kv_bytes / (stats.kv_budget_bytes or 1),
    "kv_cache_bytes": lambda stats: stats.kv_bytes,
    "kv_cache_limit_bytes": lambda stats: stats.kv_budget_bytes,
    "prefix_cache_blocks": lambda stats: _prefixes(stats).num_blocks,
    "prefix_cache_bytes": lambda stats: _prefixes(stats).num_bytes,
    "prefix_cache_limit_bytes": lambda stats: _prefixes(stats).max_bytes,
    "ssd_cache_files": lambda stats: _disk(stats).num_runs,
    "ssd_cache_bytes": lambda stats: _disk(stats).num_bytes,
    "ssd_cache_limit_bytes": lambda stats: _disk(stats).max_bytes or 0,
    "ssd_cache_waiting_files": lambda stats: _disk(stats).num_queued,
}


def disk_faults(stats: EngineStats) -> Mapping[str, int]:
    """Return how often each kind of fault of the SSD tier has occurred."""
    return _disk(stats).faults
