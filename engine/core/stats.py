"""Snapshots of what the engine has done and is doing, for status pages and metrics."""

from __future__ import annotations

from typing import Literal

import msgspec

Phase = Literal["queued", "prefill", "generation"]


class RequestStats(msgspec.Struct, frozen=True, kw_only=True):
    """Say how far one open request has come. Times are seconds on the engine's clock."""

    request_id: str
    phase: Phase
    num_prompt_tokens: int
    #: Prompt tokens whose KV is there, computed or restored.
    num_prefilled_tokens: int
    num_cached_tokens: int
    num_completion_tokens: int
    max_tokens: int
    #: Seconds since the request was added.
    age_s: float
    #: Seconds from adding to the first token; None before it.
    ttft_s: float | None = None
    #: Seconds since the first token; None before it.
    generation_s: float | None = None
    num_preemptions: int = 0


class DeviceMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Say what MLX holds on its device, in bytes."""

    active_bytes: int
    peak_bytes: int
    cache_bytes: int


class PrefixStats(msgspec.Struct, frozen=True, kw_only=True):
    """Say what the prefix store holds and what requests found in it. Tokens are prompt tokens."""

    num_blocks: int = 0
    num_bytes: int = 0
    max_bytes: int = 0
    #: Prompt tokens that were found and not computed, and that were asked for.
    hit_tokens: int = 0
    query_tokens: int = 0
    num_evicted: int = 0


class EngineStats(msgspec.Struct, frozen=True, kw_only=True, tag="engine_stats"):
    """Say what one engine has done since it was loaded, and its open requests."""

    steps_executed: int = 0
    num_running: int = 0
    num_waiting: int = 0
    requests_finished: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    #: Prompt tokens that a forward pass really computed.
    prefilled_tokens: int = 0
    num_preemptions: int = 0
    #: Allocated and largest allowed bytes of KV.
    kv_bytes: int = 0
    kv_budget_bytes: int = 0
    memory: DeviceMemory | None = None
    #: None where no prefix is ever stored.
    prefixes: PrefixStats | None = None
    requests: tuple[RequestStats, ...] = ()
