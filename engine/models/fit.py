"""Plan what fits beside the weights, and say it in a few lines before loading."""

from __future__ import annotations

from vllm_mlx.engine.config import EngineConfig
from vllm_mlx.engine.errors import InsufficientMemoryError
from vllm_mlx.engine.kv.slot_plan import MIN_CAPACITY
from vllm_mlx.engine.memory import (
    MIN_KV_TOKENS,
    MemoryLimits,
    default_kv_budget,
    format_bytes,
    prefill_transient_bytes,
    require_fit,
)
from vllm_mlx.engine.models.summary import CheckpointSummary

#: The default budget leaves room for a chunk of a prompt this long; admission counts longer ones.
PLANNED_CONTEXT = 8192


def plan_kv_budget(
    summary: CheckpointSummary,
    engine: EngineConfig,
    limits: MemoryLimits,
    *,
    is_loaded: bool = False,
) -> int:
    """Return the bytes of live KV: the user's own, else what is safe beside the weights.

    `is_loaded` says that `limits` were taken with the weights in memory. Raises
    InsufficientMemoryError if the weights, or a user's budget beside them, do not fit.
    """
    weights = 0 if is_loaded else summary.load_bytes
    require_fit(limits, load_bytes=weights, kv_bytes_per_token=summary.kv_bytes_per_token)
    if engine.kv_memory_bytes is not None:
        free = max(0, limits.available_bytes - weights)
        if engine.kv_memory_bytes > free:
            raise InsufficientMemoryError(
                f"a KV budget of {format_bytes(engine.kv_memory_bytes)} does not fit: "
                f"{format_bytes(free)} are free beside the weights"
            )
        return engine.kv_memory_bytes
    transient = prefill_transient_bytes(
        summary.attention,
        chunk_tokens=engine.prefill_tokens_per_step,
        context=min(summary.context_length, PLANNED_CONTEXT),
    )
    budget = default_kv_budget(
        limits,
        weights_bytes=weights,
        transient_bytes=transient,
        useful_bytes=engine.max_num_seqs * row_bytes(summary, summary.context_length)
        + prefix_bytes(engine, limits),
    )
    if budget < row_bytes(summary, min(MIN_KV_TOKENS, summary.context_length)):
        raise InsufficientMemoryError(
            f"{format_bytes(budget)} are left for KV beside the weights and a prefill chunk of "
            f"{engine.prefill_tokens_per_step} tokens: free memory or choose a smaller model"
        )
    return budget


def prefix_bytes(engine: EngineConfig, limits: MemoryLimits) -> int:
    """Return the most bytes that prefixes may take, beside rows and within the same budget."""
    if not engine.prefix_cache:
        return 0
    if engine.cache_memory_bytes is not None:
        return engine.cache_memory_bytes
    return int(limits.total_bytes * engine.cache_memory_fraction)


def row_bytes(summary: CheckpointSummary, num_tokens: int) -> int:
    """Return what one row of `num_tokens` takes, allocation slack not counted."""
    return summary.state_bytes_per_row + num_tokens * summary.kv_bytes_per_token


def rows_that_fit(summary: CheckpointSummary, budget_bytes: int, num_tokens: int) -> int:
    """Return how many rows of `num_tokens` each the budget holds."""
    return budget_bytes // max(1, row_bytes(summary, num_tokens))


def context_that_fits(summary: CheckpointSummary, budget_bytes: int, num_rows: int) -> int:
    """Return how many tokens each of `num_rows` rows can have within the budget."""
    share = budget_bytes // num_rows - summary.state_bytes_per_row
    if summary.kv_bytes_per_token == 0:
        return summary.context_length if share >= 0 else 0
    return max(0, min(summary.context_length, share // summary.kv_bytes_per_token))


def fit_lines(summary: CheckpointSummary, budget_bytes: int, max_num_seqs: int) -> list[str]:
    """Return what people are told before loading: weights, KV, rows and context that fit."""
    weights = f"weights  {format_bytes(summary.load_bytes)} in memory as {_kind(summary)}"
    if summary.load_bytes != summary.weights_bytes:
        stored = summary.quantization or "another dtype"
        weights += f" (stored: {format_bytes(summary.weights_bytes)}, {stored})"
    per_token = f"{format_bytes(summary.kv_bytes_per_token)} a token"
    if summary.state_bytes_per_row:
        per_token += f" and {format_bytes(summary.state_bytes_per_row)} a row"
    full_rows = min(max_num_seqs, rows_that_fit(summary, budget_bytes, summary.context_length))
    # No row is smaller than the smallest group's capacity.
    num_rows = min(max_num_seqs, rows_that_fit(summary, budget_bytes, MIN_CAPACITY))
    fits = f"fits     {_rows(full_rows)} at the full context of {summary.context_length:,} tokens"
    if full_rows < num_rows:
        each = context_that_fits(summary, budget_bytes, num_rows)
        fits += f", or {_rows(num_rows)} of {each:,} each"
    return [weights, f"KV       {per_token}, budget {format_bytes(budget_bytes)}", fits]


def _kind(summary: CheckpointSummary) -> str:
    if summary.quantization is None or summary.dequantizes:
        return summary.dtype
    return f"{summary.quantization}, {summary.dtype}"


def _rows(count: int) -> str:
    return f"{count} row" if count == 1 else f"{count} rows"
