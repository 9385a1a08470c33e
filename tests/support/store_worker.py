"""Use a store from a process of its own, in one of the ways that processes do; run as a script.

`store_worker.py write|read|prune DIR SECONDS SEED [MAX_BYTES]`. A writer prints each stored run's
last hash; at its end every worker prints one line of JSON: its counters and what went wrong.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
from support.runs import NAMESPACE, OTHER, chain_of, is_right, run_of

from vllm_mlx.engine.kv.disk_tier import DiskTier

#: Chains share their first blocks and differ in later ones.
BRANCHES = (3, 4, 6, 6, 6, 6)


class Worker:
    """Run this script as a process of its own.

    What it says goes to a file: a pipe that nobody reads fills up and stops the one who writes.
    """

    def __init__(self, told: Path, kind: str, store: Path, *arguments: float) -> None:
        self._told = told
        with told.open("w") as output:
            self.process = subprocess.Popen(
                [sys.executable, __file__, kind, str(store), *map(str, arguments)],
                stdout=output,
                env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
            )

    def __enter__(self) -> Worker:
        """Wait until it has opened the store."""
        while not self.lines() and self.process.poll() is None:
            time.sleep(0.01)
        assert self.lines()[:1] == ["ready"]
        return self

    def __exit__(self, *_: object) -> None:
        """Leave no process behind, whatever happened."""
        self.process.kill()
        self.process.wait()

    def lines(self) -> list[str]:
        """Return what it has said; a last line that is cut off does not count."""
        lines = self._told.read_text().splitlines(keepends=True)
        return [line.strip() for line in lines if line.endswith("\n")]

    def result(self) -> dict[str, Any]:
        """Wait for its end and return its counters and what went wrong."""
        assert self.process.wait(60) == 0
        result: dict[str, Any] = json.loads(self.lines()[-1])
        return result


def say(line: str) -> None:
    """Tell the test that started this process."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def random_chain(numbers: random.Random) -> list[int]:
    """Draw the blocks of one of some thousand chains."""
    return [numbers.randrange(width) for width in BRANCHES]


def write(tier: DiskTier, numbers: random.Random) -> str | None:
    """Store one chain, cut into runs at random; return what went wrong."""
    blocks = random_chain(numbers)
    namespace = numbers.choice((NAMESPACE, OTHER))
    hashes = chain_of(*blocks, namespace=namespace)
    start = tier.find(hashes)
    while start < len(blocks):
        stop = min(len(blocks), start + numbers.randint(1, 3))
        size = numbers.choice((256, 4096, 40_000))
        if not tier.write(run_of(blocks, start, stop, namespace=namespace, size=size)):
            break
        say(hashes[stop - 1].hex())
        start = stop
    tier.touch(hashes[:start])
    return None


def read(tier: DiskTier, numbers: random.Random) -> str | None:
    """Find and read one chain; return what went wrong."""
    blocks = random_chain(numbers)
    namespace = numbers.choice((NAMESPACE, OTHER))
    runs = tier.read(chain_of(*blocks, namespace=namespace))
    wrong = [run for run in runs if not is_right(run) or run.namespace.digest != namespace.digest]
    return f"{len(wrong)} runs with wrong tensors" if wrong else None


def prune(tier: DiskTier, numbers: random.Random) -> str | None:
    """Remove some runs; return what went wrong."""
    names = [file.name for file in tier.folder.list_runs()]
    tier.remove(numbers.sample(names, len(names) // 10))
    time.sleep(0.02)
    return None


def main() -> None:
    """Do one kind of work until the time is over."""
    kind, path, seconds, seed, *cap = sys.argv[1:]
    tier = DiskTier.open(Path(path), int(cap[0]) if cap else None)
    numbers = random.Random(int(seed))
    work = {"write": write, "read": read, "prune": prune}[kind]
    until = time.monotonic() + float(seconds)
    wrong: list[str] = []
    count = 0
    say("ready")
    while time.monotonic() < until:
        fault = work(tier, numbers)
        wrong += [fault] if fault else []
        count += 1
        if count % 20 == 0:
            tier.maintain()
    stats = msgspec.to_builtins(tier.stats())
    tier.close()
    say(json.dumps({"kind": kind, "rounds": count, "wrong": wrong, **stats}))


if __name__ == "__main__":
    main()
