"""Load a model and assemble the engine that serves it; the one factory of `Engine`."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from vllm_mlx.engine import memory, platform
from vllm_mlx.engine.config import EngineConfig, ModelConfig, ModelInfo
from vllm_mlx.engine.core.memory_guard import MemoryGuard
from vllm_mlx.engine.kv.block_hash import Namespace
from vllm_mlx.engine.models.dummy_shapes import DUMMY_SHAPES
from vllm_mlx.engine.models.experts import with_fewer_experts
from vllm_mlx.engine.models.fingerprint import kv_libraries, model_namespace
from vllm_mlx.engine.models.fit import PLANNED_CONTEXT, plan_kv_budget, prefix_bytes
from vllm_mlx.engine.models.progress import ProgressCallback
from vllm_mlx.engine.models.resolve import resolve_model
from vllm_mlx.engine.models.summary import CheckpointSummary, read_config, summarize_checkpoint
from vllm_mlx.engine.text.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from mlx.nn.layers.base import Module

    from vllm_mlx.engine.engine import Engine

logger = logging.getLogger(__name__)

#: Fields of generation_config.json that are sampling defaults here, and what they may be.
_GENERATION_FIELDS = {
    "temperature": (0.0, 2.0),
    "top_p": (1e-6, 1.0),
    "top_k": (0.0, 2.0**31 - 1),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 100.0),
}


def load_engine(model: ModelConfig, engine: EngineConfig, on_progress: ProgressCallback) -> Engine:
    """Load the model and return its engine, ready to step; the calling thread owns it from then.

    MLX is imported only once the model's files are found, so that a wrong name is told at once.
    Raises ModelLoadError subclasses, and CacheError for an SSD tier that cannot be used.
    """
    return load_model_and_engine(model, engine, on_progress)[1]


def load_model_and_engine(
    model: ModelConfig, engine: EngineConfig, on_progress: ProgressCallback
) -> tuple[Module, Engine]:
    """Do as `load_engine`, and return mlx-lm's model before the engine that computes with it."""
    on_progress("resolving", None)
    path = resolve_model(model, on_progress)
    summary = summarize_checkpoint(path, model)
    platform.require_backend()
    limits = memory.device_limits()
    plan_kv_budget(summary, engine, limits)
    memory.set_limits(limits)
    tokenizer = load_tokenizer(path, trust_remote_code=model.trust_remote_code)

    from vllm_mlx.engine.kv.spill import open_spill
    from vllm_mlx.engine.models.assembly import assemble_engine
    from vllm_mlx.engine.models.probe import probe_model
    from vllm_mlx.engine.run.grammar_mask import warm_up

    loaded = _load_weights(path, summary, model, on_progress)
    on_progress("warming up", None)
    probe = probe_model(loaded, summary.model_type, max_token=tokenizer.vocab_size)
    info = _describe(loaded, path, summary, model, engine, tokenizer.eos_token_ids)
    warm_up(probe.vocab_size, info.dtype)
    namespace = prefix_namespace(path, model, engine, kv_dtype=summary.dtype)
    spill = None
    if engine.ssd_cache_dir is not None:
        folder = Path(engine.ssd_cache_dir)
        spill = open_spill(namespace, folder, max_bytes=engine.ssd_cache_max_bytes)
    engine = msgspec.structs.replace(engine, cache_memory_bytes=prefix_bytes(engine, limits))
    assembled = assemble_engine(
        loaded,
        probe,
        info,
        engine,
        tokenizer.detokenizer,
        namespace=namespace,
        spill=spill,
        grammar_tokens=tokenizer,
        max_prefill_area=_max_prefill_area(summary, engine),
        device_memory=memory.device_memory,
        release_memory=memory.release_cached,
        guard=_guard(engine),
    )
    return loaded, assembled


def _guard(engine: EngineConfig) -> MemoryGuard:
    """Return what watches the machine's memory."""
    reserve_bytes = engine.memory_reserve_bytes
    if reserve_bytes is None:
        reserve_bytes = memory.default_reserve_bytes(memory.host_limits())
    return MemoryGuard(
        lambda: memory.host_limits().available_bytes,
        reserve_bytes,
        release_memory=memory.release_cached,
    )


def _load_weights(
    path: Path, summary: CheckpointSummary, model: ModelConfig, on_progress: ProgressCallback
) -> Module:
    from vllm_mlx.engine.models.text import load_text_model

    is_cast = platform.installed_backend() == "cpu" or model.dtype != "auto"
    return load_text_model(
        path,
        overrides=_overrides(path, model),
        shape=DUMMY_SHAPES[model.shape] if model.shape is not None else None,
        dtype=summary.dtype if is_cast else None,
        dequantize=summary.dequantizes,
        adapter_path=model.adapter_path,
        trust_remote_code=model.trust_remote_code,
        on_progress=on_progress,
    )


def _overrides(path: Path, model: ModelConfig) -> dict[str, Any] | None:
    """Return what the model is told in place of fields of its config.json."""
    if model.moe_top_k is None:
        return None
    return with_fewer_experts(read_config(path), model.moe_top_k)


def _describe(
    loaded: Module,
    path: Path,
    summary: CheckpointSummary,
    model: ModelConfig,
    engine: EngineConfig,
    eos_token_ids: frozenset[int],
) -> ModelInfo:
    """Say what was loaded; the KV budget is planned anew, from what is really free now."""
    from vllm_mlx.engine.models.text import floating_dtype, weights_bytes

    return ModelInfo(
        model=model.model,
        path=str(path),
        model_type=summary.model_type,
        max_model_len=summary.context_length,
        dtype=floating_dtype(loaded),
        weights_bytes=weights_bytes(loaded),
        kv_bytes_per_token=summary.kv_bytes_per_token,
        kv_budget_bytes=plan_kv_budget(summary, engine, memory.device_limits(), is_loaded=True),
        kv_max_tokens=summary.context_length,
        device=platform.device_name(),
        blas=platform.load_blas().library,
        eos_token_ids=tuple(sorted(eos_token_ids)),
        generation_defaults=generation_defaults(path),
        pid=os.getpid(),
    )


def prefix_namespace(
    path: Path, model: ModelConfig, engine: EngineConfig, *, kv_dtype: str
) -> Namespace:
    """Return what the KV of this engine depends on; reads weights only for an SSD tier.

    In RAM only this process' one model can be found, so that its path is identity enough.
    `kv_dtype` is the checkpoint summary's, so that all is known before anything is loaded.
    """
    if engine.ssd_cache_dir is None:
        return Namespace(weights=str(path), kv_dtype=kv_dtype, block_size=engine.cache_block_size)
    namespace = model_namespace(
        path,
        Path(model.adapter_path) if model.adapter_path is not None else None,
        kv_dtype,
        engine.cache_block_size,
        kv_libraries(),
        weights=DUMMY_SHAPES[model.shape].fingerprint if model.shape is not None else None,
        label=model.model,
    )
    if model.moe_top_k is None:
        return namespace
    weights = f"{namespace.weights}, {model.moe_top_k} experts a token"
    return msgspec.structs.replace(namespace, weights=weights)


def generation_defaults(path: Path) -> dict[str, float]:
    """Return the sampling defaults of a model folder's generation_config.json, if it has any."""
    file = path / "generation_config.json"
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        logger.warning("%s cannot be read and gives no sampling defaults: %s", file, error)
        return {}
    defaults = {}
    for name, (low, high) in _GENERATION_FIELDS.items():
        value = document.get(name) if isinstance(document, dict) else None
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            logger.warning("%s: %s is no number but %r, and no default", file, name, value)
        elif not low <= value <= high:
            logger.warning("%s: %s is %s, outside %s to %s", file, name, value, low, high)
        else:
            defaults[name] = float(value)
    return defaults


def _max_prefill_area(summary: CheckpointSummary, engine: EngineConfig) -> int | None:
    """Bound chunk times context to what the KV budget was planned with, where scores are stored."""
    if summary.attention.is_fused:
        return None
    return engine.prefill_tokens_per_step * min(summary.context_length, PLANNED_CONTEXT)
