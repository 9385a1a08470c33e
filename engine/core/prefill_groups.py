"""Decide which prompts' chunks are computed in one forward; pure."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_mlx.engine.core.scheduler import PrefillChunk

#: Longer chunks fill the device alone, and gain nothing from company.
MAX_GROUPED_TOKENS = 128
#: Most padded tokens of a group, as a multiple of its real ones.
MAX_PADDING = 1.25


def group_chunks(chunks: Sequence[PrefillChunk]) -> list[list[PrefillChunk]]:
    """Put short chunks that begin at the same position together, the longest first in each group.

    A forward pads its rows to the longest on the right, where causal attention hides it; so only
    chunks of like length share one. Chunks whose prompt is scored stay alone.
    """
    groups: list[list[PrefillChunk]] = []
    for chunk in sorted(chunks, key=lambda c: (c.start, c.start - c.stop)):
        last = groups[-1] if groups else []
        if last and _may_share(last, chunk):
            last.append(chunk)
        else:
            groups.append([chunk])
    return groups


def _may_share(group: Sequence[PrefillChunk], chunk: PrefillChunk) -> bool:
    first = group[0]
    if first.start != chunk.start or not 1 < first.size <= MAX_GROUPED_TOKENS:
        return False
    if first.sequence.wants_prompt_logprobs or chunk.sequence.wants_prompt_logprobs:
        return False
    real = sum(member.size for member in group) + chunk.size
    return first.size * (len(group) + 1) <= MAX_PADDING * real
