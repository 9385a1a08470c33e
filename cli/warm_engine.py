"""Compute and store prefixes in this process, on a thread that Ctrl-C does not strike."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from vllm_mlx.cli.engine_thread import EngineThread, ProgressCallback, StepEngine
from vllm_mlx.cli.warm_plan import PlannedPrefix
from vllm_mlx.engine.config import EngineConfig, ModelConfig, ModelInfo
from vllm_mlx.engine.core.outputs import RowOutput, StepOutputs
from vllm_mlx.engine.core.request import GenerationRequest
from vllm_mlx.engine.core.stats import EngineStats
from vllm_mlx.engine.platform import require_backend
from vllm_mlx.server.warm_tokens import warm_request

#: How long the disk may take for one prefix.
STORE_TIMEOUT_S = 600.0
#: Closing stores what a prefix that was cut short has of whole blocks.
CLOSE_TIMEOUT_S = 15.0
_REPORT_S = 0.1

#: Called on the engine's thread with the tokens of the prompt at work that are there.
OnTokens = Callable[[int], None]


class PrefixEngine(StepEngine, Protocol):
    """Name what warming needs of an engine besides its steps."""

    def stats(self) -> EngineStats:
        """Return a snapshot."""
        ...

    def store_prefixes(self, timeout_s: float) -> bool:
        """Store durably what is worth it, and wait; return whether it is done."""
        ...


class StoringEngine:
    """Step an engine, and hand a final output out only when its prefix is on disk.

    Owned by the engine's thread; others may read `faults`.
    """

    def __init__(self, engine: PrefixEngine, on_tokens: OnTokens) -> None:
        self._engine = engine
        self._on_tokens = on_tokens
        self._reported_at = 0.0
        #: How often each kind of fault of the disk has occurred.
        self.faults: dict[str, int] = {}

    @property
    def info(self) -> ModelInfo:
        """Return what was loaded."""
        return self._engine.info

    @property
    def has_work(self) -> bool:
        """Say whether a step would do something."""
        return self._engine.has_work

    def add_request(self, request: GenerationRequest) -> None:
        """Take in one request."""
        self._engine.add_request(request)

    def abort(self, request_id: str) -> None:
        """End a request early."""
        self._engine.abort(request_id)

    def step(self) -> StepOutputs:
        """Compute one step; after the last of a request also store what it has computed."""
        outputs = self._engine.step()
        if any(row.finish_reason is not None for row in outputs.rows):
            self._engine.store_prefixes(STORE_TIMEOUT_S)
            prefixes = self._engine.stats().prefixes
            if prefixes is not None and prefixes.disk is not None:
                self.faults = prefixes.disk.faults
        elif time.monotonic() - self._reported_at >= _REPORT_S:
            self._reported_at = time.monotonic()
            self._on_tokens(sum(r.num_prefilled_tokens for r in self._engine.stats().requests))
        return outputs

    def close(self) -> None:
        """Store what is whole of a request that was cut short, and free the model."""
        self._engine.close()


class WarmingThread:
    """Own the thread of an engine that computes prefixes, one after the other."""

    def __init__(self, load: Callable[[ProgressCallback], PrefixEngine]) -> None:
        self._load = load
        self._on_tokens: OnTokens = lambda _: None
        self._engine: StoringEngine | None = None
        self._thread = EngineThread(self._load_storing)

    @property
    def faults(self) -> dict[str, int]:
        """Return how often each kind of fault of the disk has occurred."""
        return self._engine.faults if self._engine is not None else {}

    def start(self, on_progress: ProgressCallback) -> ModelInfo:
        """Load the engine; raise what loading raised."""
        return self._thread.start(on_progress)

    def warm(
        self, prefixes: Sequence[PlannedPrefix], on_done: OnTokens
    ) -> Iterator[tuple[PlannedPrefix, RowOutput]]:
        """Yield each prefix with its final output, once it is on disk.

        `on_done` is called, on either thread, with how many tokens of all are done.
        """
        done = 0
        for prefix in prefixes:
            self._on_tokens = functools.partial(_report_after, done, on_done)
            request = warm_request(prefix.blocks)
            self._thread.add(request)
            output = self._thread.next_output(request.request_id)
            while output.finish_reason is None:
                output = self._thread.next_output(request.request_id)
            done += len(prefix.blocks)
            on_done(done)
            yield prefix, output

    def close(self) -> bool:
        """Close the engine; return whether it has ended in time."""
        return self._thread.close(CLOSE_TIMEOUT_S)

    def _load_storing(self, on_progress: ProgressCallback) -> StepEngine:
        self._engine = StoringEngine(self._load(on_progress), lambda n: self._on_tokens(n))
        return self._engine


def _report_after(done: int, on_done: OnTokens, num_tokens: int) -> None:
    on_done(done + num_tokens)


def load_prefix_engine(
    model: ModelConfig, engine: EngineConfig
) -> Callable[[ProgressCallback], PrefixEngine]:
    """Return what loads the engine; MLX is imported on the thread that calls it."""

    def load(on_progress: ProgressCallback) -> PrefixEngine:
        # Before anything imports MLX, which binds its BLAS then.
        require_backend()
        from vllm_mlx.engine.models.loader import load_engine

        return load_engine(model, engine, on_progress)

    return load
