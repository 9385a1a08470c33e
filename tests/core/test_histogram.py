"""Histograms: which bucket a value counts in, and how counts are added and told apart."""

from __future__ import annotations

import msgspec

from vllm_mlx.engine.core.histogram import Histogram, HistogramCounts


def test_a_bound_belongs_to_the_bucket_below_it() -> None:
    """As in Prometheus, whose buckets are `le`."""
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 9.0):
        histogram.observe(value)
    assert histogram.snapshot() == HistogramCounts(counts=(2, 2, 1), total=14.0)


def test_snapshots_are_told_apart_and_added() -> None:
    """What came between two snapshots, added elsewhere, makes the same counts there."""
    here, there = Histogram((1.0, 2.0)), Histogram((1.0, 2.0))
    seen = None
    for values in ((0.5, 1.5), (), (3.0,)):
        for value in values:
            here.observe(value)
        now = msgspec.convert(msgspec.to_builtins(here.snapshot()), HistogramCounts)
        there.add(now.since(seen))
        seen = now
    assert there.snapshot() == here.snapshot()
