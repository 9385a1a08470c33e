"""Count the bytes that a model may use on this machine, and set MLX's own limits once.

Budgets are plain arithmetic over `MemoryLimits`; only the functions that say so import MLX.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import psutil

from vllm_mlx.engine.core.stats import DeviceMemory
from vllm_mlx.engine.errors import InsufficientMemoryError
from vllm_mlx.engine.platform import device_name

MIB = 1 << 20
GIB = 1 << 30

#: Part of what is available that is left to everybody else and to allocation slack.
_RESERVED_PART = 0.1
_MIN_RESERVED_BYTES = 256 * MIB
#: What is kept free while serving: below it the system itself begins to suffer.
_WATCHED_PART = 0.02
_MAX_WATCHED_BYTES = 512 * MIB
#: Freed buffers that MLX keeps for reuse: a part of the device, within bounds.
_CACHE_PART = 0.05
_MAX_CACHE_BYTES = 4 * GIB
#: The smallest KV budget that is worth loading a model for, in tokens.
MIN_KV_TOKENS = 512


class MemoryLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Say what this process may allocate where the model lives, in bytes."""

    #: What the device, or the control group, holds at most.
    total_bytes: int
    #: What is free now, buffers that MLX keeps for reuse included.
    available_bytes: int


class AttentionShape(msgspec.Struct, frozen=True, kw_only=True):
    """Give the widths of a model that size the temporary arrays of its prefill."""

    num_heads: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    itemsize: int
    #: False where scores are stored: on CPU, and for head sizes that the kernels do not take.
    is_fused: bool


def usable_bytes(limits: MemoryLimits) -> int:
    """Return how much of what is available may be planned with; a tenth stays free."""
    reserved = max(_MIN_RESERVED_BYTES, int(limits.total_bytes * _RESERVED_PART))
    return max(0, min(limits.available_bytes, limits.total_bytes) - reserved)


def default_kv_budget(
    limits: MemoryLimits, *, weights_bytes: int, transient_bytes: int, useful_bytes: int
) -> int:
    """Return the bytes that live KV may take by default.

    `weights_bytes` are those still to be loaded (0 once they are in memory), `transient_bytes` the
    temporary arrays of one prefill chunk, `useful_bytes` what all rows at full context would take.
    """
    free = usable_bytes(limits) - weights_bytes - transient_bytes
    return max(0, min(free, useful_bytes))


def require_fit(limits: MemoryLimits, *, load_bytes: int, kv_bytes_per_token: int) -> None:
    """Raise InsufficientMemoryError unless weights and `MIN_KV_TOKENS` of KV fit."""
    usable = usable_bytes(limits)
    if load_bytes + MIN_KV_TOKENS * kv_bytes_per_token > usable:
        raise InsufficientMemoryError(
            f"the weights take {format_bytes(load_bytes)} and {format_bytes(usable)} are usable: "
            "free memory, or choose a smaller or more strongly quantised model"
        )


def default_reserve_bytes(limits: MemoryLimits) -> int:
    """Return how much of the machine's memory is left to others when they come to need it."""
    return min(_MAX_WATCHED_BYTES, int(limits.total_bytes * _WATCHED_PART))


def prefill_transient_bytes(shape: AttentionShape, *, chunk_tokens: int, context: int) -> int:
    """Bound the temporary arrays of one prefill chunk that ends at `context` tokens.

    A layer holds its residual, two MLP activations and a few copies at once; attention that is not
    fused holds scores and probabilities of every head besides.
    """
    token_width = 6 * shape.hidden_size + 3 * shape.intermediate_size
    total = chunk_tokens * token_width * shape.itemsize
    if not shape.is_fused:
        total += 2 * shape.num_heads * chunk_tokens * context * shape.itemsize
    return total + shape.vocab_size * shape.itemsize


def cache_limit_bytes(total_bytes: int) -> int:
    """Return how many bytes of freed buffers MLX may keep for reuse."""
    return min(_MAX_CACHE_BYTES, int(total_bytes * _CACHE_PART))


def host_limits() -> MemoryLimits:
    """Return the main memory's limits: the machine's, or the control group's if lower."""
    memory = psutil.virtual_memory()
    total, available = memory.total, memory.available
    for limit, used in _control_group_memory():
        total = min(total, limit)
        available = min(available, max(0, limit - used))
    return MemoryLimits(total_bytes=total, available_bytes=available)


def device_limits() -> MemoryLimits:
    """Return the limits of the memory that MLX's default device computes in; imports MLX."""
    device = device_name()
    host = host_limits()
    if device == "cpu":
        return host
    import mlx.core as mx

    info = mx.device_info()
    held = mx.get_active_memory()
    if device == "gpu (Metal)":
        # Unified memory: what the system recommends at most, and what is really free of it.
        total = int(info.get("max_recommended_working_set_size", host.total_bytes))
        free = min(total - held, host.available_bytes + mx.get_cache_memory())
        return MemoryLimits(total_bytes=total, available_bytes=max(0, free))
    total = int(info.get("total_memory", info.get("memory_size", 0)))
    free = int(info.get("free_memory", total - held)) + mx.get_cache_memory()
    return MemoryLimits(total_bytes=total, available_bytes=max(0, min(free, total)))


def set_limits(limits: MemoryLimits) -> None:
    """Bound MLX's buffer cache and, on Metal, wire what the system recommends; imports MLX.

    Call it once, before anything is computed: moving the wired limit under running work is unsafe.
    MLX's own memory limit is left alone, since at that limit it waits instead of failing.
    """
    device = device_name()
    import mlx.core as mx

    mx.set_cache_limit(cache_limit_bytes(limits.total_bytes))
    if device == "gpu (Metal)":
        recommended = mx.device_info().get("max_recommended_working_set_size")
        if recommended is not None:
            mx.set_wired_limit(int(recommended))


def device_memory() -> DeviceMemory | None:
    """Return what MLX holds now, None in a process that has not imported it."""
    if "mlx.core" not in sys.modules:
        return None
    import mlx.core as mx

    return DeviceMemory(
        active_bytes=mx.get_active_memory(),
        peak_bytes=mx.get_peak_memory(),
        cache_bytes=mx.get_cache_memory(),
    )


def release_cached() -> None:
    """Give the buffers that MLX keeps for reuse back to the system; imports MLX."""
    import mlx.core as mx

    mx.clear_cache()


def format_bytes(num_bytes: float) -> str:
    """Return a size for people: three digits and a binary unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 999.5:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.3g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.3g} TiB"


def _control_group_memory(
    groups: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")
) -> list[tuple[int, int]]:
    """Return (limit, used) of each control group above this process that has a limit.

    File pages that the kernel can drop do not count as used.
    """
    try:
        lines = groups.read_text().splitlines()
    except OSError:
        return []  # not Linux
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            names = ("memory.max", "memory.current", "inactive_file")
            root = mount if (mount / "cgroup.controllers").exists() else mount / "unified"
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            root = mount / "memory"
        else:
            continue
        # Inside a container the path may be the host's; the mount then is the group itself.
        folder = root / path.lstrip("/")
        for candidate in (folder, *folder.parents):
            entry = _group_entry(candidate, *names)
            if entry is not None:
                found.append(entry)
            if candidate == root:
                break
    return found


def _group_entry(
    folder: Path, limit_name: str, used_name: str, droppable: str
) -> tuple[int, int] | None:
    try:
        limit = int((folder / limit_name).read_text())
        used = int((folder / used_name).read_text())
        statistics = dict(
            line.split(" ", 1) for line in (folder / "memory.stat").read_text().splitlines()
        )
        return limit, max(0, used - int(statistics.get(droppable, "0")))
    except (OSError, ValueError):
        return None  # no such group, or "max": no limit
