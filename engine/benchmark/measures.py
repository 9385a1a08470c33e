"""Measure contenders side by side: decoding, prefill, what joining costs, and a long prompt beside.

All of a cell's contenders run in one process on the same weights and take turns, so that whatever
else the machine does meets them alike.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from vllm_mlx.engine.benchmark.cells import Cell
from vllm_mlx.engine.benchmark.contenders import Contender, ContenderMaker

#: Tokens of the prompt that joins a running batch.
_JOINING_TOKENS = 64
#: Tokens of the rows that decode beside a long prompt.
_BESIDE_TOKENS = 256
#: A row that has no token after so many steps will never get one.
_MAX_STEPS = 10_000
_MIN_PROMPT_TOKENS = 16


@dataclass(frozen=True)
class Effort:
    """Say how long to measure: rounds in which contenders take turns, and steps of each turn."""

    num_rounds: int = 5
    num_steps: int = 8


@dataclass
class StepTimes:
    """Gather the seconds of steps: passed, and of this thread's own work."""

    wall: list[float] = field(default_factory=list)
    #: Python, and what MLX does on the calling thread: building and encoding, no waiting.
    host: list[float] = field(default_factory=list)

    def step(self, contender: Contender) -> list[str]:
        """Do one step and note its time; return who got a token."""
        began, worked = time.perf_counter(), time.thread_time()
        rows = contender.step()
        self.wall.append(time.perf_counter() - began)
        self.host.append(time.thread_time() - worked)
        return rows

    @property
    def median(self) -> float:
        """Return the median step."""
        return statistics.median(self.wall)


class Prompts:
    """Make up prompts, no two of which begin alike."""

    def __init__(self, tokens: range) -> None:
        self._tokens = tokens
        self._random = random.Random(0)

    def next(self, num_tokens: int) -> list[int]:
        """Return a new prompt."""
        return self._random.choices(self._tokens, k=num_tokens)


def measure(
    cell: Cell, makers: Mapping[str, ContenderMaker], prompts: Prompts, effort: Effort
) -> dict[str, dict[str, float]]:
    """Return what a cell gives, by contender that can have so many rows, then by measure."""
    num_rows = cell.num_rows + (cell.kind != "decode")
    contenders = {}
    for name, make in makers.items():
        contender = make(num_rows)
        at_once = 1 if cell.kind == "prefill" else num_rows
        if contender.max_rows is None or contender.max_rows >= at_once:
            contenders[name] = contender
    match cell.kind:
        case "decode":
            return _decode(contenders, cell, prompts, effort)
        case "prefill":
            return _prefill(contenders, cell, prompts, effort)
        case "join":
            return _join(contenders, cell, prompts, effort)
        case "contended":
            return _contended(contenders, cell, prompts, effort)


def _decode(
    contenders: Mapping[str, Contender], cell: Cell, prompts: Prompts, effort: Effort
) -> dict[str, dict[str, float]]:
    """Measure steps in which every row gets a token."""
    batch = [prompts.next(cell.num_tokens) for _ in range(cell.num_rows)]
    rows = {name: _fill(contender, batch) for name, contender in contenders.items()}
    times = {name: StepTimes() for name in contenders}
    for _ in range(effort.num_rounds):
        for name, contender in contenders.items():
            # The first step of a turn meets caches that another contender has filled.
            contender.step()
            for _ in range(effort.num_steps):
                stepped = times[name].step(contender)
                assert len(stepped) == cell.num_rows, f"{name}: a row got no token"
    for name, contender in contenders.items():
        _clear(contender, rows[name])
    return {
        name: {
            "decode, tokens/s": cell.num_rows / found.median,
            "step, ms": found.median * 1e3,
            "host time a step, ms": statistics.median(found.host) * 1e3,
        }
        for name, found in times.items()
    }


def _prefill(
    contenders: Mapping[str, Contender], cell: Cell, prompts: Prompts, effort: Effort
) -> dict[str, dict[str, float]]:
    """Measure the time from a prompt to its first token, with nothing beside."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for contender in contenders.values():
        _first_token_s(contender, prompts.next(_MIN_PROMPT_TOKENS))
    for _ in range(effort.num_rounds):
        for name, contender in contenders.items():
            seconds[name].append(_first_token_s(contender, prompts.next(cell.num_tokens)))
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    return {
        name: {
            "prefill, tokens/s": cell.num_tokens / median,
            "time to first token, ms": median * 1e3,
        }
        for name, median in medians.items()
    }


def _join(
    contenders: Mapping[str, Contender], cell: Cell, prompts: Prompts, effort: Effort
) -> dict[str, dict[str, float]]:
    """Measure what a short prompt that joins a running batch, and leaves it, takes from others."""
    batch = [prompts.next(cell.num_tokens) for _ in range(cell.num_rows)]
    found = {}
    for name, contender in contenders.items():
        rows = _fill(contender, batch)
        joins, gaps, leaves, steady = [], [], [], []
        for _ in range(effort.num_rounds):
            alone = _steady_s(contender, effort)
            joined, times = _add_beside(contender, prompts.next(_JOINING_TOKENS))
            joins.append(sum(times) - len(times) * alone)
            gaps.append(max(times))
            began = time.perf_counter()
            contender.remove(joined)
            for _ in range(2):
                contender.step()
            leaves.append(time.perf_counter() - began - 2 * alone)
            steady.append(alone)
        _clear(contender, rows)
        found[name] = {
            "step, ms": statistics.median(steady) * 1e3,
            "a 64-token prompt joins, ms": statistics.median(joins) * 1e3,
            "longest step of a join, ms": statistics.median(gaps) * 1e3,
            "a row leaves, ms": statistics.median(leaves) * 1e3,
        }
    return found


def _contended(
    contenders: Mapping[str, Contender], cell: Cell, prompts: Prompts, effort: Effort
) -> dict[str, dict[str, float]]:
    """Measure rows that decode while a long prompt is computed, and the prompt beside them."""
    batch = [prompts.next(_BESIDE_TOKENS) for _ in range(cell.num_rows)]
    found = {}
    for name, contender in contenders.items():
        alone_s = _first_token_s(contender, prompts.next(cell.num_tokens))
        rows = _fill(contender, batch)
        steady = _steady_s(contender, effort)
        long, times = _add_beside(contender, prompts.next(cell.num_tokens))
        _clear(contender, [*rows, long])
        gaps = sorted(times)
        gap = gaps[min(len(gaps) - 1, int(len(gaps) * 0.99))]
        found[name] = {
            "step, ms": steady * 1e3,
            "p99 step beside the prompt, ms": gap * 1e3,
            "p99 step beside the prompt / step": gap / steady,
            "time to first token alone, ms": alone_s * 1e3,
            "time to first token beside rows, ms": sum(times) * 1e3,
            "first token beside rows / alone": sum(times) / alone_s,
        }
    return found


def _fill(contender: Contender, batch: Sequence[Sequence[int]]) -> list[str]:
    """Add rows and step until all of them decode."""
    rows = [contender.add(prompt) for prompt in batch]
    _step_until(contender, set(rows))
    for _ in range(2):
        contender.step()
    return rows


def _clear(contender: Contender, rows: Sequence[str]) -> None:
    for row in rows:
        contender.remove(row)
    for _ in range(2):
        contender.step()


def _steady_s(contender: Contender, effort: Effort) -> float:
    times = StepTimes()
    contender.step()
    for _ in range(effort.num_steps):
        times.step(contender)
    return times.median


def _first_token_s(contender: Contender, prompt: Sequence[int]) -> float:
    began = time.perf_counter()
    row = contender.add(prompt)
    _step_until(contender, {row})
    seconds = time.perf_counter() - began
    _clear(contender, [row])
    return seconds


def _add_beside(contender: Contender, prompt: Sequence[int]) -> tuple[str, list[float]]:
    """Add a row to those that decode; return it, and the seconds of each step to its first token.

    The first of them holds the adding, too.
    """
    began = time.perf_counter()
    row = contender.add(prompt)
    adding = time.perf_counter() - began
    times = _step_until(contender, {row})
    times[0] += adding
    return row, times


def _step_until(contender: Contender, rows: set[str]) -> list[float]:
    """Step until every one of the rows has got a token; return the seconds of each step."""
    times = StepTimes()
    missing = set(rows)
    for _ in range(_MAX_STEPS):
        missing.difference_update(times.step(contender))
        if not missing:
            return times.wall
    raise RuntimeError(f"no token came for {len(missing)} rows in {_MAX_STEPS} steps")
