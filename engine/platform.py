"""Know the machine: MLX's backend, its device, the BLAS behind it, and the dtype policy.

Importable without MLX. Whoever wants MLX calls `require_backend()` before its first import: it
loads OpenBLAS first, which cannot be done afterwards (MLX binds its BLAS when it is imported).
"""

from __future__ import annotations

import ctypes
import functools
import glob
import importlib
import importlib.metadata
import os
import sys
import sysconfig
from collections.abc import Iterator
from ctypes.util import find_library
from pathlib import Path
from typing import Literal

import msgspec

from vllm_mlx.engine.config import DtypeName
from vllm_mlx.engine.errors import BackendMissingError

Backend = Literal["metal", "cuda", "cpu"]

#: A symbol of every CBLAS, and the one that float32 matrix products go through.
_CBLAS_SYMBOL = "cblas_sgemm"
_OPENBLAS_HINT = "apt-get install libopenblas0-pthread"

_CUDA_BUILDS = ("mlx-cuda-13", "mlx-cuda-12")
_NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")

#: Absolute patterns in order of preference: threads before OpenMP before serial.
_OPENBLAS_PATTERNS = (
    "{prefix}/lib/libopenblas.so.0",
    "/usr/lib/{multiarch}/openblas-pthread/libopenblas.so.0",
    "/usr/lib/*/openblas-pthread/libopenblas.so.0",
    "/usr/lib64/libopenblasp.so.0",
    "/usr/lib64/libopenblas_pthreads.so.0",
    "/usr/lib/{multiarch}/openblas-openmp/libopenblas.so.0",
    "/usr/lib/*/openblas-openmp/libopenblas.so.0",
    "/usr/lib64/libopenblaso.so.0",
    "/usr/lib/{multiarch}/libopenblas.so.0",
    "/usr/lib64/libopenblas.so.0",
    "/usr/lib/libopenblas.so",
    "/usr/local/lib/libopenblas.so.0",
)


class BlasInfo(msgspec.Struct, frozen=True):
    """Say which BLAS the matrix products of MLX's CPU backend go through."""

    #: `OpenBLAS 0.3.21`, `reference`, ...; None where MLX does not use a loadable BLAS.
    library: str | None
    path: str | None = None
    #: One line that says how to get a fast one; None if there is nothing to do.
    hint: str | None = None


class _DlInfo(ctypes.Structure):
    _fields_ = (
        ("dli_fname", ctypes.c_char_p),
        ("dli_fbase", ctypes.c_void_p),
        ("dli_sname", ctypes.c_char_p),
        ("dli_saddr", ctypes.c_void_p),
    )


def installed_backend() -> Backend | None:
    """Return MLX's backend on this machine without importing MLX, None if there is none.

    A CUDA build on a machine without an NVIDIA driver counts as `cpu`, where its arrays live.
    """
    if sys.platform == "darwin":
        return "metal" if _is_installed("mlx") else None
    if any(_is_installed(name) for name in _CUDA_BUILDS):
        return "cuda" if _NVIDIA_DRIVER.exists() else "cpu"
    return "cpu" if _is_installed("mlx-cpu") else None


@functools.cache
def load_blas() -> BlasInfo:
    """Load OpenBLAS ahead of the reference BLAS that MLX's Linux CPU wheel bundles.

    Global symbols of a library loaded earlier win, so `libmlx` binds to them when it is imported;
    one that is already global (preloaded by the user) is kept. After MLX has been imported this
    changes nothing and says so. Later calls return the first result.
    """
    if not sys.platform.startswith("linux") or not _is_installed("mlx-cpu"):
        return BlasInfo(None)
    present = _global_blas()
    if present is not None:
        return present
    if "mlx.core" in sys.modules:
        return BlasInfo("reference", None, "MLX was imported before the BLAS could be loaded")
    for candidate in _openblas_candidates():
        try:
            library = ctypes.CDLL(candidate, mode=ctypes.RTLD_GLOBAL | os.RTLD_NOW)
        except OSError:
            continue  # not there, or for another machine: the next one may load
        if hasattr(library, _CBLAS_SYMBOL):
            _limit_threads(library)
            loaded = _global_blas()
            if loaded is not None:
                return loaded
    hint = f"MLX uses its slow reference BLAS (about 50 times slower): {_OPENBLAS_HINT}"
    return BlasInfo("reference", None, hint)


def prepare_environment() -> None:
    """Load the best BLAS there is and make float32 mean float32; call before MLX is imported.

    GPU backends of MLX compute float32 products in TF32, with ten bits of fraction, unless
    `MLX_ENABLE_TF32` is 0. Then a row's logits depend on its batch in the third digit, which is
    more than this engine promises of float32. Whoever has set the variable decides.
    """
    os.environ.setdefault("MLX_ENABLE_TF32", "0")
    load_blas()


def allows_tf32() -> bool:
    """Say whether MLX may compute float32 products in TF32, where the device can."""
    return os.environ.get("MLX_ENABLE_TF32", "1") != "0"


def require_backend() -> None:
    """Import MLX with the best BLAS there is, or raise `BackendMissingError` with what to install.

    Call it before any other import of MLX or mlx-lm in the process.
    """
    prepare_environment()
    try:
        importlib.import_module("mlx.core")
    except ImportError as error:
        raise BackendMissingError(_install_advice(error)) from error


def device_name() -> str:
    """Return MLX's default device: `gpu (Metal)`, `gpu (CUDA)` or `cpu`; imports MLX."""
    require_backend()
    import mlx.core as mx

    if mx.default_device() == mx.Device(mx.cpu):
        return "cpu"
    return "gpu (Metal)" if mx.metal.is_available() else "gpu (CUDA)"


def load_dtype(
    requested: DtypeName, checkpoint_dtype: str, *, backend: Backend | None = None
) -> str:
    """Return the dtype that weights are loaded in.

    `auto` is float32 on CPU, where 16-bit and quantised products are 20 to 50 times slower than
    float32 ones, and elsewhere the checkpoint's own. `backend` defaults to this machine's.
    """
    if requested != "auto":
        return requested
    if (backend or installed_backend()) == "cpu":
        return "float32"
    return checkpoint_dtype


def usable_cpus() -> int:
    """Return how many CPUs this process may use: affinity and control-group quota included."""
    if hasattr(os, "sched_getaffinity"):
        count = len(os.sched_getaffinity(0))
    else:
        count = os.cpu_count() or 1
    quota = _cpu_quota()
    return count if quota is None else max(1, min(count, round(quota)))


def _cpu_quota(root: Path = Path("/sys/fs/cgroup")) -> float | None:
    """Return the control group's CPU limit in CPUs, None without one."""
    try:
        quota, period = (root / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            quota = (root / "cpu/cpu.cfs_quota_us").read_text().strip()
            period = (root / "cpu/cpu.cfs_period_us").read_text().strip()
        except OSError:
            return None
    if not quota.isdigit() or not period.isdigit() or int(period) == 0:
        return None  # "max" and -1 mean no limit
    return int(quota) / int(period)


def _limit_threads(library: ctypes.CDLL) -> None:
    """Keep OpenBLAS to the CPUs that the process may use: it does not see a group's quota."""
    cpus = usable_cpus()
    try:
        if library.openblas_get_num_threads() > cpus:
            library.openblas_set_num_threads(cpus)
    except AttributeError:
        return  # a CBLAS that is not OpenBLAS has its own ways


def _openblas_candidates() -> Iterator[str]:
    """Yield what to try, best first; names without a slash go through the dynamic linker."""
    multiarch = sysconfig.get_config_var("MULTIARCH") or ""
    for pattern in _OPENBLAS_PATTERNS:
        if "{multiarch}" in pattern and not multiarch:
            continue
        yield from sorted(glob.glob(pattern.format(prefix=sys.prefix, multiarch=multiarch)))
    yield "libopenblasp.so.0"
    yield "libopenblas.so.0"
    # Last, because without a match it runs a compiler and a linker to search.
    found = find_library("openblas")
    if found is not None:
        yield found


def _global_blas() -> BlasInfo | None:
    """Return the BLAS whose symbols a library loaded from now on will bind to."""
    process = ctypes.CDLL(None)
    try:
        symbol = getattr(process, _CBLAS_SYMBOL)
    except AttributeError:
        return None
    info = _DlInfo()
    address = ctypes.cast(symbol, ctypes.c_void_p)
    found = process.dladdr(address, ctypes.byref(info))
    path = os.fsdecode(info.dli_fname) if found and info.dli_fname else None
    return BlasInfo(_blas_name(process, path), path)


def _blas_name(process: ctypes.CDLL, path: str | None) -> str:
    """Name the library by its own word, else by its file."""
    try:
        get_config = process.openblas_get_config
    except AttributeError:
        return Path(path).name if path else "unknown"
    get_config.restype = ctypes.c_char_p
    words = os.fsdecode(get_config() or b"OpenBLAS").split()
    return " ".join(words[:2])


def _is_installed(distribution: str) -> bool:
    try:
        importlib.metadata.distribution(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _install_advice(error: ImportError) -> str:
    """Return the one line that names the fault and the command that mends it here."""
    has_driver = _NVIDIA_DRIVER.exists()
    if sys.platform == "darwin":
        command = "pip install mlx (macOS 14 or newer on Apple silicon)"
    elif has_driver:
        command = (
            "pip install 'vllm-mlx[cuda13]' (or [cuda12] for an older driver; in a checkout: "
            "uv sync --no-group cpu --extra cuda13)"
        )
    else:
        command = "pip install 'vllm-mlx[cpu]' (in a checkout: uv sync)"
    cuda = next((name for name in _CUDA_BUILDS if _is_installed(name)), None)
    if cuda is not None and not has_driver:
        return (
            f"MLX's CUDA build finds no NVIDIA driver ({error}); install the driver, or: "
            f"pip uninstall {cuda}, then {command}"
        )
    if installed_backend() is not None:
        return f"MLX is installed but cannot be imported ({error}); install it again: {command}"
    return f"MLX has no backend on this machine; install one: {command}"
