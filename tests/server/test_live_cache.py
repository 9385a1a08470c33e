"""Prefixes from `warm` to a client's usage: real processes, a tiny model, the `openai` client."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from support.server_process import ServerProcess
from support.tiny_folder import write_tiny_folder

from vllm_mlx.cli.main import main

BLOCK = 64
SYSTEM = {"role": "system", "content": "You answer in one word, and never in two. " * 30}
OTHER = {"role": "system", "content": "You count sheep, one after the other. " * 30}


pytestmark = pytest.mark.thorough


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, demo_model_path: Path) -> Path:
    """Return the folder of a tiny model."""
    return write_tiny_folder(tmp_path_factory.mktemp("tiny"), demo_model_path)


def run(*args: str) -> tuple[int, Any]:
    """Run a command line in a process of its own; return the exit code and the JSON it printed."""
    command = [sys.executable, "-m", "vllm_mlx.cli", *args]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    return done.returncode, json.loads(done.stdout)


def usage(client: openai.OpenAI, *messages: Any) -> tuple[int, int]:
    """Ask once, greedily; return the prompt's tokens and how many of them were cached."""
    answer = client.chat.completions.create(
        model="default", messages=[*messages], max_tokens=2, temperature=0
    )
    assert answer.usage is not None
    details = answer.usage.prompt_tokens_details
    assert details is not None
    return answer.usage.prompt_tokens, details.cached_tokens or 0


def wait_until(condition: Callable[[], bool], timeout_s: float = 10) -> None:
    """Wait until `condition` holds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def user(content: str) -> dict[str, str]:
    """Return a user's message."""
    return {"role": "user", "content": content}


def test_from_cron_to_a_hit_and_back_to_a_miss(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Warmed, served from SSD, removed by request, warmed again, and found after a restart."""
    ssd, recorded, prompts = tmp_path / "ssd", tmp_path / "recorded", tmp_path / "prompts.json"
    prompts.write_text(json.dumps([[SYSTEM]]))
    job = ("warm", str(folder), "--prompts", str(prompts), "--ssd-cache-dir", str(ssd))
    assert main([*job, "--check"]) == 1
    assert ": 0 of " in capsys.readouterr().out
    code, counts = run(*job, "--json")
    assert (code, counts["stored"], counts["skipped"]) == (0, 1, 0)
    prefix = counts["computed_tokens"]
    assert prefix >= 4 * BLOCK
    # Nothing is missing any more: no model is loaded, and nothing is said.
    monkeypatch.setattr("vllm_mlx.cli.warm_engine.load_prefix_engine", None)
    assert main([*job]) == 0
    assert capsys.readouterr() == ("", "")

    options = ("--ssd-cache-dir", str(ssd), "--kv-memory-mb", "64", "--record", str(recorded))
    with ServerProcess(str(folder), tmp_path, *options) as server:
        server.wait_ready()
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            serve_and_clear(server, client, prefix)
            # Used twice, so that it is stored, short as it is.
            for _ in range(2):
                usage(client, user("Is this found after a restart? " * 20))
            assert main(["warm", "--prompts", str(prompts), "--url", server.url]) == 0
            wait_until(lambda: server.get("/v1/cache").json()["ssd"]["num_runs"] >= 2)
        assert server.stop() == 143
    # What was recorded holds the warmed prefix, so that it is stored when it is asked for.
    again = ("warm", str(folder), "--prompts", str(recorded), "--ssd-cache-dir", str(ssd))
    capsys.readouterr()
    assert main([*again, "--system-only", "--check", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"stored": 1, "missing": []}
    with ServerProcess(str(folder), tmp_path, *options[:4]) as server:
        server.wait_ready()
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            # The first prompt of all: for later ones, computing may be predicted to be faster.
            total, cached = usage(client, user("Is this found after a restart? " * 20))
            assert 1 <= total - cached <= BLOCK


def serve_and_clear(server: ServerProcess, client: openai.OpenAI, prefix: int) -> None:
    """Find the warmed prefix, twice; remove it from RAM alone, then from everywhere."""
    total, cached = usage(client, SYSTEM, user("Hello"))
    assert cached == prefix
    assert usage(client, SYSTEM, user("Hello")) == (total, (total - 1) // BLOCK * BLOCK)
    status = server.status()["cache"]
    assert status["ssd"]["num_restored"] == prefix // BLOCK
    assert client.delete("/cache?tier=ram", cast_to=object)["blocks"] >= prefix // BLOCK  # type: ignore[index]
    shown = server.get("/v1/cache").json()
    assert (shown["entries"], shown["ssd"]["num_runs"] > 0) == (0, True)
    assert client.delete("/cache", cast_to=object)["tiers"] == ["ram", "ssd"]  # type: ignore[index]
    assert server.get("/v1/cache").json()["ssd"]["num_runs"] == 0
    assert usage(client, SYSTEM, user("Hello"))[1] == 0


def test_a_server_warms_behind_its_clients(folder: Path, tmp_path: Path) -> None:
    """It is ready before its prompts are, and explains a miss while debugging."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(f"{json.dumps([SYSTEM])}\n{json.dumps({'messages': [OTHER]})}\n")
    options = ("--warm-prompts", str(prompts), "--kv-memory-mb", "64", "--log-level", "debug")
    with ServerProcess(str(folder), tmp_path, *options) as server:
        server.wait_ready()
        wait_until(lambda: "warmed 2 prefixes" in server.log)
        log = server.log
        assert log.index(" ready: ") < log.index("warmed 2 prefixes")
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            assert usage(client, OTHER, user("How many?"))[1] >= 4 * BLOCK
            changed = {**OTHER, "content": OTHER["content"].replace("sheep", "goats", 1)}
            assert usage(client, changed, user("How many?"))[1] == 0
        wait_until(lambda: "departs from the nearest stored one" in server.log)
        (line,) = [text for text in server.log.splitlines() if "departs from" in text]
        assert line.endswith("in messages[0] (system)")
        assert "the nearest stored prefix differs from token" in server.log


def test_prompts_that_are_wrong_end_a_server_before_it_loads(tmp_path: Path, folder: Path) -> None:
    """A line says which, and the exit code is that of a wrong command line."""
    prompts = tmp_path / "prompts.json"
    prompts.write_text(json.dumps([[SYSTEM], [{"role": "robot", "content": "x"}]]))
    with ServerProcess(str(folder), tmp_path, "--warm-prompts", str(prompts)) as server:
        assert server.wait(60) == 2
        assert "prompt 2" in server.log.splitlines()[-1]
