"""Measure drawing tokens for a batch against a loop over rows with mlx-lm's samplers.

Run as `python -m vllm_mlx.engine.benchmark.sampling`; prints one table.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click
import numpy as np
from msgspec.structs import replace

from vllm_mlx.engine.platform import device_name, prepare_environment

if TYPE_CHECKING:
    import mlx.core as mx

    from vllm_mlx.engine.run.sampler import RowSampling

#: How the table names a kind of batch, and the settings that its rows take in turn.
SETTINGS: dict[str, tuple[dict[str, Any], ...]] = {
    "greedy": ({"temperature": 0.0},),
    "temperature 0.7": ({"temperature": 0.7},),
    "temperature 0.7, top_p 0.9": ({"temperature": 0.7, "top_p": 0.9},),
    "temperature 0.7, top_k 40": ({"temperature": 0.7, "top_k": 40},),
    "temperature 0.7, top_k 400": ({"temperature": 0.7, "top_k": 400},),
    "temperature 0.7, top_p 0.99 (sorts)": ({"temperature": 0.7, "top_p": 0.99},),
    "half greedy, half top_p 0.9": (
        {"temperature": 0.0},
        {"temperature": 0.7, "top_p": 0.9},
    ),
}


@dataclass(frozen=True, slots=True)
class Measurement:
    """Hold the medians of one line of the table, in seconds."""

    name: str
    num_rows: int
    vocab_size: int
    draw_s: float
    loop_s: float

    @property
    def ratio(self) -> float:
        """Return how many times longer the loop takes."""
        return self.loop_s / self.draw_s


def zipf_logits(num_rows: int, vocab_size: int) -> mx.array:
    """Return float32 logits `[num_rows, vocab_size]` as peaked as a language model's.

    Probabilities fall with the power 1.5 of a random rank, so that 0.9 of the mass lies in about
    60 tokens.
    """
    import mlx.core as mx

    generator = np.random.default_rng(0)
    falling = -1.5 * np.log(np.arange(1, vocab_size + 1, dtype=np.float32))
    return mx.array(np.stack([generator.permutation(falling) for _ in range(num_rows)]))


def mlx_lm_loop(logits: mx.array, rows: Sequence[RowSampling]) -> Callable[[], object]:
    """Return what draws the rows one by one, as mlx-lm's batched generation does.

    There every row has its own sampler, which gets the row's normalised log-probabilities.
    """
    import mlx.core as mx
    from mlx_lm.sample_utils import make_sampler

    samplers = [
        make_sampler(temp=r.temperature, top_p=r.top_p, min_p=r.min_p, top_k=r.top_k) for r in rows
    ]

    def run() -> object:
        log_probabilities = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        tokens = [
            sampler(log_probabilities[index : index + 1]) for index, sampler in enumerate(samplers)
        ]
        return mx.concatenate(tokens).tolist()

    return run


def measure(name: str, num_rows: int, vocab_size: int, num_repeats: int) -> Measurement:
    """Time both ways in turn, so that other load on the machine meets both alike."""
    import mlx.core as mx

    from vllm_mlx.engine.run.sampler import RowSampling, draw

    logits = zipf_logits(num_rows, vocab_size)
    mx.eval(logits)
    kinds = [RowSampling(**settings) for settings in SETTINGS[name]]
    rows = [replace(kinds[index % len(kinds)], seed=index) for index in range(num_rows)]
    loop = mlx_lm_loop(logits, rows)
    draw(logits, rows).read()
    loop()
    draw_s, loop_s = [], []
    for position in range(num_repeats):
        rows = [replace(row, position=position) for row in rows]
        started = time.perf_counter()
        draw(logits, rows).read()
        drawn = time.perf_counter()
        loop()
        looped = time.perf_counter()
        draw_s.append(drawn - started)
        loop_s.append(looped - drawn)
    return Measurement(
        name, num_rows, vocab_size, statistics.median(draw_s), statistics.median(loop_s)
    )


@click.command()
@click.option("--rows", "num_rows", default=(1, 16), multiple=True, show_default=True)
@click.option("--vocab", "vocab_sizes", default=(49_152, 151_936), multiple=True, show_default=True)
@click.option("--repeats", "num_repeats", default=15, show_default=True)
def main(num_rows: tuple[int, ...], vocab_sizes: tuple[int, ...], num_repeats: int) -> None:
    """Print milliseconds per draw of a batch, here and in a loop of mlx-lm's samplers."""
    prepare_environment()
    click.echo(f"device: {device_name()}; medians of {num_repeats} alternating runs")
    click.echo("")
    click.echo("| rows | vocabulary | settings | draw, ms | loop, ms | loop / draw |")
    click.echo("|---:|---:|---|---:|---:|---:|")
    for vocab_size in vocab_sizes:
        for count in num_rows:
            for name in SETTINGS:
                line = measure(name, count, vocab_size, num_repeats)
                click.echo(
                    f"| {line.num_rows} | {line.vocab_size:,} | {line.name} "
                    f"| {line.draw_s * 1e3:.1f} | {line.loop_s * 1e3:.1f} | {line.ratio:.1f} |"
                )


if __name__ == "__main__":
    main()
