"""Compare token lists from their beginning; pure."""

from __future__ import annotations

from collections.abc import Sequence


def common_length(left: Sequence[int], right: Sequence[int]) -> int:
    """Count the tokens that two lists begin with alike."""
    shorter = min(len(left), len(right))
    return next((index for index in range(shorter) if left[index] != right[index]), shorter)
