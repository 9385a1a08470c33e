"""Hold docs/metrics.md and the dashboard to the metrics that the code has."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from vllm_mlx.server.metrics import ServerMetrics
from vllm_mlx.server.metrics_catalog import CATALOG, PREFIX
from vllm_mlx.server.metrics_page import page

ROOT = Path(__file__).resolve().parents[2]

METRICS = {PREFIX + metric.name: metric for group in CATALOG.values() for metric in group}


def families() -> dict[str, str]:
    """Return the kinds of all metrics of a server, by name as Prometheus stores them."""
    text = ServerMetrics("m").page("")[0].decode()
    return {
        family.name + "_total" * (family.type == "counter"): family.type
        for family in text_string_to_metric_families(text)
    }


def test_the_page_is_up_to_date_and_leaves_nothing_out() -> None:
    """What a server exposes is what the page lists: name, kind and labels."""
    text = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert text == page(), "run python -m vllm_mlx.server.metrics_page --write"
    listed = dict(re.findall(rf"^\| `({PREFIX}\w+)` \| (\w+) \|", text, re.MULTILINE))
    assert listed == families() == {name: metric.kind for name, metric in METRICS.items()}


def test_queries_on_the_page_use_what_there_is() -> None:
    """Names in the page's prose and queries are metrics of the list, or a histogram's series."""
    assert unknown_names(page().partition("## Requests")[0]) == set()


def test_the_dashboard_uses_only_metrics_and_labels_that_exist() -> None:
    """Every name is a metric's, and every label of a query one that its metric has."""
    dashboard = json.loads((ROOT / "docs" / "grafana-dashboard.json").read_text(encoding="utf-8"))
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    assert len(queries) > 30
    variables = [entry["query"] for entry in dashboard["templating"]["list"]]
    assert unknown_names(json.dumps([queries, variables])) == set()
    for query in queries:
        selectors = re.findall(rf"{PREFIX}(\w+)\{{(.*?)\}}", query)
        assert selectors, query
        for name, selector in selectors:
            assert set(re.findall(r"(\w+)[=!]", selector)) <= labels_of(name), query
        used = re.findall(r"by \((.*?)\)", query)
        known = set.union(*(labels_of(name) for name, _ in selectors))
        assert {label for group in used for label in group.split(", ")} <= known, query


def test_prometheus_understands_every_query(tmp_path: Path) -> None:
    """Its own checker parses the queries of the dashboard and of the page."""
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is missing: apt-get install prometheus")
    dashboard = json.loads((ROOT / "docs" / "grafana-dashboard.json").read_text(encoding="utf-8"))
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    prose = page().partition("## Useful queries")[2].partition("\n## ")[0]
    queries += re.findall(r"`([^`]+)`", prose)
    known = {"$__rate_interval": "5m", "$model": ".*"}
    rules = [
        {"record": f"query:{number}", "expr": _filled(query, known)}
        for number, query in enumerate(queries)
    ]
    file = tmp_path / "rules.json"
    # JSON is YAML, too.
    file.write_text(json.dumps({"groups": [{"name": "queries", "rules": rules}]}))
    command = [promtool, "check", "rules", "--lint=none", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, f"{len(rules)} rules found" in done.stdout) == (0, True), done.stderr


def _filled(query: str, known: dict[str, str]) -> str:
    for name, value in known.items():
        query = query.replace(name, value)
    assert "$" not in query
    return query


def labels_of(name: str) -> set[str]:
    """Return the labels of a series."""
    metric = METRICS[PREFIX + base_of(name)]
    return {"model", *metric.labels} | ({"le"} if name.endswith("_bucket") else set())


def base_of(name: str) -> str:
    """Return the metric that a series belongs to."""
    base = re.sub(r"_(bucket|sum|count)$", "", name)
    is_series = PREFIX + base in METRICS and METRICS[PREFIX + base].kind == "histogram"
    return base if is_series else name


def unknown_names(text: str) -> set[str]:
    """Return the names in `text` that begin like a metric's and are none's."""
    names = set(re.findall(rf"{PREFIX}(\w+)", text))
    return {name for name in names if PREFIX + base_of(name) not in METRICS}
