"""Hold docs/benchmarking.md to the code: its columns, checks and options, and its scripts run."""

from __future__ import annotations

import json
import os
import re
import socket
import stat
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from vllm_mlx.bench.checks import CHECK_TYPES
from vllm_mlx.bench.column_page import replaced
from vllm_mlx.bench.workload import parse_workload
from vllm_mlx.cli.main import cli

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "benchmarking.md").read_text()


def blocks(language: str) -> list[str]:
    """Return the page's code blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def test_columns_are_listed() -> None:
    """The page's list of columns is the code's."""
    assert replaced(PAGE) == PAGE, "run python -m vllm_mlx.bench.column_page"


def test_checks_are_listed() -> None:
    """Every check of a workload is explained."""
    assert [name for name in CHECK_TYPES if f"`{name}`" not in PAGE] == []


def test_options_on_the_page_exist() -> None:
    """Every option that the page names is one of the command's."""
    command = cli.get_command(click.Context(cli), "bench-serve")
    assert isinstance(command, click.Group)
    known = {
        flag
        for one in [command, *command.commands.values()]
        for parameter in one.params
        for flag in (*parameter.opts, *parameter.secondary_opts)
    }
    # Those of the other programs in its examples.
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", PAGE)) - {"--port"}
    assert sorted(named - known) == []


def test_the_workload_example_is_one() -> None:
    """The example of a workload is read without complaint."""
    (example,) = blocks("json")
    assert len(parse_workload(json.loads(example), "example", Path()).cases) == 2


@pytest.fixture
def stand_ins(tmp_path: Path) -> dict[str, str]:
    """Give an environment in which servers are scripted and nothing is installed.

    `vllm-mlx serve`, `mlx_lm.server` and an existing `vllm-mlx serve` become a scripted server;
    `vllm-mlx bench-serve` is the real one.
    """
    programs = tmp_path / "bin"
    script = json.dumps(
        {"ttft_s": 0.01, "gap_s": 0.002, "models": ["demo"], "takes_any_model": True, "port": 0}
    )
    server = ROOT / "tests" / "support" / "scripted_server.py"
    serve = f"""
        port=8000
        while (($#)); do [[ $1 == --port ]] && port=$2; shift; done
        export PYTHONPATH={ROOT / "tests"}
        script='{script}'
        exec {sys.executable} {server} "${{script/'"port": 0'/'"port": '$port}}"
    """
    real = f'[[ $1 == serve ]] || exec {sys.executable} -m vllm_mlx.cli "$@"\n{serve}'
    for name, body in (
        ("vllm-mlx", real),
        ("mlx_lm.server", serve),
        ("pip", f'echo "$@" >> {tmp_path / "installed"}'),
        ("existing/bin/vllm-mlx", serve),
    ):
        path = programs / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/usr/bin/env bash\n{textwrap.dedent(body)}")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return {
        **os.environ,
        "PATH": f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "EXISTING": str(programs / "existing"),
        "GITHUB_STEP_SUMMARY": str(tmp_path / "summary.md"),
        "OPENBLAS": "",
    }


def run(script: str, folder: Path, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a script as GitHub does a step."""
    return subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", script],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def steps() -> dict[str, str]:
    """Return the scripts of the workflow's steps by name."""
    (workflow,) = blocks("yaml")
    # YAML reads the key `on` as a truth.
    job: dict[str, Any] = yaml.safe_load(workflow)["jobs"]["bench"]
    return {step["name"]: step["run"] for step in job["steps"] if "run" in step}


@pytest.mark.thorough
def test_the_workflow_runs(tmp_path: Path, stand_ins: dict[str, str]) -> None:
    """Every step of the workflow runs, first without and then against its own baseline."""
    scripts = steps()
    port = free_port()
    for round_number in range(2):
        for name in ("Install", "Serve", "Measure", "Stop", "Keep as baseline"):
            done = run(scripts[name].replace("8123", str(port)), tmp_path, stand_ins)
            assert done.returncode == 0, (name, done.stdout, done.stderr)
            if name == "Measure":
                gates = done.stdout.count("ttft_p50 at most 10% worse")
                assert gates == (2 if round_number else 0)
    assert (tmp_path / "installed").read_text() == "install .\n" * 2
    assert (tmp_path / "summary.md").read_text().count("## bench-serve: demo") == 2
    assert (tmp_path / "gates.xml").is_file()


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.thorough
def test_the_sweep_runs(tmp_path: Path, stand_ins: dict[str, str]) -> None:
    """The sweep fills its database, its page and its figure."""
    (script,) = blocks("bash")
    port = free_port()
    server = subprocess.Popen(
        ["vllm-mlx", "serve", "demo", "--port", str(port)], env=stand_ins, stdout=subprocess.PIPE
    )
    try:
        url = f"set -- http://127.0.0.1:{port}\n"
        done = run(url + script.replace("--repetitions 2", "--repetitions 1"), tmp_path, stand_ins)
    finally:
        server.terminate()
        server.communicate()
    assert done.returncode == 0, done.stderr
    table = (tmp_path / "sweep.md").read_text().splitlines()
    assert len(table) == 2 + 2 * 2
    assert (tmp_path / "sweep.svg").is_file()


@pytest.mark.performance
def test_the_comparison_of_servers_runs(tmp_path: Path, stand_ins: dict[str, str]) -> None:
    """The script of docs/benchmarks measures servers and puts them side by side."""
    env = {
        **stand_ins,
        "PORT": str(free_port()),
        "CONCURRENCY": "1",
        "REPETITIONS": "1",
        "REQUESTS": "2",
        "PROMPT_TOKENS": "64",
        "SHARED_TOKENS": "32",
        "OUTPUT_TOKENS": "4",
        "LONG_PROMPT_TOKENS": "300",
        "STREAM_TOKENS": "1200",
        "STREAM_LEAD": "1",
    }
    script = f"{ROOT}/docs/benchmarks/serving.sh MODEL results mlx-lm existing"
    done = run(script, tmp_path, env)
    assert done.returncode == 0, (done.stdout, done.stderr)
    assert "| tokens 64 in 4 out 32 shared c=1 cold | ttft_p50 ms |" in done.stdout
    assert done.stdout.count("a stream beside a prompt of") == 2
    assert "did not overlap" not in done.stdout
    results = sorted(path.name for path in (tmp_path / "results").glob("*.json"))
    assert len(results) == 6
