"""Hold the command to its exit codes, its outputs, and what it says, against a scripted server."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree

import pytest

if TYPE_CHECKING:
    from tests.bench.conftest import BenchCli, StartServer

#: A machine that is busy must not make a gate unsure.
BY_MEANS = ("--confidence", "0")
QUICK = ("--concurrency", "2", "--num-requests", "8", "--repetitions", "2", "--max-tokens", "8")


def test_a_sweep_into_a_file(
    start_server: StartServer, bench_cli: BenchCli, tmp_path: Path
) -> None:
    """A sweep prints its table, tells its progress on stderr, and writes its rows."""
    url = start_server(ttft_s=0.005, gap_s=0.001, num_tokens=4)
    done = bench_cli(
        "--url", url, "--concurrency", "1,3", "--num-requests", "6", "--repetitions", "2",
        "-o", "results.json", "--raw", "--tag", "nightly", "--slo", "ttft=1s",
    )  # fmt: skip
    assert (done.returncode, done.stderr.count(" of 6 ok")) == (0, 4)
    assert [line.split()[:3] for line in done.stdout.splitlines() if "short" in line] == [
        ["short", "c=1", "2"],
        ["short", "c=3", "2"],
    ]
    content = json.loads((tmp_path / "results.json").read_text())
    assert [(row["concurrency"], row["repetition"]) for row in content["rows"]] == [
        (1, 1), (3, 1), (1, 2), (3, 2)
    ]  # fmt: skip
    assert len(content["requests"]) == 24
    row = content["rows"][0]
    assert (row["model"], row["tag"], row["url"], row["slo"]) == (
        "scripted", "nightly", url, {"ttft": 1}
    )  # fmt: skip
    assert row["command"].startswith("vllm-mlx bench-serve --url http://127.0.0.1:")
    assert row["server_is_local"] is True
    # Probe and warm-up are not in it: the counters were read around the repetition.
    assert (row["server_completion_tokens"], row["server_metrics"]) == (24, {"tokens_total": 24})
    assert row["client_us_per_event"] > 0
    assert row["client_lag_max"] >= 0
    for name in ("chip", "cpu_cores", "memory_gb", "os", "client_version"):
        assert row[name]


@pytest.mark.parametrize("file_format", ["json", "jsonl", "csv", "markdown", "table"])
def test_data_on_stdout(start_server: StartServer, bench_cli: BenchCli, file_format: str) -> None:
    """Without a file stdout carries the data alone, in the format that was asked for."""
    done = bench_cli("--url", start_server(num_tokens=2), *QUICK, "--format", file_format)
    assert done.returncode == 0
    if file_format == "json":
        assert len(json.loads(done.stdout)["rows"]) == 2
    elif file_format == "jsonl":
        assert [json.loads(line)["repetition"] for line in done.stdout.splitlines()] == [1, 2]
    else:
        start = {"csv": "schema_version,", "markdown": "## bench-serve", "table": ""}[file_format]
        assert done.stdout.startswith(start)


@pytest.mark.parametrize("endpoint", ["chat", "completions", "messages", "responses"])
@pytest.mark.parametrize("stream", ["--stream", "--no-stream"])
def test_every_endpoint_over_sockets(
    start_server: StartServer, bench_cli: BenchCli, endpoint: str, stream: str
) -> None:
    """Each endpoint is measured with its key, streamed and whole."""
    url = start_server(num_tokens=3, api_key="secret-key")
    done = bench_cli(
        "--url", url, *QUICK, "--endpoint", endpoint, stream, "--format", "json",
        "--api-key", "secret-key", "--assert", "failures==0", "--assert", "completed==16",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "secret-key" not in done.stdout + done.stderr
    row = json.loads(done.stdout)["rows"][0]
    assert (row["endpoint"], row["stream"]) == (endpoint, stream == "--stream")
    assert (row["ttft_p50"] is None) == (stream == "--no-stream")
    assert "--api-key ***" in row["command"]


def test_gates_decide_the_exit_code(
    start_server: StartServer, bench_cli: BenchCli, tmp_path: Path
) -> None:
    """A failed gate exits 1, says by how much, and still writes everything."""
    url = start_server(ttft_s=0.02, num_tokens=2)
    done = bench_cli(
        "--url", url, *QUICK, "--assert", "ttft_p50<1ms", "--assert", "failures==0",
        "--junit", "gates.xml", "--summary", "summary.md", "-o", "r.csv", *BY_MEANS,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "1 of 2 gates failed."
    gate = next(line for line in done.stdout.splitlines() if "ttft_p50<1ms" in line)
    assert gate.split()[0] == "FAIL"
    assert "off by" in gate
    suite = ElementTree.parse(tmp_path / "gates.xml").getroot()
    assert (suite.get("tests"), suite.get("failures")) == ("2", "1")
    assert "### Gates: 1 of 2 failed" in (tmp_path / "summary.md").read_text()
    assert (tmp_path / "r.csv").exists()


def test_a_baseline_of_the_same_kind(
    start_server: StartServer, bench_cli: BenchCli, tmp_path: Path
) -> None:
    """A slower server fails against its baseline; an equal one passes."""
    common = (*QUICK, "--baseline", "base.json", "--max-regression", "ttft_p50=300%", *BY_MEANS)
    fast = start_server(ttft_s=0.05, num_tokens=2)
    assert bench_cli("--url", fast, *QUICK, "-o", "base.json").returncode == 0
    assert bench_cli("--url", fast, *common).returncode == 0
    slow = start_server(ttft_s=0.5, num_tokens=2)
    done = bench_cli("--url", slow, *common)
    assert done.returncode == 1
    assert "worse than" in done.stdout


def test_a_baseline_from_elsewhere(
    start_server: StartServer, bench_cli: BenchCli, tmp_path: Path
) -> None:
    """A baseline of another machine or model is refused unless it is forced."""
    url = start_server(num_tokens=2)
    bench_cli("--url", url, *QUICK, "-o", "base.json")
    content = json.loads((tmp_path / "base.json").read_text())
    for row in content["rows"]:
        row["chip"], row["model"] = "Another Chip", "another"
    (tmp_path / "base.json").write_text(json.dumps(content))
    common = ("--url", url, *QUICK, "--baseline", "base.json", "--max-regression", "failures=0%")
    done = bench_cli(*common)
    assert done.returncode == 2
    assert "model was another, is scripted; chip was Another Chip" in done.stderr
    assert bench_cli(*common, "--force-baseline").returncode == 0


def test_a_baseline_without_this_configuration(
    start_server: StartServer, bench_cli: BenchCli
) -> None:
    """A configuration that the baseline lacks is a usage error, not a gate that passes unseen."""
    url = start_server(num_tokens=2)
    bench_cli("--url", url, *QUICK, "-o", "base.json")
    done = bench_cli(
        "--url", url, "--concurrency", "3", "--max-tokens", "8",
        "--baseline", "base.json", "--max-regression", "ttft_p50=10%",
    )  # fmt: skip
    assert done.returncode == 2
    assert "no row of the configuration 'short c=3'" in done.stderr


COULD_NOT_MEASURE = {
    "key": ({"api_key": "k"}, (), "refuses the key: wrong API key"),
    "model": ({}, ("--model", "other"), "no model other"),
    "loading": ({"num_refusals": 99}, ("--wait", "0.6"), "the model is loading after 0.6 s"),
    "failures": ({"fails_every": 2}, ("--min-success", "0.9"), "fewer than --min-success 0.9"),
}


@pytest.mark.parametrize("name", COULD_NOT_MEASURE)
def test_what_could_not_be_measured(
    start_server: StartServer, bench_cli: BenchCli, name: str
) -> None:
    """A refused key, an unknown model, a server that stays away or fails: exit 5, and why."""
    script, options, message = COULD_NOT_MEASURE[name]
    done = bench_cli("--url", start_server(num_tokens=2, **script), *QUICK, *options)
    assert done.returncode == 5
    assert message in done.stderr


def test_nobody_is_there(bench_cli: BenchCli) -> None:
    """An address where nobody listens exits 5 at once and says what helps."""
    done = bench_cli("--url", "http://127.0.0.1:9", *QUICK)
    assert done.returncode == 5
    assert "Connection refused; --wait SECONDS waits for it" in done.stderr
    assert done.stdout == ""


def test_waiting_for_a_server(start_server: StartServer, bench_cli: BenchCli) -> None:
    """With --wait a server that is loading is waited for."""
    url = start_server(num_tokens=2, num_refusals=2)
    done = bench_cli("--url", url, *QUICK, "--wait", "30")
    assert done.returncode == 0
    assert done.stderr.count("waiting: the model is loading") == 1


def test_several_models(start_server: StartServer, bench_cli: BenchCli) -> None:
    """A server with several models needs to be told which."""
    url = start_server(num_tokens=2, models=["a", "b"])
    done = bench_cli("--url", url, *QUICK)
    assert done.returncode == 2
    assert "choose with --model: a, b" in done.stderr
    assert bench_cli("--url", url, *QUICK, "--model", "b").returncode == 0


def test_a_server_that_lists_no_models(start_server: StartServer, bench_cli: BenchCli) -> None:
    """A server without a list of models is measured by the name that is given, or by `default`."""
    url = start_server(num_tokens=2, lists_models=False, models=["default", "named"])
    assert bench_cli("--url", url, *QUICK).returncode == 0
    done = bench_cli("--url", url, *QUICK, "--model", "named", "--format", "json")
    assert json.loads(done.stdout)["rows"][0]["model"] == "named"


def test_failures_below_the_limit_are_kept(start_server: StartServer, bench_cli: BenchCli) -> None:
    """Some failures are part of a measurement; a gate on them fails it."""
    url = start_server(num_tokens=2, fails_every=4)
    done = bench_cli("--url", url, *QUICK, "--format", "json", "--assert", "failures==0")
    assert done.returncode == 1
    rows = json.loads(done.stdout)["rows"]
    assert {row["failures"] for row in rows} <= {1, 2, 3}
    assert list(rows[0]["failures_by_kind"]) == ["http_500"]


USAGE = [
    (("--baseline", "x.json"), "does not exist"),
    (("--max-regression", "ttft_p50=1%"), "need each other"),
    (("--force-baseline",), "--force-baseline needs --baseline"),
    (("--assert", "ttft<1"), "there is no measure 'ttft'"),
    (("--assert", "ttft_p50[concurrency=9]<1"), "applies to no configuration"),
    (("--slo", "speed=1"), "give one of ttft"),
    (("--prompts", "nowhere.txt"), "there are no prompts 'nowhere.txt'"),
    (("--workload", "nowhere"), "there is no workload 'nowhere'"),
    (("--prompts", "short", "--prompt-tokens", "9"), "exclude each other"),
    (("--max-tokens", "9", "--output-tokens", "9"), "exclude each other"),
    (("--workload", "chat", "--turns", "2"), "leave out --turns"),
    (("--turns", "2", "--endpoint", "completions"), "takes messages"),
    (("--burstiness", "2"), "--burstiness needs --request-rate"),
    (("--request-rate", "1", "--arrival", "constant", "--burstiness", "2"), "for --arrival"),
    (("--concurrency", "0"), "0 is not in the range"),
    (("--concurrency", ","), "give at least one value"),
    (("--extra-body", "[1]"), "not a JSON object"),
    (("--url", "ftp://x"), "is not a server's address"),
    (("--prompt-tokens", "50", "--shared-prefix-tokens", "50"), "leaves nothing of a prompt"),
    (("--prompt-tokens", "50", "--cache-mode", "prefix-hit"), "needs --shared-prefix-tokens"),
    (("--raw",), "--raw needs a csv"),
    (("--raw", "--format", "csv"), "writes two files"),
    (("--format", "sqlite"), "needs --output"),
    (("-o", "r.xlsx"), "name the format"),
    (("-o", "no/such/r.csv"), "there is no folder"),
    (("--plot", "figure.gif"), "a file ends in .png"),
    (("--plot", "-", "--format", "json"), "would mix with the data"),
    (("--temperature", "1", "--server-temperature"), "exclude each other"),
    (("--num-requests", "3", "compare", "a", "b"), "before 'compare' has no effect"),
]


@pytest.mark.parametrize(("options", "message"), USAGE, ids=lambda value: " ".join(value)[:40])
def test_usage_errors_come_before_any_request(
    bench_cli: BenchCli, options: tuple[str, ...], message: str
) -> None:
    """What is wrong with the command line exits 2 without a server."""
    done = bench_cli("--url", "http://127.0.0.1:9", *options)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["Ctrl-C", "SIGTERM"]
)
def test_an_interrupt_keeps_what_was_measured(
    start_server: StartServer, tmp_path: Path, number: int, code: int
) -> None:
    """What ended before Ctrl-C is written, marked as partial, and said so."""
    url = start_server(ttft_s=0.05, num_tokens=2)
    process = subprocess.Popen(
        [sys.executable, "-m", "vllm_mlx.cli", "bench-serve", "--url", url, "--concurrency", "2",
         "--num-requests", "400", "--repetitions", "1", "-o", "r.json", "--raw",
         "--assert", "failures==0"],
        stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=tmp_path,
    )  # fmt: skip
    wait_for_requests(url, 20)
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert process.returncode == code, err
    assert "Interrupted: 1 rows were kept, no gate was judged." in err
    content = json.loads((tmp_path / "r.json").read_text())
    (row,) = content["rows"]
    assert row["is_partial"] is True
    assert 10 < row["completed"] == len(content["requests"]) < 400
    assert "short c=2" in out


def test_a_terminal_shows_one_line_that_changes(start_server: StartServer, tmp_path: Path) -> None:
    """In a terminal progress rewrites its line, and stdout stays free of it."""
    url = start_server(ttft_s=0.4, num_tokens=2)
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "vllm_mlx.cli", "bench-serve", "--url", url, "--concurrency", "1",
         "--num-requests", "6", "--repetitions", "1", "--format", "jsonl"],
        stderr=theirs, stdout=subprocess.PIPE, text=True, cwd=tmp_path,
    )  # fmt: skip
    os.close(theirs)
    out, _ = process.communicate(timeout=60)
    shown = b""
    # The end of a terminal whose program has ended is an error on Linux, and empty elsewhere.
    with contextlib.suppress(OSError):
        while block := os.read(ours, 65536):
            shown += block
    os.close(ours)
    assert process.returncode == 0
    assert len(out.splitlines()) == 1
    assert b"\r\x1b[2Kshort c=1, repetition 1: 1 of 6 requests\r\x1b[2K" in shown
    assert b": 6 of 6 ok" in shown.partition(b"\n")[0]


def wait_for_requests(url: str, num: int) -> None:
    """Wait until a scripted server has streamed so many answers."""
    import urllib.request

    seen = 0
    deadline = time.monotonic() + 30
    while seen < num:
        assert time.monotonic() < deadline
        time.sleep(0.05)
        with urllib.request.urlopen(f"{url}/_log") as response:
            seen += len(json.load(response))


def test_an_interrupt_before_anything(start_server: StartServer, tmp_path: Path) -> None:
    """Ctrl-C before any answer ends with 130 and writes nothing."""
    url = start_server(num_refusals=10**6)
    process = subprocess.Popen(
        [sys.executable, "-m", "vllm_mlx.cli", "bench-serve", "--url", url, "--wait", "100",
         "-o", "r.json"],
        stderr=subprocess.PIPE, text=True, cwd=tmp_path,
    )  # fmt: skip
    assert process.stderr is not None
    assert "waiting" in process.stderr.readline()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "nothing was measured yet" in err
    assert not (tmp_path / "r.json").exists()


def test_rows_before_a_failing_server_are_kept(
    start_server: StartServer, bench_cli: BenchCli, tmp_path: Path
) -> None:
    """When a later repetition cannot be measured, the rows until then are written; exit 5."""
    url = start_server(num_tokens=2, dies_after=12)
    done = bench_cli(
        "--url", url, "--concurrency", "1", "--num-requests", "8", "--repetitions", "3",
        "--warmup", "0", "-o", "r.json",
    )  # fmt: skip
    assert done.returncode == 5
    assert "rows were kept, no gate was judged." in done.stderr
    rows = json.loads((tmp_path / "r.json").read_text())["rows"]
    assert rows[0]["failures"] == 0
    assert rows[-1]["failures"] > 0


def test_comparing_files(start_server: StartServer, bench_cli: BenchCli, tmp_path: Path) -> None:
    """Runs stand side by side, whatever the formats; a regression exits 1."""
    for name, ttft in (("fast.json", 0.02), ("slow.csv", 0.08), ("same.db", 0.02)):
        url = start_server(ttft_s=ttft, num_tokens=2)
        assert bench_cli("--url", url, *QUICK, "-o", name).returncode == 0
    done = bench_cli("compare", "fast.json", "slow.csv", "same.db", "--measures", "ttft_p50")
    assert done.returncode == 0
    line = next(line for line in done.stdout.splitlines() if "ttft_p50" in line)
    assert "worse" in line
    done = bench_cli("compare", "fast.json", "slow.csv", "--format", "json", *BY_MEANS)
    rows = {row["measure"]: row for row in json.loads(done.stdout)}
    assert rows["ttft_p50"]["change"] < -1
    assert rows["ttft_p50"]["is_sure"] is True
    assert rows["failures"]["change"] == 0
    done = bench_cli("compare", "fast.json", "slow.csv", "--max-regression", "ttft_p50=50%",
                     "--format", "markdown", *BY_MEANS)  # fmt: skip
    assert done.returncode == 1
    assert "| FAIL | short c=2 |" in done.stdout
    assert bench_cli("compare", "fast.json").returncode == 2
    assert bench_cli("compare", "fast.json", "slow.csv", "--measures", "speed").returncode == 2


def test_reporting_files(start_server: StartServer, bench_cli: BenchCli, tmp_path: Path) -> None:
    """Runs are merged into one table, one file and one figure; a run counts once."""
    url = start_server(ttft_s=0.002, gap_s=0.001, num_tokens=3)
    for name in ("one.json", "two.csv"):
        assert bench_cli("--url", url, *QUICK, "-o", name, "--raw").returncode == 0
    done = bench_cli(
        "report", "one.json", "two.csv", "one.json", "-o", "all.jsonl", "--plot", "f.svg"
    )
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if "short" in line]
    assert line.split()[:3] == ["short", "c=2", "4"]
    assert len((tmp_path / "all.jsonl").read_text().splitlines()) == 4
    assert len((tmp_path / "all.requests.jsonl").read_text().splitlines()) == 32
    assert (tmp_path / "f.svg").read_text().lstrip().startswith("<?xml")
    done = bench_cli("report", "all.jsonl", "--format", "markdown", "-o", "all.md")
    assert done.stdout.startswith("| configuration |")
    assert (tmp_path / "all.md").read_text().startswith("## bench-serve: scripted")


def test_figures(start_server: StartServer, bench_cli: BenchCli, tmp_path: Path) -> None:
    """Figures are drawn into files and into the terminal."""
    url = start_server(ttft_s=0.002, gap_s=0.001, num_tokens=3)
    options = ("--url", url, "--concurrency", "1,2,4", "--num-requests", "8", "--repetitions", "1")
    assert bench_cli(*options, "--plot", "f.png").returncode == 0
    assert (tmp_path / "f.png").read_bytes().startswith(b"\x89PNG")
    done = bench_cli(*options, "--plot", "-")
    assert done.returncode == 0, done.stderr
    assert "Throughput" in done.stdout
    assert "share of requests, %" in done.stdout
    assert "\x1b[" not in done.stdout
