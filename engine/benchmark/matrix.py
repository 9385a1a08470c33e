"""Measure the cells of one model that are not stored yet."""

from __future__ import annotations

import gc
import time
from importlib import metadata

import mlx.core as mx

from vllm_mlx.engine.benchmark.cells import Cell, CellResult, Results
from vllm_mlx.engine.benchmark.contenders import ContenderMaker, contender_makers
from vllm_mlx.engine.benchmark.measures import Effort, Prompts, measure
from vllm_mlx.engine.config import EngineConfig, ModelConfig, ModelInfo
from vllm_mlx.engine.models.loader import load_model_and_engine
from vllm_mlx.engine.models.progress import ignore_progress

#: Ids from here on are ordinary tokens in every vocabulary that is measured.
_FIRST_TOKEN = 300
_LIBRARIES = ("mlx", "mlx-lm", "vllm-mlx")


def measure_cells(
    model: ModelConfig,
    cells: list[Cell],
    results: Results | None,
    effort: Effort,
    *,
    time_limit_s: float | None = None,
    target_itl_s: float | None = None,
    max_rows: int = 129,
) -> tuple[list[CellResult], list[Cell]]:
    """Measure what is not stored yet; return all results, and the cells there was no time for.

    No cell is begun after `time_limit_s`. Loads the model only if there is something to measure.
    """
    began = time.monotonic()
    found: dict[Cell, CellResult] = {}
    for cell in cells:
        stored = results.load(cell) if results is not None else None
        if stored is not None:
            found[cell] = stored
    missing = [cell for cell in cells if cell not in found]
    if missing:
        config = EngineConfig(max_num_seqs=max_rows, target_itl_s=target_itl_s, prefix_cache=False)
        loaded, engine = load_model_and_engine(model, config, ignore_progress)
        makers = contender_makers(loaded, engine)
        prompts = Prompts(range(_FIRST_TOKEN, _vocab_size(loaded)))
        while missing and (time_limit_s is None or time.monotonic() - began < time_limit_s):
            cell = missing.pop(0)
            found[cell] = _result(cell, engine.info, makers, prompts, effort)
            if results is not None:
                results.save(cell, found[cell])
        engine.close()
    return [found[cell] for cell in cells if cell in found], missing


def _result(
    cell: Cell,
    info: ModelInfo,
    makers: dict[str, ContenderMaker],
    prompts: Prompts,
    effort: Effort,
) -> CellResult:
    found = measure(cell, makers, prompts, effort)
    gc.collect()
    mx.clear_cache()
    return CellResult(
        cell=str(cell),
        model=info.model,
        dtype=info.dtype,
        device=info.device,
        libraries=tuple(map(_with_version, _LIBRARIES)),
        found=found,
    )


def _with_version(library: str) -> str:
    """Return a library's name and version; this package can run from its folder, not installed."""
    try:
        return f"{library} {metadata.version(library)}"
    except metadata.PackageNotFoundError:
        return f"{library} not installed"


def _vocab_size(loaded: object) -> int:
    args = getattr(loaded, "args", None)
    return int(getattr(args, "vocab_size", 1000))
