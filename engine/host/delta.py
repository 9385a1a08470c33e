"""Merging slot: what is new for one request, however many steps ago its reader last looked."""

from __future__ import annotations

import msgspec

from vllm_mlx.engine.core.logprobs import Logprobs
from vllm_mlx.engine.core.outputs import RowOutput


class DeltaSlot:
    """Merge the outputs of one request until somebody takes them.

    Both ends of the socket hold slots: the engine process for what the socket does not take yet,
    the HTTP process for what a client does not read yet. A slow reader so costs the text itself
    (at most `max_tokens` tokens of it), never one item a step. Owned by one thread.
    """

    __slots__ = ("_logprobs", "_newest", "_prompt_logprobs", "_texts", "_token_ids")

    def __init__(self) -> None:
        self._newest: RowOutput | None = None
        # Parts are joined by `take`: concatenating at every step would cost the square.
        self._texts: list[str] = []
        self._token_ids: list[bytes] = []
        self._logprobs: list[Logprobs] = []
        self._prompt_logprobs: Logprobs | None = None

    @property
    def is_empty(self) -> bool:
        """Say whether nothing has come since the last `take`."""
        return self._newest is None

    def put(self, row: RowOutput) -> None:
        """Add `row`, which is newer than what the slot holds; a final one must be the last.

        Texts, token ids and log-probabilities are concatenated, the prompt's log-probabilities
        are kept, and every other field is the newest's.
        """
        assert self._newest is None or self._newest.finish_reason is None, row.request_id
        self._newest = row
        self._texts.append(row.text)
        self._token_ids.append(row.token_ids)
        if row.logprobs is not None:
            self._logprobs.append(row.logprobs)
        if row.prompt_logprobs is not None:
            self._prompt_logprobs = row.prompt_logprobs

    def take(self) -> RowOutput:
        """Return everything merged as one output and empty the slot, which must hold something."""
        merged = self._newest
        assert merged is not None, "nothing to take"
        if len(self._texts) > 1:
            merged = msgspec.structs.replace(
                merged,
                text="".join(self._texts),
                token_ids=b"".join(self._token_ids),
                logprobs=Logprobs.joined(self._logprobs),
                prompt_logprobs=self._prompt_logprobs,
            )
        self._newest = self._prompt_logprobs = None
        self._texts.clear()
        self._token_ids.clear()
        self._logprobs.clear()
        return merged
