"""Measure the time to the first token of a prompt: computed, from RAM, from SSD, after a restart.

Run as `python -m vllm_mlx.engine.benchmark.prefixes`; prints two tables.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import click

from vllm_mlx.engine.config import EngineConfig, ModelConfig
from vllm_mlx.engine.core.outputs import pack_tokens
from vllm_mlx.engine.core.request import GenerationRequest, SamplingParams
from vllm_mlx.engine.models.loader import load_engine
from vllm_mlx.engine.models.progress import ignore_progress
from vllm_mlx.engine.platform import require_backend

if TYPE_CHECKING:
    from vllm_mlx.engine.engine import Engine

#: Random ids from here on are ordinary tokens in every vocabulary that is measured.
_TOKENS = range(1000, 30_000)
_STORE_TIMEOUT_S = 300.0
_WARM_UP_TOKENS = 256
_GIB = 2**30


@dataclass
class Timings:
    """Hold the seconds to the first token of prompts of one length, by how they were found."""

    num_tokens: int
    cold: list[float] = field(default_factory=list)
    ram: list[float] = field(default_factory=list)
    ssd: list[float] = field(default_factory=list)
    restart: list[float] = field(default_factory=list)
    #: Prompts kept for after the restart.
    prompts: list[list[int]] = field(default_factory=list)
    #: Tokens that were found instead of computed, of each way.
    cached: dict[str, int] = field(default_factory=dict)

    def row(self) -> str:
        """Return the line of the table: medians, and how they compare with the cold ones."""
        cold = statistics.median(self.cold)
        cells = [f"{self.num_tokens:,}", f"{cold * 1e3:,.0f}"]
        for times in (self.ram, self.ssd, self.restart):
            found = statistics.median(times)
            cells.append(f"{found * 1e3:,.0f} ({found / cold:.1%})")
        return "| " + " | ".join(cells) + " |"


def time_to_first_token(engine: Engine, prompt: Sequence[int]) -> tuple[float, int]:
    """Run one greedy request of one token; return its seconds and how many tokens were found."""
    request = GenerationRequest(
        request_id=f"{random.getrandbits(64):x}",
        prompt=pack_tokens(prompt),
        sampling=SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True),
    )
    began = time.perf_counter()
    engine.add_request(request)
    while True:
        for row in engine.step().rows:
            if row.error is not None:
                raise row.error.to_error()
            if row.finish_reason is not None:
                return time.perf_counter() - began, row.num_cached_tokens


def measure(engine: Engine, timings: Timings, numbers: random.Random) -> None:
    """Ask one new prompt cold, then from RAM, then from SSD alone."""
    prompt = numbers.choices(_TOKENS, k=timings.num_tokens)
    timings.prompts.append(prompt)
    seconds, cached = time_to_first_token(engine, prompt)
    assert cached == 0, "not cold"
    timings.cold.append(seconds)
    seconds, timings.cached["RAM"] = time_to_first_token(engine, prompt)
    timings.ram.append(seconds)
    engine.store_prefixes(_STORE_TIMEOUT_S)
    engine.clear_prefixes()
    seconds, timings.cached["SSD"] = time_to_first_token(engine, prompt)
    timings.ssd.append(seconds)


def measure_all(
    model: ModelConfig, config: EngineConfig, lengths: Sequence[int], num_repeats: int
) -> list[str]:
    """Measure every length, load the engine anew, ask for all again; return lines to print."""
    numbers = random.Random(0)
    all_timings = [Timings(length) for length in lengths]
    engine = load_engine(model, config, ignore_progress)
    for _ in range(2):
        time_to_first_token(engine, numbers.choices(_TOKENS, k=_WARM_UP_TOKENS))
    for _ in range(num_repeats):
        for timings in all_timings:
            measure(engine, timings, numbers)
    first, info = _disk_line(engine), engine.info
    engine.close()
    engine = load_engine(model, config, ignore_progress)
    for timings in all_timings:
        for prompt in timings.prompts:
            seconds, timings.cached["restart"] = time_to_first_token(engine, prompt)
            timings.restart.append(seconds)
    second = _disk_line(engine)
    engine.close()
    return [
        f"{info.model}, {info.dtype}, {info.device}: medians of {num_repeats} prompts, in ms "
        "(and of the cold time)",
        "",
        "| prompt tokens | cold | RAM | SSD | after a restart |",
        "|---:|---:|---:|---:|---:|",
        *(timings.row() for timings in all_timings),
        "",
        "found: " + ", ".join(f"{t.num_tokens}: {t.cached}" for t in all_timings),
        f"first engine: {first}",
        f"second engine: {second}",
    ]


def _disk_line(engine: Engine) -> str:
    prefixes = engine.stats().prefixes
    assert prefixes is not None
    disk = prefixes.disk
    assert disk is not None
    block = prefixes.block_size
    written = disk.written_bytes / max(1, disk.num_spilled * block)
    return (
        f"{disk.num_spilled * block:,} tokens written, {written:,.0f} bytes each; "
        f"{disk.num_restored * block:,} tokens ({disk.read_bytes / _GIB:.2f} GiB) read at "
        f"{disk.read_bytes / _GIB / max(disk.read_s, 1e-9):.2f} GiB/s and thread, "
        f"{disk.num_declined} times computing was predicted to be faster; faults: "
        f"{disk.faults or 'none'}"
    )


@click.command()
@click.argument("model", default="demo")
@click.option("--length", "lengths", default=(512, 2048, 6144), multiple=True, show_default=True)
@click.option("--repeats", "num_repeats", default=3, show_default=True)
@click.option("--folder", type=click.Path(path_type=Path), help="Where to store; on which disk.")
def main(model: str, lengths: tuple[int, ...], num_repeats: int, folder: Path | None) -> None:
    """Print how long prompts take to their first token, computed and found, in ms."""
    require_backend()
    with tempfile.TemporaryDirectory(dir=folder) as store:
        config = EngineConfig(
            max_num_seqs=1, ssd_cache_dir=f"{store}/prefixes", ssd_cache_max_bytes=None
        )
        for line in measure_all(ModelConfig(model=model), config, lengths, num_repeats):
            click.echo(line)


if __name__ == "__main__":
    main()
