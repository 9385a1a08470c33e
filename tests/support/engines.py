"""Engines over tiny models, and a driver that runs requests through them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generate_step
from support.tiny_models import KINDS, VOCAB_SIZE, make_tiny_model

from vllm_mlx.engine.config import EngineConfig, ModelInfo
from vllm_mlx.engine.core.grammar import GrammarTokens
from vllm_mlx.engine.core.logprobs import Logprobs, TokenLogprob
from vllm_mlx.engine.core.memory_guard import MemoryGuard
from vllm_mlx.engine.core.outputs import RowOutput, pack_tokens, unpack_tokens
from vllm_mlx.engine.core.request import GenerationRequest, SamplingParams
from vllm_mlx.engine.engine import Engine
from vllm_mlx.engine.kv.block_hash import Namespace
from vllm_mlx.engine.kv.spill import Spill
from vllm_mlx.engine.models.assembly import assemble_engine
from vllm_mlx.engine.models.probe import Probe, probe_model

#: Greedy tokens may differ only where the two best logits are closer than this.
TIE = 1e-3


class SpelledTokens:
    """Decode each token as its number and a space."""

    def add(self, token_id: int) -> str:
        """Return the token's number."""
        return f"{token_id} "

    def flush(self) -> str:
        """Hold nothing back."""
        return ""


def tiny_namespace(kind: str, block_size: int = 64) -> Namespace:
    """Return the namespace of a tiny model's prefixes."""
    return Namespace(weights=kind, kv_dtype="float32", block_size=block_size)


@cache
def tiny_model(kind: str) -> tuple[Any, Probe]:
    """Return the tiny model of a kind, probed; made once."""
    model = make_tiny_model(kind)
    return model, probe_model(model, KINDS[kind]["model_type"], max_token=VOCAB_SIZE)


def make_info(
    kind: str,
    *,
    kv_budget_bytes: int = 1 << 40,
    max_model_len: int = 4096,
    eos: tuple[int, ...] = (),
) -> ModelInfo:
    """Return what a loader would say of a tiny model."""
    return ModelInfo(
        model=kind,
        path="",
        model_type=KINDS[kind]["model_type"],
        max_model_len=max_model_len,
        dtype="float32",
        weights_bytes=0,
        kv_bytes_per_token=0,
        kv_budget_bytes=kv_budget_bytes,
        kv_max_tokens=0,
        device="cpu",
        eos_token_ids=eos,
    )


def make_engine(
    kind: str = "full",
    *,
    max_num_seqs: int = 16,
    prefill_tokens_per_step: int = 512,
    target_itl_s: float | None = None,
    admission_headroom_tokens: int = 512,
    make_decoder: Callable[[], Any] = SpelledTokens,
    model: Any = None,
    namespace: Namespace | None = None,
    spill: Spill | None = None,
    cache_memory_bytes: int | None = None,
    grammar_tokens: GrammarTokens | None = None,
    guard: MemoryGuard | None = None,
    **info: Any,
) -> Engine:
    """Return an engine over a tiny model; `model` wraps or replaces the model's own forward."""
    tiny, probe = tiny_model(kind)
    config = EngineConfig(
        max_num_seqs=max_num_seqs,
        prefill_tokens_per_step=prefill_tokens_per_step,
        target_itl_s=target_itl_s,
        admission_headroom_tokens=admission_headroom_tokens,
        cache_memory_bytes=cache_memory_bytes,
    )
    return assemble_engine(
        model or tiny,
        probe,
        make_info(kind, **info),
        config,
        make_decoder,
        namespace=namespace,
        spill=spill,
        grammar_tokens=grammar_tokens,
        guard=guard,
    )


@dataclass
class Finished:
    """Gather everything that one request was sent."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    final: RowOutput | None = None
    num_finals: int = 0
    logprobs: list[Logprobs] = field(default_factory=list)
    prompt_logprobs: list[Logprobs] = field(default_factory=list)

    def take(self, output: RowOutput) -> None:
        """Add one output."""
        assert self.final is None, "an output after the final one"
        self.tokens += unpack_tokens(output.token_ids)
        self.text += output.text
        self.logprobs += [output.logprobs] if output.logprobs is not None else []
        self.prompt_logprobs += [output.prompt_logprobs] if output.prompt_logprobs else []
        if output.finish_reason is not None:
            self.final = output
            self.num_finals += 1

    def logprob_entries(self) -> list[TokenLogprob]:
        """Return the log-probabilities of the answer's tokens."""
        return [entry for part in self.logprobs for entry in part.unpack()]


class Driver:
    """Step an engine and gather outputs by request."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.results: dict[str, Finished] = {}

    def add(self, name: str, prompt: Sequence[int], **sampling: Any) -> None:
        """Add a request; greedy unless told otherwise."""
        sampling.setdefault("temperature", 0.0)
        own = ("priority", "stream_interval", "is_warm")
        extra = {name: sampling.pop(name) for name in own if name in sampling}
        self.results[name] = Finished()
        self.engine.add_request(
            GenerationRequest(
                request_id=name,
                prompt=pack_tokens(prompt),
                sampling=SamplingParams(**sampling),
                **extra,
            )
        )

    def step(self) -> list[RowOutput]:
        """Step once."""
        rows = self.engine.step().rows
        for row in rows:
            self.results[row.request_id].take(row)
        return list(rows)

    def run(self, max_steps: int = 20_000) -> dict[str, Finished]:
        """Step until there is nothing to do, and check that each request ended exactly once."""
        for _ in range(max_steps):
            if not self.engine.has_work:
                break
            self.step()
        else:
            raise AssertionError("the engine does not come to rest")
        assert all(result.num_finals == 1 for result in self.results.values())
        return self.results


def random_prompt(length: int, seed: int) -> list[int]:
    """Return random token ids of the tiny vocabulary."""
    rng = random.Random(f"{length}-{seed}")
    return [rng.randrange(VOCAB_SIZE) for _ in range(length)]


@cache
def reference(kind: str, prompt: tuple[int, ...], max_tokens: int) -> tuple[list[int], list[float]]:
    """Return mlx-lm's own greedy tokens, and how far apart the two best logits were at each."""
    model, _ = tiny_model(kind)
    tokens, gaps = [], []
    for token, logprobs in generate_step(mx.array(prompt), model, max_tokens=max_tokens):
        best = mx.sort(logprobs)[-2:]
        tokens.append(int(token))
        gaps.append(float((best[1] - best[0]).item()))
    return tokens, gaps


def differences(
    kind: str, prompt: Sequence[int], tokens: Sequence[int]
) -> tuple[list[str], list[str]]:
    """Compare tokens with mlx-lm's: (real differences, differences at a tie)."""
    expected, gaps = reference(kind, tuple(prompt), len(tokens))
    for index, (got, want, gap) in enumerate(zip(tokens, expected, gaps, strict=True)):
        if got != want:
            text = f"{kind}, {len(prompt)} tokens: token {index} is {got}, not {want} ({gap:.2g})"
            return ([], [text]) if gap < TIE else ([text], [])
    return [], []


def lengths_around_blocks(multiples: Iterable[int] = (1, 2, 3), block: int = 64) -> list[int]:
    """Return prompt lengths of 0, 1 and -1 modulo a block, and the two shortest."""
    around = {m * block + d for m in multiples for d in (-1, 0, 1)}
    return sorted({1, 2} | around)
