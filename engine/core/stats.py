"""Snapshots of what the engine has done and is doing, for status pages and metrics."""

from __future__ import annotations

from typing import Literal

import msgspec

from vllm_mlx.engine.core.histogram import HistogramCounts

#: What the engine does about memory; each does what those before it do.
PressureName = Literal["none", "evict", "refuse", "preempt"]
Phase = Literal["queued", "prefill", "generation"]


#: How a prompt's whole blocks met the stored chains. `exact`: all found, and the stored chain ends
#: there. `supersequence`: all found, and a stored chain goes on. `prefix`: a stored chain was found
#: whole and the prompt goes on. `lcp`: a stored chain was found in part and goes on otherwise.
CacheHitType = Literal["exact", "supersequence", "prefix", "lcp", "miss"]


class RequestStats(msgspec.Struct, frozen=True, kw_only=True):
    """Say how far one open request has come. Times are seconds on the engine's clock."""

    request_id: str
    phase: Phase
    num_prompt_tokens: int
    #: Prompt tokens whose KV is there, computed or restored.
    num_prefilled_tokens: int
    num_cached_tokens: int
    #: None until it was looked for.
    cache_hit_type: CacheHitType | None = None
    num_completion_tokens: int
    max_tokens: int
    #: Seconds since the request was added.
    age_s: float
    #: Seconds from adding to the first token; None before it.
    ttft_s: float | None = None
    #: Seconds since the first token; None before it.
    generation_s: float | None = None
    num_preemptions: int = 0


class MemoryPressure(msgspec.Struct, frozen=True, kw_only=True):
    """Say how short the machine is of memory, and what came of it."""

    level: PressureName = "none"
    #: Of the machine, in bytes, when it was last looked at.
    free_bytes: int = 0
    reserve_bytes: int = 0
    #: Requests refused for want of memory.
    num_refused: int = 0


class DeviceMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Say what MLX holds on its device, in bytes."""

    active_bytes: int
    peak_bytes: int
    cache_bytes: int


class DiskPrefixStats(msgspec.Struct, frozen=True, kw_only=True):
    """Say what the SSD tier holds, of all processes, and what this engine did with it."""

    num_runs: int = 0
    num_bytes: int = 0
    max_bytes: int | None = None
    #: Blocks handed over to be written, and blocks read back.
    num_spilled: int = 0
    num_restored: int = 0
    #: Restores not begun because computing was predicted to be faster.
    num_declined: int = 0
    written_bytes: int = 0
    read_bytes: int = 0
    #: Time that reading took, on all its threads together, checksums included.
    read_s: float = 0.0
    num_evicted: int = 0
    #: Runs that wait to be written, and runs dropped because too many did.
    num_queued: int = 0
    num_dropped: int = 0
    #: How often each kind of fault occurred; each was a miss or a run that was not stored.
    faults: dict[str, int] = {}


class PrefixStats(msgspec.Struct, frozen=True, kw_only=True):
    """Say what the prefix store holds and what requests found in it. Tokens are prompt tokens."""

    num_blocks: int = 0
    num_bytes: int = 0
    max_bytes: int = 0
    #: Prompt tokens that were found and not computed, and that were asked for.
    hit_tokens: int = 0
    query_tokens: int = 0
    num_evicted: int = 0
    block_size: int = 0
    #: Beginning of the digest that this model's prefixes are told by, and what it was called.
    namespace: str = ""
    label: str = ""
    #: None without an SSD tier.
    disk: DiskPrefixStats | None = None


class CacheCleared(msgspec.Struct, frozen=True, kw_only=True, tag="cache_cleared"):
    """Say what went when stored prefixes were removed."""

    #: Blocks that left RAM, and files that left the SSD.
    num_blocks: int = 0
    num_runs: int = 0
    #: Why files could not be removed; None if they were.
    fault: str | None = None


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
    #: Times between the tokens of each row, by `TOKEN_GAP_BOUNDS_S`.
    token_gaps: HistogramCounts | None = None
    #: Allocated and largest allowed bytes of KV.
    kv_bytes: int = 0
    kv_budget_bytes: int = 0
    memory: DeviceMemory | None = None
    memory_pressure: MemoryPressure = MemoryPressure()
    #: None where no prefix is ever stored.
    prefixes: PrefixStats | None = None
    requests: tuple[RequestStats, ...] = ()
    #: Seconds since the engine said this, where it has not answered since; 0 for an answer.
    age_s: float = 0.0
