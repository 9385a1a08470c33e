"""Try MLX out and print what it says of itself: `python -m vllm_mlx.engine.diagnosis`, as JSON.

Run it in a process of its own, with a time limit: a broken installation may crash or hang.
"""

from __future__ import annotations

import sys
import time

import msgspec

from vllm_mlx.engine.errors import BackendMissingError
from vllm_mlx.engine.memory import MemoryLimits, cache_limit_bytes, device_limits
from vllm_mlx.engine.platform import BlasInfo, device_name, load_blas, require_backend

EXIT_NO_BACKEND = 3

_SIZE = 512
_REPEATS = 3


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """Say what MLX computes with here, and that it does."""

    device: str
    #: What the device calls itself and holds, in MLX's own words; empty on a CPU.
    device_info: dict[str, str | int]
    blas: BlasInfo
    limits: MemoryLimits
    #: Freed buffers that the engine lets MLX keep.
    cache_limit_bytes: int
    #: What the engine wires, on Metal: the most that the system recommends.
    wired_limit_bytes: int | None
    #: Speed of a small float32 matrix product, and whether its result was right.
    gflops: float
    is_right: bool


def diagnose() -> Diagnosis:
    """Import MLX, ask it, and compute a little; raise `BackendMissingError` if it cannot."""
    blas = load_blas()
    require_backend()
    import mlx.core as mx

    device, limits = device_name(), device_limits()
    info = dict(mx.device_info()) if device != "cpu" else {}
    wired = info.get("max_recommended_working_set_size") if device == "gpu (Metal)" else None
    gflops, is_right = _product()
    return Diagnosis(
        device=device,
        device_info=info,
        blas=blas,
        limits=limits,
        cache_limit_bytes=cache_limit_bytes(limits.total_bytes),
        wired_limit_bytes=int(wired) if wired is not None else None,
        gflops=gflops,
        is_right=is_right,
    )


def _product() -> tuple[float, bool]:
    """Multiply matrices; return the best speed in GFLOP/s and whether the result is right."""
    import mlx.core as mx

    matrix = mx.ones((_SIZE, _SIZE), dtype=mx.float32)
    best_s, is_right = float("inf"), True
    for _ in range(_REPEATS):
        began = time.perf_counter()
        product = matrix @ matrix
        mx.eval(product)
        best_s = min(best_s, time.perf_counter() - began)
        is_right = is_right and bool(mx.all(product == _SIZE).item())
    return 2 * _SIZE**3 / best_s / 1e9, is_right


def main() -> int:
    """Print the diagnosis on stdout, or why there is none on stderr; return the exit code."""
    try:
        found = diagnose()
    except BackendMissingError as error:
        sys.stderr.write(f"{error.message}\n")
        return EXIT_NO_BACKEND
    sys.stdout.write(msgspec.json.encode(found).decode() + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
