"""The server's metrics: counted as things happen, over all engine processes, and written out."""

from __future__ import annotations

import importlib.metadata
import math
import platform
import time
from collections.abc import Iterable, Iterator

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    disable_created_metrics,
)
from prometheus_client import Histogram as PrometheusHistogram
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import HistogramMetricFamily
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from vllm_mlx.engine.config import ModelInfo
from vllm_mlx.engine.core.histogram import TOKEN_GAP_BOUNDS_S, Histogram
from vllm_mlx.engine.core.outputs import FinishReason, RowTimings
from vllm_mlx.engine.core.stats import EngineStats
from vllm_mlx.server.metrics_catalog import (
    CATALOG,
    ENGINE_COUNTERS,
    ENGINE_GAUGES,
    PREFIX,
    Metric,
    disk_faults,
)

#: The one histogram that the engine counts itself: there is a value for every token.
_TOKEN_GAPS = "inter_token_latency_seconds"

_FINISH_REASONS: tuple[FinishReason, ...] = ("stop", "length", "abort", "error")
_METHODS = frozenset({"GET", "POST", "DELETE", "HEAD", "OPTIONS", "PUT", "PATCH"})
_PLAIN_TEXT = "text/plain; version=0.0.4; charset=utf-8"


class ServerMetrics:
    """Own every metric of one server, in a registry of its own. Event loop only.

    Counters only rise: what an engine process counts begins at zero with each process, and is
    added up here. What one did after it last told of it, and before its death, is not counted.
    """

    def __init__(self, model: str) -> None:
        """Begin at zero; `model` is the value of the label that every metric has."""
        self.registry = CollectorRegistry(auto_describe=False)
        # Those times would say when this process began, once for each of a hundred series.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._model = model
        # Those whose only label is `model` stand here with it: finding them by it takes longer than
        # counting, and so they are on the page before anything happens.
        self._counters: dict[str, Counter] = {}
        self._gauges: dict[str, Gauge] = {}
        self._histograms: dict[str, PrometheusHistogram] = {}
        self._token_gaps = Histogram(TOKEN_GAP_BOUNDS_S)
        for metric in (metric for group in CATALOG.values() for metric in group):
            self._declare(metric)
        for reason in _FINISH_REASONS:
            self._count("request_success_total", 0, reason)
        self._set("start_time_seconds", time.time())
        self._set("build_info", 1, *_versions())
        self._seen = EngineStats()
        self._seen_pid = 0
        self._num_restarts = 0
        #: By model and kind, of the engines beside the chat model.
        self._service_restarts: dict[tuple[str, str], int] = {}

    def request_ended(
        self, route: str, method: str, status: int, outcome: str, error_code: str | None
    ) -> None:
        """Count an HTTP request that is over."""
        # Clients may send any word for a method; a label must not take as many values.
        known = method if method in _METHODS else "OTHER"
        self._count("http_requests_total", 1, route, known, str(status), outcome)
        if error_code is not None:
            self._count("request_errors_total", 1, error_code)

    def tokens(self, *, prompt: int, cached: int, completion: int) -> None:
        """Count tokens of a row that its answer now includes."""
        # Once for every output of every row, and mostly of one kind only.
        if prompt:
            self._count("prompt_tokens_total", prompt)
        if cached:
            self._count("prompt_tokens_cached_total", cached)
        if completion:
            self._count("generation_tokens_total", completion)

    def first_token(self, seconds: float) -> None:
        """Count the time to a row's first token."""
        self._observe("time_to_first_token_seconds", seconds)

    def row_ended(
        self,
        reason: FinishReason,
        *,
        e2e_s: float,
        tpot_s: float | None,
        timings: RowTimings,
        num_prompt_tokens: int,
        num_completion_tokens: int,
    ) -> None:
        """Count a row that is over."""
        self._count("request_success_total", 1, reason)
        if reason not in ("stop", "length"):
            return
        self._observe("e2e_request_latency_seconds", e2e_s)
        self._observe("request_prompt_tokens", num_prompt_tokens)
        self._observe("request_generation_tokens", num_completion_tokens)
        self._observe("request_time_per_output_token_seconds", tpot_s)
        self._observe("request_queue_time_seconds", timings.queue_s)
        self._observe("request_prefill_time_seconds", timings.prefill_s)
        self._observe("request_decode_time_seconds", timings.decode_s)

    def take_engine(self, stats: EngineStats, pid: int) -> None:
        """Add what an engine process has done since it last told of it."""
        before = self._seen if pid == self._seen_pid else EngineStats()
        self._seen, self._seen_pid = stats, pid
        for name, read in ENGINE_COUNTERS.items():
            self._count(name, max(0.0, read(stats) - read(before)))
        faults = disk_faults(before)
        for kind, count in disk_faults(stats).items():
            self._count("ssd_cache_faults_total", max(0, count - faults.get(kind, 0)), kind)
        if stats.token_gaps is not None:
            self._token_gaps.add(stats.token_gaps.since(before.token_gaps))

    def describe_engine(
        self,
        stats: EngineStats | None,
        known: EngineStats,
        *,
        num_restarts: int,
        is_up: bool,
        info: ModelInfo | None,
    ) -> None:
        """Set what holds now; None for `stats` means that there is no engine that has told.

        `known` is the same with what came and went since.
        """
        self._set("engine_up", int(is_up))
        self._set("engine_stats_age_seconds", math.nan if stats is None else stats.age_s)
        self._count("engine_restarts_total", max(0, num_restarts - self._num_restarts))
        self._num_restarts = num_restarts
        for name, read in ENGINE_GAUGES.items():
            self._set(name, read(known))
        self._set("num_requests_waiting", known.num_waiting)
        if known.memory is not None:
            self._set("device_memory_bytes", known.memory.active_bytes, "active")
            self._set("device_memory_bytes", known.memory.peak_bytes, "peak")
            self._set("device_memory_bytes", known.memory.cache_bytes, "cache")
        if info is not None:
            labels = (info.model_type, info.dtype, info.device, str(info.max_model_len))
            self._set("model_info", 1, *labels)

    def service_ended(self, model: str, kind: str, outcome: str, seconds: float) -> None:
        """Count a request to an engine beside the chat model that is over."""
        self._counters["service_requests_total"].labels(model, kind, outcome).inc()
        self._histograms["service_request_duration_seconds"].labels(model, kind).observe(seconds)

    def service_texts(self, model: str, kind: str, *, num_tokens: int, num_truncated: int) -> None:
        """Count an answered request's tokens, and its texts that were cut."""
        self._counters["service_tokens_total"].labels(model, kind).inc(num_tokens)
        self._counters["service_truncated_texts_total"].labels(model, kind).inc(num_truncated)

    def describe_service(
        self, model: str, kind: str, *, is_up: bool, num_open: int, num_restarts: int
    ) -> None:
        """Set what holds now of an engine beside the chat model."""
        self._gauges["service_up"].labels(model, kind).set(int(is_up))
        self._gauges["service_requests_open"].labels(model, kind).set(num_open)
        before = self._service_restarts.get((model, kind), 0)
        self._service_restarts[model, kind] = num_restarts
        restarts = self._counters["service_restarts_total"].labels(model, kind)
        restarts.inc(max(0, num_restarts - before))

    def page(self, accept: str) -> tuple[bytes, str]:
        """Return all metrics in the format that an `Accept` header asks for, and its type."""
        # All names are of letters and underscores: there is no version of either to choose.
        if openmetrics.CONTENT_TYPE_LATEST.partition(";")[0] in accept:
            page = openmetrics.generate_latest(self.registry)  # type: ignore[no-untyped-call]
            return page, openmetrics.CONTENT_TYPE_LATEST
        return generate_latest(self.registry), _PLAIN_TEXT

    def _declare(self, metric: Metric) -> None:
        name, labels = PREFIX + metric.name, ("model", *metric.labels)
        if metric.name == _TOKEN_GAPS:
            self.registry.register(_TokenGaps(metric, self._model, self._token_gaps))
        elif metric.kind == "counter":
            counter = Counter(name, metric.help, labels, registry=self.registry)
            self._counters[metric.name] = counter if metric.labels else counter.labels(self._model)
        elif metric.kind == "gauge":
            gauge = Gauge(name, metric.help, labels, registry=self.registry)
            self._gauges[metric.name] = gauge if metric.labels else gauge.labels(self._model)
        else:
            histogram = PrometheusHistogram(
                name, metric.help, labels, registry=self.registry, buckets=metric.buckets
            )
            self._histograms[metric.name] = (
                histogram if metric.labels else histogram.labels(self._model)
            )

    def _count(self, name: str, amount: float, *labels: str) -> None:
        counter = self._counters[name]
        (counter.labels(self._model, *labels) if labels else counter).inc(amount)

    def _set(self, name: str, value: float, *labels: str) -> None:
        gauge = self._gauges[name]
        (gauge.labels(self._model, *labels) if labels else gauge).set(value)

    def _observe(self, name: str, value: float | None) -> None:
        if value is not None:
            self._histograms[name].observe(value)


class _TokenGaps(Collector):
    """Hand the engine's own histogram on."""

    def __init__(self, metric: Metric, model: str, histogram: Histogram) -> None:
        self._metric = metric
        self._model = model
        self._histogram = histogram

    def collect(self) -> Iterable[HistogramMetricFamily]:
        """Return the histogram as it is now."""
        counted = self._histogram.snapshot()
        family = HistogramMetricFamily(
            PREFIX + self._metric.name, self._metric.help, labels=["model"]
        )
        buckets = list(_cumulated(self._histogram.bounds, counted.counts))
        family.add_metric([self._model], buckets, counted.total)
        return [family]


def _cumulated(bounds: tuple[float, ...], counts: tuple[int, ...]) -> Iterator[tuple[str, float]]:
    total = 0
    for bound, count in zip((*map(str, bounds), "+Inf"), counts, strict=True):
        total += count
        yield bound, total


def _versions() -> Iterator[str]:
    yield _version("vllm-mlx")
    yield platform.python_version()
    yield _version("mlx")
    yield _version("mlx-lm")


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""
