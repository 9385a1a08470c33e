"""`GET /v1/status`: what the server and its engine have done and are doing."""

from __future__ import annotations

import time
from typing import Any

import msgspec
from quart import Response

from vllm_mlx.engine.core.stats import (
    DeviceMemory,
    EngineStats,
    MemoryPressure,
    PrefixStats,
    RequestStats,
)
from vllm_mlx.server.replies import json_response
from vllm_mlx.server.runtime import ServerRuntime
from vllm_mlx.server.services.hosted import HostedService

_GB = 1e9
_MB = 1e6


class StatusRoute:
    """Report the server's state; it answers in every phase, with what is known."""

    def __init__(self, runtime: ServerRuntime) -> None:
        self._runtime = runtime

    async def status(self) -> Response:
        """Describe server, engine and open requests."""
        runtime = self._runtime
        stats = None
        if runtime.is_ready:
            stats = await runtime.generations.progress.glance()
        totals = runtime.generations.totals
        known = runtime.generations.up_to_date(stats or EngineStats())
        memory = _memory_fields(known.memory)
        device = runtime.served.info.device if runtime.served is not None else None
        return json_response(
            {
                "status": self._status_word(),
                "model": runtime.names.primary if runtime.served is not None else None,
                "uptime_s": round(time.monotonic() - runtime.started, 3),
                "steps_executed": known.steps_executed,
                "num_running": known.num_running,
                "num_waiting": known.num_waiting,
                "total_requests_processed": totals.requests,
                "total_prompt_tokens": totals.prompt_tokens,
                "total_cached_tokens": totals.cached_tokens,
                "total_completion_tokens": totals.completion_tokens,
                "metal": memory if device is not None and "Metal" in device else None,
                "device": {"name": device, **(memory or {})},
                "memory": _pressure_fields(known.memory_pressure),
                "cache": cache_fields(known.prefixes),
                "requests": [_request_fields(request) for request in known.requests],
                "engine": self._engine_fields(known, has_answered=stats is not None),
                "services": [_service_fields(service) for service in runtime.services],
                "parsers": self._parser_fields(),
                "unknown_fields": dict(runtime.unknown_fields.counts),
            }
        )

    def _status_word(self) -> str:
        """Return the API's own word for the engine's phase."""
        phase = self._runtime.engine.state.phase
        if self._runtime.is_ready or phase == "draining":
            return "running"
        if not self._runtime.config.serves_chat:
            return "running" if self._runtime.is_serving else "not_loaded"
        return "stopped" if phase in ("failed", "stopped") else "not_loaded"

    def _parser_fields(self) -> dict[str, Any] | None:
        """Say what answers to chats are read with, and why."""
        if self._runtime.served is None:
            return None
        formats = self._runtime.served.formats
        return {
            "tool_call_parser": formats.tools,
            "reasoning_parser": formats.reasoning,
            "reason": formats.reason,
        }

    def _engine_fields(self, stats: EngineStats, *, has_answered: bool) -> dict[str, Any]:
        condition = self._runtime.engine.state
        fields: dict[str, Any] = {
            "phase": condition.phase,
            "pid": condition.pid,
            "restarts": condition.num_restarts,
            "answers": has_answered and not stats.age_s,
            # How old what is said of its work is; None where nothing is known.
            "stats_age_s": round(stats.age_s, 3) if has_answered else None,
            "error": condition.error.message if condition.error is not None else None,
        }
        if self._runtime.served is None:
            return fields
        info = self._runtime.served.info
        return fields | {
            "model_type": info.model_type,
            "max_model_len": info.max_model_len,
            "dtype": info.dtype,
            "blas": info.blas,
            "weights_mb": info.weights_bytes / _MB,
            "kv_mb": stats.kv_bytes / _MB,
            "kv_budget_mb": info.kv_budget_bytes / _MB,
            "kv_bytes_per_token": info.kv_bytes_per_token,
            "prefilled_tokens": stats.prefilled_tokens,
            "preemptions": stats.num_preemptions,
        }


def _service_fields(service: HostedService) -> dict[str, Any]:
    """Describe an engine beside the chat model."""
    condition, info = service.port.state, service.port.info
    fields: dict[str, Any] = {
        "kind": service.kind,
        "model": service.names.primary,
        "phase": condition.phase,
        "pid": condition.pid,
        "restarts": condition.num_restarts,
        "num_open": service.port.num_open,
        "error": condition.error.message if condition.error is not None else None,
    }
    if condition.stage:
        fields |= {"stage": condition.stage, "progress": condition.fraction}
    if info is not None:
        fields |= {
            "model_type": info.model_type,
            "dtype": info.dtype,
            "device": info.device,
            "weights_mb": info.weights_bytes / _MB,
            **info.details,
        }
    return fields


def cache_fields(stats: PrefixStats | None) -> dict[str, Any]:
    """Describe the prefix store: what it holds and what part of the prompts it has spared."""
    if stats is None:
        return {"type": "none", "entries": 0, "hit_rate": 0.0, "memory_mb": 0.0}
    rate = stats.hit_tokens / stats.query_tokens if stats.query_tokens else 0.0
    return {
        "type": "block_tree",
        "entries": stats.num_blocks,
        "hit_rate": round(rate, 4),
        "memory_mb": stats.num_bytes / _MB,
        "max_memory_mb": stats.max_bytes / _MB,
        "hit_tokens": stats.hit_tokens,
        "query_tokens": stats.query_tokens,
        "evictions": stats.num_evicted,
        "ssd": msgspec.to_builtins(stats.disk) if stats.disk is not None else None,
    }


def _memory_fields(memory: DeviceMemory | None) -> dict[str, float] | None:
    if memory is None:
        return None
    return {
        "active_memory_gb": memory.active_bytes / _GB,
        "peak_memory_gb": memory.peak_bytes / _GB,
        "cache_memory_gb": memory.cache_bytes / _GB,
    }


def _pressure_fields(pressure: MemoryPressure) -> dict[str, Any]:
    """Describe the machine's memory: what is free, what is to stay so, and what is done."""
    return {
        "pressure": pressure.level,
        "free_gb": pressure.free_bytes / _GB,
        "reserve_gb": pressure.reserve_bytes / _GB,
        "refused": pressure.num_refused,
    }


def _request_fields(request: RequestStats) -> dict[str, Any]:
    """Describe one open request; a rate is None until there is one."""
    rate = None
    if request.generation_s:
        rate = request.num_completion_tokens / request.generation_s
    return {
        "request_id": request.request_id,
        "phase": request.phase,
        "tokens_per_second": rate,
        "ttft_s": request.ttft_s,
        "progress": min(1.0, request.num_completion_tokens / max(1, request.max_tokens)),
        "cache_hit_type": request.cache_hit_type,
        "cached_tokens": request.num_cached_tokens,
        "generated_tokens": request.num_completion_tokens,
        "max_tokens": request.max_tokens,
        "prompt_tokens": request.num_prompt_tokens,
        "prefilled_tokens": request.num_prefilled_tokens,
        "elapsed_s": request.age_s,
        "preemptions": request.num_preemptions,
    }
