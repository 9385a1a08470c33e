"""Hold the result files: their columns, their formats, and that other tools load them."""

from __future__ import annotations

import json
import shutil
import sqlite3
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

import pandas as pd
import pytest
from support.scripted_server import Script

from vllm_mlx.bench.columns import (
    CASE_COLUMNS,
    CONFIGURATION_COLUMNS,
    MEASURES,
    REQUEST_COLUMNS,
    ROW_COLUMNS,
    SCHEMA_VERSION,
)
from vllm_mlx.bench.configuration import Configuration, key_of, label_of
from vllm_mlx.bench.gates import GateResult
from vllm_mlx.bench.metrics import Slo
from vllm_mlx.bench.output.files import (
    csv_text,
    format_of,
    json_lines,
    read_requests,
    read_rows,
    tables_of,
    write_results,
)
from vllm_mlx.bench.output.reports import junit_text, summary_text
from vllm_mlx.bench.output.shown import gates_overview, markdown, number, overview
from vllm_mlx.bench.output.tables import TABLE_COLUMNS
from vllm_mlx.engine.errors import UsageError

if TYPE_CHECKING:
    from tests.bench.conftest import RunBench
    from vllm_mlx.bench.results import Results

GOLDEN = Path(__file__).parent / "columns.txt"


def column_listing() -> str:
    """Return every column of every table with what a reader may rely on."""
    lines = [f"schema version {SCHEMA_VERSION}"]
    for table, columns in TABLE_COLUMNS.items():
        lines += ["", table]
        lines += [
            " ".join(filter(None, (c.name, c.kind, c.unit, c.better, c.pooling))) for c in columns
        ]
    return "\n".join(lines) + "\n"


def test_columns_are_pinned() -> None:
    """Columns keep names, order, types and units; a change needs a new version and this file."""
    assert column_listing() == GOLDEN.read_text()


def test_columns_are_sound() -> None:
    """No table names a column twice, and configurations have exactly their columns."""
    for columns in (ROW_COLUMNS, REQUEST_COLUMNS, CASE_COLUMNS):
        names = [column.name for column in columns]
        assert len(set(names)) == len(names)
        assert all(column.meaning for column in columns)
    fields = list(Configuration.__dataclass_fields__)
    assert sorted(fields) == sorted(column.name for column in CONFIGURATION_COLUMNS)
    assert {"ttft_p95", "output_tps", "failures", "goodput"} <= MEASURES.keys()


@pytest.fixture
def results(run_bench: RunBench, tmp_path: Path) -> Results:
    """Return a run with a workload, failures, an SLO and requests."""
    script = Script(ttft_s=0.25, gap_s=0.125, num_tokens=4, fails_every=5)
    workload = {
        "name": "w",
        "cases": [{"id": "a|b", "messages": [{"role": "user", "content": "hi"}]}] * 1,
    }
    path = tmp_path / "w.json"
    path.write_text(json.dumps(workload))
    slo = Slo.parse("ttft=500")
    found = run_bench(
        script, slo=slo, concurrencies=(1, 2), num_requests=6, repetitions=2, tag='x, "y"'
    )
    found.cases = run_bench(Script(num_tokens=2), workload=str(path), concurrencies=(1,)).cases
    return found


SUFFIXES = ["csv", "json", "jsonl", "db"]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_files_give_back_their_rows(results: Results, tmp_path: Path, suffix: str) -> None:
    """Every format gives back rows and requests as they were measured, types included."""
    path = tmp_path / f"results.{suffix}"
    tables = tables_of(results, with_requests=True)
    write_results(path, format_of(path, "auto"), tables, results.notes)
    for found, expected in (
        (read_rows(path), results.rows),
        (read_requests(path), results.requests),
    ):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert list(one) == list(other)
            for name in one:
                assert (
                    one[name] == pytest.approx(other[name])
                    if _is_number(other[name])
                    else (one[name] == other[name])
                )
    assert [key_of(row) for row in read_rows(path)] == [key_of(row) for row in results.rows]
    assert [label_of(row) for row in read_rows(path)] == [
        row["configuration"] for row in results.rows
    ]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def test_pandas_loads_the_files(results: Results, tmp_path: Path) -> None:
    """The lines of the documentation load each format into a table of numbers."""
    tables = tables_of(results, with_requests=True)
    for suffix in SUFFIXES:
        path = tmp_path / f"results.{suffix}"
        write_results(path, format_of(path, "auto"), tables, [])
    with sqlite3.connect(tmp_path / "results.db") as connection:
        from_database = pd.read_sql("SELECT * FROM bench_serve", connection)
        cases = pd.read_sql("SELECT * FROM bench_serve_workload", connection)
    connection.close()
    frames = [
        pd.read_csv(tmp_path / "results.csv"),
        pd.DataFrame(json.loads((tmp_path / "results.json").read_text())["rows"]),
        pd.read_json(tmp_path / "results.jsonl", lines=True),
        from_database,
    ]
    expected = [row["ttft_p50"] for row in results.rows]
    for frame in frames:
        assert list(frame.columns) == [column.name for column in ROW_COLUMNS]
        assert frame["ttft_p50"].tolist() == pytest.approx(expected)
        assert frame.groupby("concurrency")["failures"].sum().to_dict() == {1: 2, 2: 2}
    assert cases["case_id"].tolist() == ["a|b"] * 3
    requests = pd.read_csv(tmp_path / "results.requests.csv")
    assert json.loads(requests["gaps"].iloc[0]) == [125.0] * 3


def test_sqlite_counts_and_appends(results: Results, tmp_path: Path) -> None:
    """A database takes another run, keeps its types, and knows its version."""
    path = tmp_path / "results.db"
    for _ in range(2):
        write_results(path, "sqlite", tables_of(results, with_requests=False), [])
    connection = sqlite3.connect(path)
    count, kind = connection.execute(
        "SELECT count(*), typeof(ttft_p50) FROM bench_serve"
    ).fetchone()
    assert (count, kind) == (2 * len(results.rows), "real")
    assert connection.execute("PRAGMA user_version").fetchone() == (SCHEMA_VERSION,)
    missing = connection.execute("SELECT count(*) FROM bench_serve WHERE gpu IS NULL").fetchone()
    assert missing == (count,)
    connection.execute("PRAGMA user_version = 99")
    connection.close()
    with pytest.raises(UsageError, match="schema version 99"):
        write_results(path, "sqlite", tables_of(results, with_requests=False), [])


@pytest.mark.skipif(shutil.which("jq") is None, reason="jq is not installed")
def test_jq_reads_the_files(results: Results, tmp_path: Path) -> None:
    """The filters of the documentation find rows in JSON and in JSON Lines."""
    tables = tables_of(results, with_requests=False)
    write_results(tmp_path / "r.json", "json", tables, [])
    write_results(tmp_path / "r.jsonl", "jsonl", tables, [])
    for name, query in (("r.json", ".rows[] | .ttft_p50"), ("r.jsonl", ".ttft_p50")):
        done = subprocess.run(
            ["jq", query, str(tmp_path / name)], capture_output=True, text=True, check=True
        )
        assert [float(line) for line in done.stdout.split()] == pytest.approx(
            [row["ttft_p50"] for row in results.rows]
        )


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("r.json", "{}", "its kind is not"),
        ("r.json", "[", "is not a result file"),
        ("r.csv", "a,b\n1,2\n", "has schema version None"),
        ("r.jsonl", '{"schema_version": 7}\n', "has schema version 7, this build reads 1"),
        ("r.db", "no database", "is not a result file"),
        ("r.md", "", "are read from"),
        ("r.xlsx", "", "name the format"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, name: str, text: str, complaint: str) -> None:
    """What this tool did not write, or another version of it, is refused."""
    (tmp_path / name).write_text(text)
    with pytest.raises(UsageError, match=complaint):
        read_rows(tmp_path / name)


def test_a_file_is_replaced_whole(results: Results, tmp_path: Path) -> None:
    """A failed write leaves the old file, and nothing beside it."""
    path = tmp_path / "out" / "r.json"
    path.parent.mkdir()
    path.write_text("old")
    results.rows[0]["ttft_p50"] = float("nan")
    with pytest.raises(ValueError):
        write_results(path, "json", tables_of(results, with_requests=False), [])
    assert path.read_text() == "old"
    assert list(path.parent.iterdir()) == [path]


GATES = [
    GateResult("s c=1", "ttft_p50<1", "ttft_p50", "pass", 0.5, 0.1, 1.0, ""),
    GateResult("s c=4", "a & <b>", "ttft_p50", "fail", 2.0, None, 1.0, "off by 1 (100.0%)"),
    GateResult("s c=4", "u", "ttft_p50", "unsure", 2.0, 3.0, 1.0, "off by 1, within the noise"),
]


def test_junit_counts_gates_and_cases(results: Results) -> None:
    """A JUnit file has a case for each gate and each case of a workload, and counts failures."""
    results.cases[0]["quality_ok"] = False
    results.cases[0]["quality_issues"] = ["nothing matches /x/"]
    suite = ElementTree.fromstring(junit_text(GATES, results.cases).encode())
    assert (suite.get("tests"), suite.get("failures")) == ("6", "2")
    messages = [failure.get("message") for failure in suite.iter("failure")]
    assert messages == ["measured 2, limit 1: off by 1 (100.0%)", "nothing matches /x/"]
    assert suite[1].get("name") == "a & <b>"


def test_summaries_are_tables(results: Results) -> None:
    """The summary names model and place, and every line of its tables has the same cells."""
    text = summary_text(results.rows, results.cases, GATES, ["a note"], 0.95)
    assert text.startswith("## bench-serve: scripted\n")
    assert "### Gates: 1 of 3 failed" in text
    assert "- a note" in text
    widths: dict[int, set[int]] = {}
    for number_of_table, block in enumerate(text.split("\n\n")):
        for line in block.splitlines():
            if line.startswith("|"):
                widths.setdefault(number_of_table, set()).add(line.replace("\\|", "").count("|"))
    assert len(widths) == 3
    assert all(len(found) == 1 for found in widths.values())


def test_failed_gates_come_first() -> None:
    """The table of gates begins with what failed, and says by how much."""
    lines = gates_overview(GATES).lines
    assert [line[0] for line in lines] == ["FAIL", "unsure", "pass"]
    assert lines[0][3:] == ("2", "1", "off by 1 (100.0%)")
    assert markdown(gates_overview(GATES)).count("\n") == 5


@pytest.mark.parametrize(
    ("value", "expected"),
    [(None, ""), (0, "0"), (3, "3"), (0.01234, "0.0123"), (12.34, "12.3"), (1234.5, "1234")],
)
def test_numbers_for_people(value: float | None, expected: str) -> None:
    """Numbers show as many digits as help."""
    assert number(value) == expected


def test_narrow_terminals_get_fewer_columns(results: Results) -> None:
    """What matters most stays, and nothing is cut off while columns can be left out."""
    wide = overview(results.rows, 0.95)
    assert wide.narrowed(1000) == wide
    narrow = wide.narrowed(80)
    assert narrow.width <= 80
    assert {"configuration", "failed", "ttft p50 ms", "out tok/s"} <= set(narrow.headings)
    assert {len(line) for line in narrow.lines} == {len(narrow.headings)}


def test_the_texts_for_stdout(results: Results) -> None:
    """CSV and JSON Lines on stdout have a line for each row."""
    assert csv_text(results.rows, "bench_serve").count("\n") == len(results.rows) + 1
    assert json_lines(results.rows).count("\n") == len(results.rows)
