"""Drive this engine and mlx-lm's generators alike: add prompts, step, and see who got a token."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import mlx.core as mx
from mlx_lm.generate import BatchGenerator, generate_step

from vllm_mlx.engine.core.outputs import pack_tokens
from vllm_mlx.engine.core.request import GenerationRequest, SamplingParams
from vllm_mlx.engine.engine import Engine
from vllm_mlx.engine.models.flat_rows import StockRows

#: More than is ever drawn of a row.
_ENDLESS = 1 << 20


class Contender(Protocol):
    """Generate greedily for several rows, none of which ends by itself."""

    @property
    def max_rows(self) -> int | None:
        """Return how many rows it can have at once; None for any number."""
        ...

    def add(self, prompt: Sequence[int]) -> str:
        """Begin a row, and return what it is called."""
        ...

    def step(self) -> list[str]:
        """Do one step, and return the rows that got a token."""
        ...

    def remove(self, row: str) -> None:
        """End a row; at most one step more is done for it."""
        ...


class EngineContender:
    """Drive this engine, text and bookkeeping of a real server's rows included."""

    max_rows = None

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._numbers = itertools.count()

    def add(self, prompt: Sequence[int]) -> str:
        """Begin a row."""
        row = f"row-{next(self._numbers)}"
        sampling = SamplingParams(temperature=0.0, max_tokens=_ENDLESS, ignore_eos=True)
        self._engine.add_request(
            GenerationRequest(request_id=row, prompt=pack_tokens(prompt), sampling=sampling)
        )
        return row

    def step(self) -> list[str]:
        """Do one step of the engine."""
        rows = self._engine.step().rows
        failed = [row for row in rows if row.error is not None]
        if failed:
            raise RuntimeError(f"{failed[0].request_id} failed: {failed[0].error}")
        return [row.request_id for row in rows if row.token_ids]

    def remove(self, row: str) -> None:
        """End a row."""
        self._engine.abort(row)


class BatchContender:
    """Drive mlx-lm's `BatchGenerator` with its own settings."""

    max_rows = None

    def __init__(self, model: Any, num_rows: int) -> None:
        self._generator = BatchGenerator(model, max_tokens=_ENDLESS, completion_batch_size=num_rows)
        self._stock = StockRows(model)

    def add(self, prompt: Sequence[int]) -> str:
        """Begin a row."""
        return str(self._generator.insert([list(prompt)])[0])

    def step(self) -> list[str]:
        """Do one step of the generator."""
        with self._stock:
            return [str(response.uid) for response in self._generator.next()[1]]

    def remove(self, row: str) -> None:
        """End a row."""
        self._generator.remove([int(row)])


class SingleContender:
    """Drive mlx-lm's `generate_step`, which has one row."""

    max_rows = 1

    def __init__(self, model: Any) -> None:
        self._model = model
        self._tokens: Iterator[Any] | None = None

    def add(self, prompt: Sequence[int]) -> str:
        """Begin the row."""
        assert self._tokens is None, "there is a row already"
        self._tokens = generate_step(mx.array(list(prompt)), self._model, max_tokens=-1)
        return "row"

    def step(self) -> list[str]:
        """Draw one token; the first time the prompt is computed whole."""
        if self._tokens is None:
            return []
        next(self._tokens)
        return ["row"]

    def remove(self, row: str) -> None:
        """End the row."""
        del row  # there is one
        self._tokens = None


#: Makes each contender anew for a cell, from how many rows it will have.
ContenderMaker = Callable[[int], Contender]


def contender_makers(model: Any, engine: Engine) -> dict[str, ContenderMaker]:
    """Return who competes, by name; the two that every cell compares come first."""
    return {
        "this engine": lambda _: EngineContender(engine),
        "BatchGenerator": lambda num_rows: BatchContender(model, num_rows),
        "generate_step": lambda _: SingleContender(model),
    }
