"""Measure what following grammars takes: a row's mask, and what plain rows beside them notice.

Run as `python -m vllm_mlx.engine.benchmark.grammar`; prints two tables.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click
import numpy as np
from llguidance import LLExecutor, LLMatcher
from llguidance.numpy import fill_next_token_bitmask_par

from vllm_mlx.engine.config import EngineConfig, ModelConfig
from vllm_mlx.engine.core.grammar import GrammarCompiler, GrammarTokens
from vllm_mlx.engine.core.outputs import pack_tokens
from vllm_mlx.engine.core.request import GenerationRequest, SamplingParams
from vllm_mlx.engine.models.loader import load_engine
from vllm_mlx.engine.models.progress import ignore_progress
from vllm_mlx.engine.models.resolve import resolve_model
from vllm_mlx.engine.parsing.json_grammar import json_expression
from vllm_mlx.engine.platform import device_name, require_backend
from vllm_mlx.engine.text.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from vllm_mlx.engine.engine import Engine

_PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "mood": {"enum": ["calm", "cross"]},
        "email": {"type": "string", "format": "email"},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 30}},
        "home": {"type": "object", "properties": {"street": {"type": "string"}}},
    },
    "required": ["name", "age", "mood", "tags"],
    "additionalProperties": False,
}
_ANSWER = """{"name": "Ada Lovelace", "age": 36, "mood": "calm", "email": "ada@example.org",
  "tags": ["mathematics", "poetry", "engines"], "home": {"street": "12 St James Sq"}}"""
#: Grammars by name, each with an answer as a model writes it.
GRAMMARS = {
    "a schema": (json_expression(_PERSON), _ANSWER),
    "any JSON object": (json_expression({"type": "object"}), _ANSWER),
    "a list of schemas": (
        json_expression({"type": "array", "items": _PERSON, "minItems": 5}),
        f"[{_ANSWER}, {_ANSWER}, {_ANSWER}, {_ANSWER}, {_ANSWER}]",
    ),
    "a regular expression": (
        r"/([a-z]{3,9} ){2,50}[0-9]+(\.[0-9]+)?/",
        "some words that are not too long and then one number 3.14159",
    ),
    "200 choices": (
        " | ".join(f'"option number {number}"' for number in range(200)),
        "option number 137",
    ),
}
_HEAD = "%llguidance {}\nstart: "


class WideTokens:
    """Widen a vocabulary to that of larger models: pairs of its tokens become tokens, too."""

    def __init__(self, tokens: GrammarTokens, vocab_size: int) -> None:
        self._tokens = tokens
        self.vocab_size = vocab_size
        self.eos_token_ids = tokens.eos_token_ids
        self.special_token_ids = tokens.special_token_ids
        self.added_tokens: Mapping[str, int] = tokens.added_tokens
        numbers = random.Random(0)
        plain = [t for t in range(tokens.vocab_size) if t not in tokens.special_token_ids]
        known = [tokens.token_bytes(token) for token in range(tokens.vocab_size)]
        spelt = dict.fromkeys(known)
        while len(spelt) < vocab_size:
            spelt[known[numbers.choice(plain)] + known[numbers.choice(plain)]] = None
        self._bytes = known + list(spelt)[len(dict.fromkeys(known)) :]
        self._bytes += [b""] * (vocab_size - len(self._bytes))

    def serialized(self) -> str | None:
        """Be no `tokenizers` file."""
        return None

    def token_bytes(self, token_id: int) -> bytes:
        """Return a token's bytes."""
        return self._bytes[token_id]

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Encode as before it was widened."""
        return self._tokens.encode(text, add_special_tokens=add_special_tokens)


@dataclass(frozen=True, slots=True)
class MaskTimes:
    """Hold the seconds that one grammar took."""

    compile_s: float
    #: Of each step, as the engine does it beside a forward: read a token in each row, fill all
    #: masks. First while nothing is known of the grammar's states, then with what was learnt.
    first_s: list[float]
    again_s: list[float]


def mask_times(compiler: GrammarCompiler, name: str, num_rows: int, num_repeats: int) -> MaskTimes:
    """Follow the answer to one grammar in several rows, some tokens apart."""
    expression, answer = GRAMMARS[name]
    tokens = compiler.tokenizer.greedy_tokenize(answer)
    compiler.forget(_HEAD + expression)
    began = time.perf_counter()
    matcher = compiler.compile(_HEAD + expression)
    compile_s = time.perf_counter() - began
    walks = [_walk(compiler, matcher, tokens, num_rows) for _ in range(1 + num_repeats)]
    return MaskTimes(compile_s, walks[0], [seconds for walk in walks[1:] for seconds in walk])


def _walk(
    compiler: GrammarCompiler, first: LLMatcher, tokens: Sequence[int], num_rows: int
) -> list[float]:
    """Return the seconds of each step; row `n` is `n` tokens behind the first."""
    executor = LLExecutor()
    words = np.zeros((num_rows, (compiler.tokenizer.vocab_size + 31) // 32), dtype=np.int32)
    matchers = [first.deep_copy() for _ in range(num_rows)]
    places = [(matcher, row) for row, matcher in enumerate(matchers)]
    seconds = []
    for step in range(len(tokens)):
        began = time.perf_counter()
        for row, matcher in enumerate(matchers):
            if step > row:
                assert matcher.consume_token(tokens[step - row - 1]), matcher.get_error()
        fill_next_token_bitmask_par(executor, places, words)
        seconds.append(time.perf_counter() - began)
    return seconds


def apply_seconds(num_rows: int, vocab_size: int, num_repeats: int) -> float:
    """Return the median time that masking the logits takes on the device."""
    import mlx.core as mx

    from vllm_mlx.engine.run.grammar_mask import mask_logits

    logits = mx.random.normal((num_rows, vocab_size))
    words = np.full((num_rows, (vocab_size + 31) // 32), 0x5555_5555, dtype=np.uint32)
    mx.eval(logits, mask_logits(logits, words))
    seconds = []
    for _ in range(num_repeats):
        began = time.perf_counter()
        mx.eval(mask_logits(logits, words))
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def step_seconds(engine: Engine, grammars: Sequence[str | None], num_steps: int) -> float:
    """Return the median time of a step of rows with these grammars, all of them decoding."""
    for index, grammar in enumerate(grammars):
        engine.add_request(
            GenerationRequest(
                request_id=f"row-{index}",
                prompt=pack_tokens(range(100, 164)),
                sampling=SamplingParams(
                    temperature=1.0, seed=index, max_tokens=1000, ignore_eos=True, grammar=grammar
                ),
            )
        )
    while engine.stats().num_running < len(grammars):
        engine.step()
    seconds = []
    for _ in range(num_steps):
        began = time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - began)
    for index in range(len(grammars)):
        engine.abort(f"row-{index}")
    while engine.has_work:
        engine.step()
    return statistics.median(seconds)


def mask_table(model: Path, vocab_size: int, rows: Sequence[int], num_repeats: int) -> list[str]:
    """Return the lines of the first table."""
    compiler = GrammarCompiler(WideTokens(load_tokenizer(model), vocab_size), vocab_size)
    _ = compiler.tokenizer
    lines = [
        "| grammar | rows | compile, ms | first answer, us a row: median | most "
        "| later: median | p99 | most | apply, ms a step |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for num_rows in rows:
        apply_ms = apply_seconds(num_rows, vocab_size, 20) * 1e3
        for name in GRAMMARS:
            times = mask_times(compiler, name, num_rows, num_repeats)
            first, again = (np.array(t) / num_rows * 1e6 for t in (times.first_s, times.again_s))
            lines.append(
                f"| {name} | {num_rows} | {times.compile_s * 1e3:.1f} | {np.median(first):,.0f} "
                f"| {first.max():,.0f} | {np.median(again):,.0f} | {np.quantile(again, 0.99):,.0f} "
                f"| {again.max():,.0f} | {apply_ms:.2f} |"
            )
    return lines


def rate_table(model: ModelConfig, num_plain: int, num_others: int, num_steps: int) -> list[str]:
    """Return the lines of the second table."""
    engine = load_engine(model, EngineConfig(prefix_cache=False), ignore_progress)
    grammar = _HEAD + json_expression({"type": "array", "items": {"type": "string"}})
    company: dict[str, list[str | None]] = {
        "none": [],
        "plain rows": [None] * num_others,
        "rows with a grammar": [grammar] * num_others,
    }
    found: dict[str, list[float]] = {name: [] for name in company}
    for _ in range(3):
        for name, others in company.items():
            found[name].append(step_seconds(engine, [None] * num_plain + others, num_steps))
    engine.close()
    lines = [
        f"| {num_plain} plain rows, beside {num_others} | step, best of 3, ms | tokens/s a row |",
        "|---|---:|---:|",
    ]
    for name, seconds in found.items():
        # Whatever else the machine does only adds to a time.
        best = min(seconds)
        lines.append(f"| {name} | {best * 1e3:.1f} | {1 / best:.1f} |")
    return lines


@click.command()
@click.argument("model", default="demo")
@click.option("--vocab", "vocab_size", default=151_936, show_default=True)
@click.option("--rows", "rows", default=(1, 8), multiple=True, show_default=True)
@click.option("--repeats", "num_repeats", default=5, show_default=True)
@click.option("--plain", "num_plain", default=8, show_default=True)
@click.option("--others", "num_others", default=4, show_default=True)
@click.option("--steps", "num_steps", default=30, show_default=True)
def main(
    model: str,
    vocab_size: int,
    rows: tuple[int, ...],
    num_repeats: int,
    num_plain: int,
    num_others: int,
    num_steps: int,
) -> None:
    """Print the time of a row's mask, and the rate of plain rows beside rows with a grammar."""
    require_backend()
    config = ModelConfig(model=model)
    folder = resolve_model(config, ignore_progress)
    click.echo(f"device: {device_name()}; masks over a vocabulary of {vocab_size:,}")
    click.echo("")
    click.echo("\n".join(mask_table(folder, vocab_size, rows, num_repeats)))
    click.echo("")
    click.echo("\n".join(rate_table(config, num_plain, num_others, num_steps)))


if __name__ == "__main__":
    main()
