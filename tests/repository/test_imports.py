"""Hold the one-way imports between the packages, and MLX out of where it must not be."""

from __future__ import annotations

import fnmatch
import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.repository.conftest import Source

#: What each package may import of the others. The errors are one tree, and anyone may raise them.
MAY_IMPORT = {
    "engine": [],
    "server": ["vllm_mlx.engine"],
    "cache_tools": ["vllm_mlx.engine"],
    "bench": ["vllm_mlx.engine.errors"],
    "cli": ["vllm_mlx.engine", "vllm_mlx.server", "vllm_mlx.cache_tools", "vllm_mlx.bench"],
}

#: Files that never name MLX, not even inside a function.
WITHOUT_MLX = [
    "server/**",
    "bench/**",
    "cache_tools/**",
    "engine/core/*",
    "engine/parsing/**",
    "engine/text/*",
    "engine/host/messages.py",
    "engine/host/transport.py",
    "engine/host/client.py",
    "engine/host/stream.py",
    "engine/host/supervisor.py",
    "engine/kv/slot_plan.py",
    "engine/models/resolve.py",
    "engine/models/summary.py",
    "engine/models/demo.py",
    "engine/models/gguf.py",
    "engine/config.py",
    "engine/errors.py",
]

#: Files that may use MLX but do not import it when they are imported.
MLX_ON_DEMAND = ["engine/platform.py", "cli/**"]

#: Files that a reader, or a test, can use in milliseconds.
PURE = [
    "engine/core/*",
    "engine/parsing/**",
    "engine/kv/slot_plan.py",
    "engine/host/messages.py",
    "engine/config.py",
    "engine/errors.py",
    "server/config.py",
]

MLX = ["mlx", "mlx_lm", "mlx_vlm", "mlx_audio", "mlx_embeddings"]
HEAVY = [*MLX, "transformers", "tokenizers", "huggingface_hub", "torch"]
HEAVY += ["quart", "hypercorn", "pandas", "click", "rich", "prompt_toolkit"]

#: Imports each named module in turn and prints those after which a forbidden one was loaded.
PROBE = """
import importlib, json, sys
modules, forbidden = json.load(sys.stdin)
caught, known = [], set()
for module in modules:
    importlib.import_module(module)
    for name in sorted(set(forbidden) & set(sys.modules) - known):
        caught.append(f"{module} loads {name}")
        known.add(name)
print(json.dumps(caught))
"""


def test_everything_is_imported_by_its_full_name(
    sources: list[Source], test_sources: list[Source], package_names: tuple[str, ...]
) -> None:
    """No import leaves out the `vllm_mlx.` prefix, and none is relative."""
    wrong = [
        f"{source.path}:{line} {name}"
        for source in [*sources, *test_sources]
        for line, name in source.imports()
        if name.startswith(".") or name.partition(".")[0] in package_names
    ]
    assert wrong == []


def test_packages_import_one_way(sources: list[Source]) -> None:
    """A package imports only itself and those below it."""
    wrong = []
    for source in sources:
        package = source.path.parts[0]
        allowed = [f"vllm_mlx.{package}", *MAY_IMPORT[package]]
        wrong += [
            f"{source.path}:{line} {name}"
            for line, name in source.imports()
            if name.startswith("vllm_mlx") and not _is_under(name, allowed)
        ]
    assert wrong == []


def test_modules_without_mlx_never_name_it(sources: list[Source]) -> None:
    """The HTTP process's modules and the pure core import no MLX library at any depth."""
    wrong = [
        f"{source.path}:{line} {name}"
        for source in _matching(sources, WITHOUT_MLX)
        for line, name in source.imports()
        if name.partition(".")[0] in MLX
    ]
    assert wrong == []


def test_every_pattern_names_a_file(sources: list[Source]) -> None:
    """No pattern of these lists has outlived its files."""
    patterns = {*WITHOUT_MLX, *MLX_ON_DEMAND, *PURE}
    # These folders wait for their first module.
    patterns -= {"engine/parsing/**", "bench/**", "cache_tools/**"}
    assert sorted(p for p in patterns if not _matching(sources, [p])) == []


@pytest.mark.parametrize(
    ("patterns", "forbidden"),
    [(WITHOUT_MLX + MLX_ON_DEMAND, MLX), (PURE, HEAVY)],
    ids=["no-mlx", "pure"],
)
def test_importing_loads_nothing_forbidden(
    sources: list[Source], patterns: list[str], forbidden: list[str]
) -> None:
    """Importing these modules in a new process loads no forbidden one, directly or not."""
    modules = [source.module for source in _matching(sources, patterns)]
    modules = [name for name in modules if not name.endswith("__main__")]
    assert modules
    answer = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROBE],
        input=json.dumps([modules, forbidden]),
        check=False,
        capture_output=True,
        text=True,
    )
    assert answer.returncode == 0, answer.stderr
    assert json.loads(answer.stdout) == []


def _matching(sources: list[Source], patterns: list[str]) -> list[Source]:
    # fnmatch's * crosses slashes, so `a/*` and `a/**` are both "anything under a".
    return [s for s in sources if any(fnmatch.fnmatch(str(s.path), p) for p in patterns)]


def _is_under(name: str, allowed: list[str]) -> bool:
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in allowed)
