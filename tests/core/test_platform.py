"""The machine's facts: BLAS, backend and dtype policy."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from vllm_mlx.engine import platform
from vllm_mlx.engine.errors import BackendMissingError
from vllm_mlx.engine.platform import (
    allows_tf32,
    load_blas,
    load_dtype,
    prepare_environment,
    require_backend,
)

on_linux_cpu = pytest.mark.skipif(
    platform.installed_backend() != "cpu", reason="only MLX's Linux CPU build bundles a BLAS"
)

MATMUL = """
import sys, time
{before}
import mlx.core as mx
a = mx.random.normal((512, 512))
mx.eval(a, a[:8] @ a)
times = []
for _ in range(3):
    begin = time.perf_counter()
    mx.eval(a @ a)
    times.append(time.perf_counter() - begin)
print(min(times))
"""


def run_python(code: str) -> str:
    """Run `code` in a fresh interpreter and return what it prints."""
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()


@on_linux_cpu
def test_openblas_takes_the_place_of_the_bundled_blas() -> None:
    """MLX's products are many times faster after load_blas, so they really go through OpenBLAS."""
    assert load_blas().library is not None
    assert "OpenBLAS" in load_blas().library, load_blas().hint
    before = "from vllm_mlx.engine.platform import load_blas; load_blas()"
    with_openblas = float(run_python(MATMUL.format(before=before)))
    without = float(run_python(MATMUL.format(before="")))
    assert with_openblas < without / 4


@on_linux_cpu
def test_a_missing_openblas_leaves_a_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without OpenBLAS the reference BLAS is reported together with the command that helps."""
    monkeypatch.setattr(platform, "_global_blas", lambda: None)
    monkeypatch.setattr(platform, "_openblas_candidates", lambda: iter(["/nowhere/libopenblas.so"]))
    monkeypatch.delitem(sys.modules, "mlx.core", raising=False)
    info = load_blas.__wrapped__()
    assert info.library == "reference"
    assert info.path is None
    assert "apt-get install libopenblas0-pthread" in (info.hint or "")


@on_linux_cpu
def test_loading_blas_too_late_says_so() -> None:
    """After MLX has been imported the truth is reported, not a library that MLX does not use."""
    code = (
        "import mlx.core\n"
        "from vllm_mlx.engine.platform import load_blas\n"
        "print(load_blas().library, load_blas().hint)"
    )
    assert run_python(code) == "reference MLX was imported before the BLAS could be loaded"


def test_importing_the_platform_does_not_import_mlx() -> None:
    """The HTTP process may ask about the machine and stay free of MLX."""
    code = (
        "import sys\n"
        "from vllm_mlx.engine import platform\n"
        "platform.load_blas(), platform.installed_backend(), platform.load_dtype('auto', 'x')\n"
        "print([name for name in sys.modules if name.startswith('mlx')])"
    )
    assert run_python(code) == "[]"


@pytest.mark.parametrize(("chosen", "expected"), [(None, False), ("0", False), ("1", True)])
def test_float32_is_exact_unless_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, chosen: str | None, expected: bool
) -> None:
    """A GPU's TF32 is off before MLX is imported; a variable that the user has set stands."""
    monkeypatch.delenv("MLX_ENABLE_TF32", raising=False)
    assert allows_tf32()
    if chosen is not None:
        monkeypatch.setenv("MLX_ENABLE_TF32", chosen)
    else:
        # Undone at the end, like what prepare_environment sets.
        monkeypatch.setenv("MLX_ENABLE_TF32", "")
        monkeypatch.delenv("MLX_ENABLE_TF32")
    prepare_environment()
    assert allows_tf32() is expected


def test_device_name_is_one_of_three() -> None:
    """The device is named as status pages show it."""
    assert platform.device_name() in ("cpu", "gpu (Metal)", "gpu (CUDA)")


def test_a_missing_backend_names_the_install_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where MLX cannot be imported the error says which command installs it."""
    monkeypatch.setitem(sys.modules, "mlx.core", None)
    monkeypatch.setattr(platform, "_is_installed", lambda name: False)
    with pytest.raises(BackendMissingError, match="pip install") as caught:
        require_backend()
    assert "\n" not in caught.value.message


def test_a_cuda_build_without_a_driver_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA build on a machine without a GPU is told from a missing backend."""
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(platform, "_NVIDIA_DRIVER", Path("/nowhere"))
    monkeypatch.setattr(platform, "_is_installed", lambda name: name == "mlx-cuda-13")
    monkeypatch.setitem(sys.modules, "mlx.core", None)
    with pytest.raises(BackendMissingError, match="pip uninstall mlx-cuda-13"):
        require_backend()
    assert platform.installed_backend() == "cpu"


@pytest.mark.parametrize(
    ("requested", "backend", "expected"),
    [
        ("auto", "cpu", "float32"),
        ("auto", "metal", "bfloat16"),
        ("auto", "cuda", "bfloat16"),
        ("float16", "cpu", "float16"),
        ("float32", "metal", "float32"),
    ],
)
def test_dtype_policy(
    requested: platform.DtypeName, backend: platform.Backend, expected: str
) -> None:
    """Only `auto` on CPU changes what the checkpoint has, and a request is always kept."""
    assert load_dtype(requested, "bfloat16", backend=backend) == expected


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"cpu.max": "150000 100000\n"}, 1.5),
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "400000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 4.0),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({}, None),
    ],
)
def test_cpu_quota_of_a_control_group(
    tmp_path: Path, files: dict[str, str], expected: float | None
) -> None:
    """The quota of either control group version is read, and none is no limit."""
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert platform._cpu_quota(tmp_path) == expected
