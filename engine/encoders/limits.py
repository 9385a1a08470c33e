"""How long a text may be: of the model's positions, its own settings and the user's flag."""

from __future__ import annotations

from vllm_mlx.engine.errors import ContextLengthExceededError, UsageError

#: Room for the special tokens of a pair, and one token of each text.
_MIN_LENGTH = 6


def length_limit(positions: int, stated: int | None, asked: int | None) -> int:
    """Return the longest text in tokens: what the user asks, or else what the model states.

    Raises `UsageError` for more than the model has positions, or less than makes sense.
    """
    if asked is None:
        return min(positions, stated or positions)
    if not _MIN_LENGTH <= asked <= positions:
        raise UsageError(
            f"the longest text must be {_MIN_LENGTH} to {positions} tokens for this model, not "
            f"{asked}"
        )
    return asked


def check_length(num_tokens: int, limit: int, param: str) -> None:
    """Raise `ContextLengthExceededError` for a text that is longer than the model reads."""
    if num_tokens > limit:
        raise ContextLengthExceededError(
            f"{param} has {num_tokens} tokens; the model reads at most {limit}. Shorten it, or "
            "start the server with --embedding-overflow-policy truncate",
            param=param,
        )
