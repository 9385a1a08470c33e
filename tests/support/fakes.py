"""Small real stand-ins for what the pure core works with: a space of bytes, and requests."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from vllm_mlx.engine.core.outputs import pack_tokens
from vllm_mlx.engine.core.request import GenerationRequest, SamplingParams
from vllm_mlx.engine.core.sequence import Sequence


class FakeKVSpace:
    """Count one byte a token; a row reserves what it starts with and grows by its own need."""

    def __init__(self, capacity: int = 1 << 30) -> None:
        self.capacity = capacity
        self.rows: dict[str, int] = {}
        self.joined: set[str] = set()

    @property
    def allocated_bytes(self) -> int:
        """Return the tokens that all rows hold."""
        return sum(self.rows.values())

    def _fits(self, row_id: str | None, num_tokens: int) -> bool:
        others = sum(held for row, held in self.rows.items() if row != row_id)
        return others == 0 or others + num_tokens <= self.capacity

    def can_start(self, num_tokens: int) -> bool:
        """Say whether a new row fits."""
        return self._fits(None, num_tokens)

    def start(self, row_id: str, num_tokens: int) -> None:
        """Reserve a row."""
        assert row_id not in self.rows
        self.rows[row_id] = num_tokens

    def can_join(self, row_id: str, num_tokens: int) -> bool:
        """Say whether a row may join."""
        return self._fits(row_id, num_tokens)

    def join(self, row_id: str, num_tokens: int) -> None:
        """Put a row into the batch, holding only what it needs."""
        self.rows[row_id] = num_tokens
        self.joined.add(row_id)

    def can_grow(self, row_id: str, num_tokens: int) -> bool:
        """Say whether a row may grow."""
        return self._fits(row_id, max(num_tokens, self.rows[row_id]))

    def grow(self, row_id: str, num_tokens: int) -> None:
        """Let a row grow."""
        assert row_id in self.joined
        self.rows[row_id] = max(num_tokens, self.rows[row_id])

    def remove(self, row_id: str) -> None:
        """Free a row."""
        del self.rows[row_id]
        self.joined.discard(row_id)

    def tidy(self) -> None:
        """Have nothing to tidy."""


def make_sequence(
    name: str,
    prompt: int | Seq[int] = 4,
    *,
    arrival: int = 0,
    max_tokens: int = 16,
    priority: int = 0,
    client: str = "",
    max_model_len: int = 1 << 20,
    **sampling: object,
) -> Sequence:
    """Return a waiting sequence; an integer `prompt` is a length."""
    tokens = list(range(1, prompt + 1)) if isinstance(prompt, int) else list(prompt)
    params = SamplingParams(max_tokens=max_tokens, **sampling)  # type: ignore[arg-type]
    request = GenerationRequest(
        request_id=name,
        prompt=pack_tokens(tokens),
        sampling=params,
        priority=priority,
        client=client,
    )
    return Sequence.of(request, arrival=arrival, seed=0, max_model_len=max_model_len, now_s=0.0)
