"""`warm` in earnest: interrupted, killed, and beside servers that share its folder."""

from __future__ import annotations

import json
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.server_process import ServerProcess
from support.tiny_folder import write_tiny_folder

from vllm_mlx.cli.main import main

pytestmark = pytest.mark.faults

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
#: One run of the tiny model's blocks is half as large.
CAP_GB = "0.002"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, demo_model_path: Path) -> Path:
    """Return the folder of a tiny model."""
    return write_tiny_folder(tmp_path_factory.mktemp("tiny"), demo_model_path)


def text(seed: int, num_words: int = 400) -> str:
    """Return words at random."""
    return " ".join(random.Random(seed).choices(WORDS, k=num_words))


def write_prompts(file: Path, count: int, num_words: int = 400) -> Path:
    """Write prompts that share nothing."""
    prompts = [[{"role": "system", "content": text(seed, num_words)}] for seed in range(count)]
    file.write_text(json.dumps(prompts))
    return file


def start_warm(folder: Path, prompts: Path, ssd: Path, *options: str) -> subprocess.Popen[str]:
    """Start `warm` in a process of its own."""
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "vllm_mlx.cli", "warm", str(folder), *options),
            *("--prompts", str(prompts), "--ssd-cache-dir", str(ssd)),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def stored_runs(ssd: Path) -> int:
    """Count the files."""
    return len(list(ssd.rglob("*.run")))


def wait_until(condition: Callable[[], bool], timeout_s: float = 60) -> None:
    """Wait until `condition` holds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)]
)
def test_what_is_finished_survives_its_end(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], number: int, code: int
) -> None:
    """The next run goes on where this one was stopped, however that was."""
    prompts, ssd = write_prompts(tmp_path / "prompts.json", 40), tmp_path / "ssd"
    process = start_warm(folder, prompts, ssd)
    wait_until(lambda: stored_runs(ssd) >= 3)
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    assert process.returncode == code, said
    assert main(["cache", "verify", str(ssd)]) == 0
    capsys.readouterr()
    job = ["warm", str(folder), "--prompts", str(prompts), "--ssd-cache-dir", str(ssd)]
    assert main([*job, "--check", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert 3 <= found["stored"] < 40
    if number != signal.SIGKILL:
        # What it said that it had stored is stored; the one at work may have been whole as well.
        counted = re.search(r": (\d+) prefix", said)
        assert counted is not None
        assert found["stored"] - 1 <= int(counted[1]) <= found["stored"]
    done = start_warm(folder, prompts, ssd, "--json")
    counts = json.loads(done.communicate(timeout=100)[0])
    assert (done.returncode, counts["skipped"]) == (0, found["stored"])
    assert counts["stored"] == 40 - found["stored"]


def test_servers_warm_and_prune_share_a_folder(folder: Path, tmp_path: Path) -> None:
    """For half a minute of load: no failed request, nothing damaged, and the cap holds."""
    ssd, prompts = tmp_path / "ssd", write_prompts(tmp_path / "prompts.json", 5)
    options = ("--ssd-cache-dir", str(ssd), "--ssd-cache-max-gb", CAP_GB, "--kv-memory-mb", "16")
    places = [tmp_path / name for name in ("a", "b")]
    for place in places:
        place.mkdir()
    faults: list[Any] = []
    largest = 0
    with (
        ServerProcess(str(folder), places[0], *options) as first,
        ServerProcess(str(folder), places[1], *options) as second,
    ):
        until = time.monotonic() + 30
        clients = [
            threading.Thread(target=ask_on, args=(server.wait_ready().url, seed, until, faults))
            for seed, server in enumerate((first, second, first))
        ]
        for client in clients:
            client.start()
        while time.monotonic() < until:
            job = start_warm(folder, prompts, ssd, "--ssd-cache-max-gb", CAP_GB)
            while job.poll() is None:
                assert main(["cache", "prune", str(ssd), "--max-gb", "0.0015", "--yes"]) == 0
                files = [file.stat().st_size for file in existing(ssd)]
                largest = max(largest, sum(files) - max(files, default=0))
                time.sleep(0.2)
            # A folder so small does not hold all of it: some of it was evicted meanwhile.
            _, said = job.communicate()
            assert job.returncode in (0, 4), said
        for client in clients:
            client.join()
        for server in (first, second):
            kinds = set(server.status()["cache"]["ssd"]["faults"])
            assert kinds <= {"missing", "orphan", "no_room", "busy", "queue_full"}
    assert faults == []
    assert largest <= float(CAP_GB) * 2**30
    assert main(["cache", "verify", str(ssd)]) == 0


def existing(ssd: Path) -> list[Path]:
    """List the files that are there."""
    return [file for file in ssd.rglob("*.run") if file.exists()]


def ask_on(url: str, seed: int, until: float, faults: list[Any]) -> None:
    """Ask with prompts of few beginnings, one after the other; note what goes wrong."""
    numbers = random.Random(seed)
    with httpx.Client(timeout=60) as client:
        while time.monotonic() < until:
            prompt = text(numbers.randrange(8)) + text(numbers.randrange(100), 60)
            body = {"model": "default", "prompt": prompt, "max_tokens": 2}
            try:
                response = client.post(f"{url}/v1/completions", json=body)
            except httpx.HTTPError as error:
                faults.append(error)
                return
            if response.status_code != httpx.codes.OK:
                faults.append(response.text)
