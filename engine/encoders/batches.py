"""Put token lists of like length into batches whose padded size is bounded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

#: Most tokens of one batch, padding included.
MAX_PADDED_TOKENS = 4096


def batches(
    lengths: Sequence[int], max_padded_tokens: int = MAX_PADDED_TOKENS
) -> Iterator[list[int]]:
    """Yield the indices of each batch, the longest first; each index comes once.

    A batch's longest times its number is at most `max_padded_tokens`, but for a single one that is
    longer. Longest first: what does not fit into memory fails at once.
    """
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    batch: list[int] = []
    for index in order:
        if batch and lengths[batch[0]] * (len(batch) + 1) > max_padded_tokens:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch
