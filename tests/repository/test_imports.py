"""Hold the one-way imports between the packages, and MLX out of where it must not be."""

from __future__ import annotations

import fnmatch
import json
import subprocess
import sys
from typing import TYPE_CHECKING

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

#: Files of the engine that compute with MLX; whoever imports one of them loads it. A new module
#: that computes is added here, and nowhere else may MLX be imported.
USES_MLX = [
    "engine/engine.py",
    "engine/audio/spectrum.py",
    "engine/audio/transcription.py",
    "engine/audio/whisper_model.py",
    "engine/audio/windows.py",
    "engine/benchmark/*",
    "engine/encoders/embedding_service.py",
    "engine/encoders/encoder.py",
    "engine/encoders/library_encoder.py",
    "engine/encoders/operations.py",
    "engine/encoders/pooling.py",
    "engine/encoders/rerank_service.py",
    "engine/encoders/token_batch.py",
    "engine/encoders/weights.py",
    "engine/kv/block_codec.py",
    "engine/kv/block_transfer.py",
    "engine/kv/slot_layers.py",
    "engine/kv/slots.py",
    "engine/kv/step_view.py",
    "engine/kv/spill.py",
    "engine/kv/stock_caches.py",
    "engine/kv/store.py",
    "engine/models/assembly.py",
    "engine/models/dummy_weights.py",
    "engine/models/flat_rows.py",
    "engine/models/probe.py",
    "engine/models/text.py",
    "engine/run/*",
]

#: Files that import MLX inside a function, so that importing them does not load it.
USES_MLX_ON_DEMAND = [
    "engine/audio/decoding.py",
    "engine/diagnosis.py",
    "engine/memory.py",
    "engine/models/loader.py",
    "engine/platform.py",
]

#: Files that a reader, or a test, can use in milliseconds.
PURE = [
    "cache_tools/*",
    "engine/audio/containers.py",
    "engine/audio/extra.py",
    "engine/audio/limits.py",
    "engine/audio/result_formats.py",
    "engine/audio/transcript.py",
    "engine/core/*",
    "engine/parsing/*",
    "engine/kv/block_hash.py",
    "engine/kv/disk_*",
    "engine/kv/prefix_tree.py",
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


def test_only_the_computing_part_of_the_engine_names_mlx(sources: list[Source]) -> None:
    """Every other module, the HTTP process's and the pure core's, imports no MLX library."""
    computing = _matching(sources, USES_MLX + USES_MLX_ON_DEMAND)
    wrong = [
        f"{source.path}:{line} {name}"
        for source in sources
        if source not in computing
        for line, name in source.imports()
        if name.partition(".")[0] in MLX
    ]
    assert wrong == [], "a module that computes with MLX is listed in USES_MLX"


def test_every_pattern_names_a_file(sources: list[Source]) -> None:
    """No pattern of these lists has outlived its files."""
    patterns = {*USES_MLX, *USES_MLX_ON_DEMAND, *PURE}
    assert sorted(p for p in patterns if not _matching(sources, [p])) == []


def test_importing_the_rest_does_not_load_mlx(sources: list[Source]) -> None:
    """Importing every module outside the computing part loads no MLX library, directly or not."""
    computing = _matching(sources, USES_MLX)
    caught = _loaded_by([s for s in sources if s not in computing], MLX)
    assert caught == [], f"{caught}: a module that computes with MLX is listed in USES_MLX"


def test_importing_the_pure_core_loads_nothing_heavy(sources: list[Source]) -> None:
    """Importing the pure core and the configurations loads none of the large libraries."""
    assert _loaded_by(_matching(sources, PURE), HEAVY) == []


def _loaded_by(sources: list[Source], forbidden: list[str]) -> list[str]:
    """Import `sources` in a new process and say which of them loaded a forbidden module."""
    modules = [source.module for source in sources if source.path.name != "__main__.py"]
    assert modules
    answer = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROBE],
        input=json.dumps([modules, forbidden]),
        check=False,
        capture_output=True,
        text=True,
    )
    assert answer.returncode == 0, answer.stderr
    return list(json.loads(answer.stdout))


def _matching(sources: list[Source], patterns: list[str]) -> list[Source]:
    # fnmatch's * crosses slashes: `a/*` is anything under a.
    return [s for s in sources if any(fnmatch.fnmatch(str(s.path), p) for p in patterns)]


def _is_under(name: str, allowed: list[str]) -> bool:
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in allowed)
