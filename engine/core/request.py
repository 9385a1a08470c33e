"""What a client asked for, as frozen messages that cross the process boundary unchanged."""

from __future__ import annotations

import msgspec


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Say how one request's tokens are drawn and when they end.

    All values are resolved: defaults of the request, the flags and the model have been applied.
    """

    #: 0 is greedy (argmax).
    temperature: float = 1.0
    top_p: float = 1.0
    #: 0 keeps every token.
    top_k: int = 0
    min_p: float = 0.0
    #: None lets the engine draw one; the noise of a row depends on seed and position only.
    seed: int | None = None
    #: Most tokens to generate.
    max_tokens: int = 16
    #: No end-of-sequence token, stop id or stop string ends the row before this many tokens.
    min_tokens: int = 0
    #: Stop strings; the match and what follows are not part of the text.
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    #: Generate on through the model's end-of-sequence tokens.
    ignore_eos: bool = False


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Ask for the continuation of one prompt.

    `prompt` holds the token ids as little-endian int32 (`pack_tokens`): decoding a list of 100k
    Python integers would stall the step loop for milliseconds.
    """

    request_id: str
    prompt: bytes
    sampling: SamplingParams
    #: Higher runs first; equal priorities run in order of arrival.
    priority: int = 0
    #: Output is sent at most once per this many tokens (and always at the end).
    stream_interval: int = 1
