"""What an engine does when the machine runs short of memory, level by level."""

from __future__ import annotations

import pytest
from support.engines import Driver, make_engine, random_prompt, reference, tiny_namespace

from vllm_mlx.engine.core.memory_guard import MemoryGuard, Pressure
from vllm_mlx.engine.engine import Engine

MIB = 1 << 20
RESERVE = 400 * MIB


def expected(prompt: list[int], max_tokens: int) -> list[int]:
    """Return mlx-lm's own greedy tokens."""
    return reference("full", tuple(prompt), max_tokens)[0]


class Machine:
    """Have as much memory free as a test says, on a clock of its own."""

    def __init__(self) -> None:
        self.free_bytes = 1000 * MIB
        self.now_s = 0.0
        self.num_released = 0
        self.guard = MemoryGuard(
            lambda: self.free_bytes,
            RESERVE,
            release_memory=self._release,
            clock=lambda: self.now_s,
        )

    def _release(self) -> None:
        self.num_released += 1

    def have(self, free_mib: int) -> None:
        """Have so much free from the next look on, which is due."""
        self.free_bytes = free_mib * MIB
        self.now_s += 1.0

    def engine(self) -> Engine:
        """Return an engine on this machine that keeps prefixes."""
        return make_engine(namespace=tiny_namespace("full", 16), guard=self.guard)


def test_levels_follow_what_is_left_of_the_reserve() -> None:
    """Whole, half and a quarter of the reserve are where the levels begin."""
    free = [RESERVE, RESERVE - 1, RESERVE // 2, RESERVE // 2 - 1, RESERVE // 4, RESERVE // 4 - 1, 0]
    assert [Pressure.of(part, RESERVE).name for part in free] == [
        *("NONE", "EVICT", "EVICT", "REFUSE", "REFUSE", "PREEMPT", "PREEMPT")
    ]


def test_prefixes_that_nobody_uses_go_first() -> None:
    """Below the reserve stored prefixes are evicted and cached buffers released; rows go on."""
    machine = Machine()
    driver = Driver(machine.engine())
    driver.add("first", random_prompt(100, 1), max_tokens=4)
    driver.run()
    prefixes = driver.engine.stats().prefixes
    assert prefixes is not None
    assert prefixes.num_bytes > 0
    machine.have(390)
    driver.add("second", random_prompt(5, 2), max_tokens=20)
    results = driver.run()
    assert results["second"].tokens == expected(random_prompt(5, 2), 20)
    stats = driver.engine.stats()
    assert stats.prefixes is not None
    assert stats.prefixes.num_evicted > 0
    assert machine.num_released > 0
    assert stats.memory_pressure.level == "evict"
    assert stats.memory_pressure.num_refused == 0


def test_an_idle_engine_gives_way_too() -> None:
    """What is stored goes although no request makes the engine step."""
    machine = Machine()
    driver = Driver(machine.engine())
    driver.add("first", random_prompt(100, 1), max_tokens=4)
    driver.run()
    machine.have(390)
    driver.engine.idle()
    prefixes = driver.engine.stats().prefixes
    assert prefixes is not None
    assert prefixes.num_bytes == 0


def test_new_requests_are_refused_and_open_ones_go_on() -> None:
    """A refused request is told how much is free; memory that comes back lets others in."""
    machine = Machine()
    driver = Driver(machine.engine())
    driver.add("open", random_prompt(5, 1), max_tokens=30)
    driver.step()
    machine.have(150)
    driver.add("refused", random_prompt(5, 2), max_tokens=5)
    driver.step()
    refused = driver.results["refused"].final
    assert refused is not None
    assert refused.error is not None
    assert refused.error.code == "out_of_memory"
    assert "150 MiB are free, and 400 MiB" in refused.error.message
    assert refused.error.retry_after_s
    machine.have(1000)
    driver.add("later", random_prompt(5, 3), max_tokens=5)
    results = driver.run()
    assert results["later"].tokens == expected(random_prompt(5, 3), 5)
    assert results["open"].tokens == expected(random_prompt(5, 1), 30)
    assert driver.engine.stats().memory_pressure.num_refused == 1


def test_the_youngest_rows_wait_and_all_end_with_their_tokens() -> None:
    """At the last level one row at a time goes back to waiting, never the only one."""
    machine = Machine()
    driver = Driver(machine.engine())
    prompts = {f"row {number}": random_prompt(40, number) for number in range(4)}
    for name, prompt in prompts.items():
        driver.add(name, prompt, max_tokens=40)
    while driver.engine.stats().num_running < 4:
        driver.step()
    seen = []
    for _ in range(6):
        machine.have(50)
        driver.step()
        stats = driver.engine.stats()
        seen.append((stats.num_running, stats.num_waiting))
    assert seen == [(3, 1), (2, 2), (1, 3), (1, 3), (1, 3), (1, 3)]
    assert driver.engine.stats().memory_pressure.level == "preempt"
    machine.have(1000)
    results = driver.run()
    for name, prompt in prompts.items():
        assert results[name].tokens == expected(prompt, 40), name
    assert driver.engine.stats().num_preemptions == 3


def test_a_machine_that_stays_short_serves_one_after_the_other() -> None:
    """However little is free, requests that were taken end."""
    machine = Machine()
    driver = Driver(machine.engine())
    for number in range(3):
        driver.add(f"row {number}", random_prompt(20, number), max_tokens=5)
    machine.have(0)
    results = driver.run()
    assert [len(result.tokens) for result in results.values()] == [5, 5, 5]


def test_a_level_is_left_later_than_it_was_reached() -> None:
    """Memory that wavers around the reserve does not make the engine waver."""
    machine = Machine()
    levels = []
    for free in (390, 410, 390, 499, 501):
        machine.have(free)
        machine.guard.check_room()
        levels.append(machine.guard.level)
    assert levels == [Pressure.EVICT] * 4 + [Pressure.NONE]


def test_the_machine_is_asked_four_times_a_second_and_not_at_all_without_a_reserve() -> None:
    """However fast steps are, looking at the memory costs no more."""
    asked: list[int] = []

    def available() -> int:
        asked.append(1)
        return 0

    now_s = 0.0
    guard = MemoryGuard(available, RESERVE, clock=lambda: now_s)
    for _ in range(1000):
        now_s += 0.001
        with pytest.raises(Exception, match="short of memory"):
            guard.check_room()
    assert 3 <= len(asked) <= 5
    asked.clear()
    MemoryGuard(available, 0, clock=lambda: now_s).check_room()
    assert asked == []
