"""Assemble an engine from a model that is loaded and probed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from mlx_lm.models.cache import make_prompt_cache

from vllm_mlx.engine.config import EngineConfig, ModelInfo
from vllm_mlx.engine.core.grammar import GrammarCompiler, GrammarTokens
from vllm_mlx.engine.core.grammar_rows import GrammarRows
from vllm_mlx.engine.core.memory_guard import MemoryGuard
from vllm_mlx.engine.core.output_processor import TokenDecoder
from vllm_mlx.engine.core.prefixes import NoPrefixes, Prefixes
from vllm_mlx.engine.core.stats import DeviceMemory
from vllm_mlx.engine.engine import Engine
from vllm_mlx.engine.kv.block_codec import BlockCodec
from vllm_mlx.engine.kv.block_hash import Namespace
from vllm_mlx.engine.kv.slots import make_slot_layout
from vllm_mlx.engine.kv.spill import Spill
from vllm_mlx.engine.kv.store import PrefixStore
from vllm_mlx.engine.models.probe import Probe
from vllm_mlx.engine.run.runner import Runner


def assemble_engine(
    model: Any,
    probe: Probe,
    info: ModelInfo,
    config: EngineConfig,
    make_decoder: Callable[[], TokenDecoder],
    *,
    namespace: Namespace | None = None,
    spill: Spill | None = None,
    grammar_tokens: GrammarTokens | None = None,
    max_prefill_area: int | None = None,
    device_memory: Callable[[], DeviceMemory | None] = lambda: None,
    release_memory: Callable[[], None] = lambda: None,
    guard: MemoryGuard | None = None,
) -> Engine:
    """Assemble an engine from parts that are loaded; fills in what the layout decides of `info`.

    Prefixes are kept only with a `namespace`, which says what their KV depends on, and on SSD only
    with a `spill`. Grammars need `grammar_tokens`, the model's tokenizer. Without a `guard` nobody
    watches the machine's memory.
    Raises InsufficientMemoryError if the KV budget does not hold one small row.
    """
    layout = make_slot_layout(
        lambda: make_prompt_cache(model),
        probe.seen_caches,
        info.model_type,
        budget_bytes=info.kv_budget_bytes,
        max_capacity=info.max_model_len,
        max_groups=probe.max_groups,
    )
    info = msgspec.structs.replace(
        info,
        kv_max_tokens=layout.max_capacity,
        kv_bytes_per_token=layout.row_cost.bytes_per_token,
    )
    prefixes: Prefixes = NoPrefixes()
    if namespace is not None and config.prefix_cache:
        max_bytes = min(config.cache_memory_bytes or info.kv_budget_bytes, info.kv_budget_bytes)
        codec = BlockCodec(probe.seen_caches, namespace.block_size)
        store = PrefixStore(namespace, codec, layout, max_bytes=max_bytes, spill=spill)
        layout.share_budget(store)
        prefixes = store
    compiler = None
    if grammar_tokens is not None:
        compiler = GrammarCompiler(grammar_tokens, probe.vocab_size)
    return Engine(
        info,
        config,
        Runner(model, layout, vocab_size=probe.vocab_size),
        layout,
        make_decoder,
        vocab_size=probe.vocab_size,
        prefixes=prefixes,
        guard=guard or MemoryGuard(lambda: 0, 0),
        grammars=GrammarRows(compiler, info.eos_token_ids),
        max_prefill_area=max_prefill_area,
        device_memory=device_memory,
        release_memory=release_memory,
    )
