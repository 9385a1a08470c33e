"""What the engine says of each request after a step, as frozen messages."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable
from typing import Literal

import msgspec

from vllm_mlx.engine.core.logprobs import Logprobs
from vllm_mlx.engine.errors import RequestError, RowFailedError, VllmMlxError, error_classes

FinishReason = Literal["stop", "length", "abort", "error"]


class ErrorInfo(msgspec.Struct, frozen=True):
    """Carry one error of the tree across the process boundary."""

    code: str
    message: str
    param: str | None = None
    retry_after_s: float | None = None

    @classmethod
    def of(cls, error: BaseException) -> ErrorInfo:
        """Describe `error`; one that is not ours becomes a failed row."""
        if isinstance(error, RequestError):
            return cls(error.code, error.message, error.param, error.retry_after_s)
        if isinstance(error, VllmMlxError):
            return cls(error.code, error.message)
        return cls(RowFailedError.code, f"{type(error).__name__}: {error}")

    def to_error(self) -> VllmMlxError:
        """Rebuild the exception; an unknown code becomes `RowFailedError`."""
        kind = error_classes().get(self.code, RowFailedError)
        if issubclass(kind, RequestError):
            return kind(self.message, param=self.param, retry_after_s=self.retry_after_s)
        return kind(self.message)


class RowTimings(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Say how long the parts of a row took, in seconds on the engine's clock.

    A part that the row did not get to is None; a preemption's time counts to the part it fell in.
    """

    #: From its arrival at the engine to the first step that computed for it.
    queue_s: float | None = None
    #: From there to its first token.
    prefill_s: float | None = None
    #: From its first token to its last.
    decode_s: float | None = None


class RowOutput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Carry what is new for one request; exactly one per request has a `finish_reason`."""

    request_id: str
    #: New text, safe to show: no special token but `shown_tokens`, no part of a stop string.
    text: str = ""
    #: New token ids, those that ended the row included, as little-endian int32.
    token_ids: bytes = b""
    #: Of the tokens whose text is sent up to here, where the request asked; see `OutputProcessor`.
    logprobs: Logprobs | None = None
    #: Of the prompt's tokens but its first, once, with the first output of a request that asked.
    prompt_logprobs: Logprobs | None = None
    finish_reason: FinishReason | None = None
    #: The stop string or token id that ended the row; None for end of sequence.
    stop_reason: str | int | None = None
    #: Set exactly when `finish_reason` is `error`.
    error: ErrorInfo | None = None
    num_prompt_tokens: int = 0
    #: Prompt tokens that were really not computed.
    num_cached_tokens: int = 0
    #: Prompt tokens that were computed and put into the prefix store, which had not had them.
    num_stored_tokens: int = 0
    #: Tokens generated so far.
    num_completion_tokens: int = 0
    #: Of those, the ones that were drawn within reasoning, its end's marker included.
    num_reasoning_tokens: int = 0
    #: Where the prompt departs from what is stored; looked for only while logging for debugging.
    departs_at: int | None = None
    #: With the final output, where the engine itself has made it.
    timings: RowTimings | None = None


class StepOutputs(msgspec.Struct, frozen=True, kw_only=True, tag="step_outputs"):
    """Carry the deltas of all rows of one step."""

    rows: tuple[RowOutput, ...] = ()


#: Bytes of one packed token.
TOKEN_BYTES = 4


def pack_tokens(token_ids: Iterable[int]) -> bytes:
    """Pack token ids as little-endian int32."""
    packed = array("i", token_ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_tokens(packed: bytes) -> list[int]:
    """Unpack what `pack_tokens` packed."""
    tokens = array("i")
    tokens.frombytes(packed)
    if sys.byteorder == "big":
        tokens.byteswap()
    return tokens.tolist()
