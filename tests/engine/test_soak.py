"""Everything at once in one engine for a while: each request ends once, and memory comes back."""

from __future__ import annotations

import gc
import random
import time
from collections import Counter
from pathlib import Path

import mlx.core as mx
import psutil
import pytest
from support.engines import (
    Driver,
    Finished,
    differences,
    make_engine,
    random_prompt,
    tiny_namespace,
)

from vllm_mlx.engine.engine import Engine
from vllm_mlx.engine.kv.spill import open_spill
from vllm_mlx.engine.kv.store import PrefixStore

BLOCK = 16
#: Rows that may be open at once, most of them waiting.
MAX_OPEN = 12
#: How requests may end here; all of it is to happen.
ENDS = ("length", "abort", "error")
#: Growth of a process's memory that may be fragmentation.
MAX_GROWTH = 1.10


class FailsAtTimes:
    """Decode a token to a letter, but raise at times, as a broken tokenizer would."""

    def __init__(self, choose: random.Random) -> None:
        self._fails_at = choose.choice([None, None, None, None, choose.randrange(1, 20)])
        self._num_tokens = 0

    def add(self, token_id: int) -> str:
        """Return one letter."""
        self._num_tokens += 1
        if self._num_tokens == self._fails_at:
            raise ValueError("no such token")
        return chr(97 + token_id % 26)

    def flush(self) -> str:
        """Hold nothing back."""
        return ""


class Soak:
    """Ask and abort at random, with prefixes that repeat, in too little memory."""

    def __init__(self, kind: str, folder: Path, seed: int) -> None:
        self.kind = kind
        self.choose = random.Random(seed)
        self.driver = Driver(self._engine(folder))
        self.ends: Counter[str] = Counter()
        self.num_asked = 0
        self._prompts = [random_prompt(length, 7) for length in (3, 20, 33, 64, 90, 130, 200)]
        self._asked: dict[str, list[int]] = {}

    def _engine(self, folder: Path) -> Engine:
        namespace = tiny_namespace(self.kind, BLOCK)
        return make_engine(
            self.kind,
            max_num_seqs=6,
            prefill_tokens_per_step=48,
            admission_headroom_tokens=8,
            make_decoder=lambda: FailsAtTimes(self.choose),
            namespace=namespace,
            spill=open_spill(namespace, folder, max_bytes=4_000_000),
            kv_budget_bytes=220_000,
        )

    def disturb(self) -> None:
        """Do one thing at random and step."""
        if len(self._asked) < MAX_OPEN and self.choose.random() < 0.5:
            self._ask()
        if self._asked and self.choose.random() < 0.05:
            self.driver.engine.abort(self.choose.choice(sorted(self._asked)))
        if self.choose.random() < 0.01:
            self.driver.engine.clear_prefixes(ram=True)
        self._step()

    def drain(self) -> None:
        """Step until nothing is open."""
        while self.driver.engine.has_work:
            self._step()

    def check(self) -> None:
        """Hold that the books of the batch and of the prefixes are right."""
        engine = self.driver.engine
        engine._layout.check_integrity()  # type: ignore[attr-defined]
        prefixes = engine._prefixes
        assert isinstance(prefixes, PrefixStore)
        prefixes.tree.check_integrity()

    def _ask(self) -> None:
        name = f"{self.num_asked}"
        self.num_asked += 1
        prompt = self.choose.choice(self._prompts)[: self.choose.choice([None, None, 40])]
        prompt = [*prompt, *random_prompt(self.choose.choice([0, 1, 30]), self.num_asked)]
        self._asked[name] = prompt
        options = {"max_tokens": self.choose.choice([1, 5, 40]), "ignore_eos": True}
        self.driver.add(name, prompt, priority=self.choose.choice([0, 0, 1]), **options)

    def _step(self) -> None:
        for row in self.driver.step():
            if row.finish_reason is not None:
                self._take(row.request_id)

    def _take(self, name: str) -> None:
        result: Finished = self.driver.results.pop(name)
        prompt = self._asked.pop(name)
        assert result.final is not None
        self.ends[str(result.final.finish_reason)] += 1
        if result.final.finish_reason == "length" and self.choose.random() < 0.02:
            assert differences(self.kind, prompt, result.tokens)[0] == []


def held_bytes() -> tuple[int, int]:
    """Return what MLX's arrays hold, and the whole process without what MLX keeps for reuse."""
    gc.collect()
    mx.clear_cache()
    return mx.get_active_memory(), psutil.Process().memory_info().rss


@pytest.mark.parametrize(
    ("kind", "seconds"),
    [
        pytest.param("full", 1, id="briefly"),
        pytest.param("full", 30, marks=pytest.mark.faults, id="full"),
        pytest.param("composite", 30, marks=pytest.mark.faults, id="composite"),
        pytest.param("full", 600, marks=[pytest.mark.slow, pytest.mark.timeout(900)], id="long"),
    ],
)
def test_a_busy_engine_gives_everything_back(kind: str, seconds: float, tmp_path: Path) -> None:
    """Aborts, failing rows, preemption, eviction and SSD together leave no byte and no request."""
    soak = Soak(kind, tmp_path, seed=5)
    began = time.monotonic()
    warm_active = warm_rss = None
    while time.monotonic() < began + seconds or min(soak.ends[end] for end in ENDS) < 3:
        for _ in range(20):
            soak.disturb()
        soak.check()
        if warm_rss is None and time.monotonic() > began + seconds / 2:
            soak.drain()
            soak.driver.engine.clear_prefixes()
            warm_active, warm_rss = held_bytes()
    soak.drain()
    soak.check()
    engine = soak.driver.engine
    assert engine.store_prefixes(60)
    engine.clear_prefixes()
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.kv_bytes, stats.requests) == (0, 0, 0, ())
    assert stats.prefixes is not None
    assert stats.prefixes.num_bytes == 0
    assert soak.ends.keys() == set(ENDS)
    assert sum(soak.ends.values()) == soak.num_asked
    assert stats.num_preemptions > 0
    assert stats.prefixes.num_evicted > 0
    assert warm_active is not None
    assert warm_rss is not None
    active, rss = held_bytes()
    assert active <= warm_active + 100_000
    assert rss <= MAX_GROWTH * warm_rss
    engine.close()
