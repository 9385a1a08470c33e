"""Plan what `warm` has to compute: render the prompts, and look up which prefixes are stored."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from vllm_mlx.engine.config import EngineConfig, ModelConfig
from vllm_mlx.engine.errors import InvalidRequestError
from vllm_mlx.engine.kv.disk_tier import DiskTier
from vllm_mlx.engine.kv.stored import StoredPrefixes
from vllm_mlx.engine.models.kv_shape import resume_rule
from vllm_mlx.engine.models.loader import prefix_namespace
from vllm_mlx.engine.models.summary import read_config, summarize_checkpoint
from vllm_mlx.engine.text.tokenizer import load_tokenizer
from vllm_mlx.server.anthropic.chat_input import ChatSettings
from vllm_mlx.server.warm_prompts import WarmPrompt
from vllm_mlx.server.warm_tokens import PromptEncoder, prefix_tokens, whole_blocks


@dataclass(frozen=True)
class PlannedPrefix:
    """Hold whole blocks of tokens that are to be stored, and how many of them are."""

    where: str
    blocks: list[int]
    num_stored: int = 0

    @property
    def is_stored(self) -> bool:
        """Say whether there is nothing to do."""
        return self.num_stored == len(self.blocks)


@dataclass
class WarmPlan:
    """Hold the prefixes of some prompts, each once, and what is wrong with the others."""

    prefixes: list[PlannedPrefix] = field(default_factory=list)
    num_too_short: int = 0
    faults: list[str] = field(default_factory=list)

    @property
    def missing(self) -> list[PlannedPrefix]:
        """Return what has to be computed."""
        return [prefix for prefix in self.prefixes if not prefix.is_stored]

    def looked_up(self, stored: StoredPrefixes) -> WarmPlan:
        """Return the plan with what is stored now."""
        prefixes = [
            replace(prefix, num_stored=stored.count(prefix.blocks)) for prefix in self.prefixes
        ]
        return replace(self, prefixes=prefixes)


def plan_prefixes(
    prompts: Sequence[WarmPrompt],
    encoder: PromptEncoder,
    block_size: int,
    settings: ChatSettings | None = None,
) -> WarmPlan:
    """Render prompts as a server does; a prompt that cannot be rendered is a fault of its own."""
    settings = settings or ChatSettings()
    plan = WarmPlan()
    seen: set[tuple[int, ...]] = set()
    for prompt in prompts:
        try:
            found = prefix_tokens(prompt, encoder, settings)
        except InvalidRequestError as error:
            plan.faults.append(f"{prompt.where}: {error.message}")
            continue
        for tokens in found:
            blocks = whole_blocks(tokens, block_size)
            plan.num_too_short += not blocks
            if blocks and tuple(blocks) not in seen:
                seen.add(tuple(blocks))
                plan.prefixes.append(PlannedPrefix(prompt.where, blocks))
    return plan


def plan_for_model(
    prompts: Sequence[WarmPrompt],
    folder: Path,
    model: ModelConfig,
    engine: EngineConfig,
    *,
    normalize: bool,
) -> WarmPlan:
    """Plan with the tokenizer and the chat template of a model folder; loads no weights.

    With `normalize` system text goes without its volatile lines where a server leaves them out.
    """
    tokenizer = load_tokenizer(folder, trust_remote_code=model.trust_remote_code, chat=model.chat)
    settings = ChatSettings(normalize, model.chat.template_kwargs)
    return plan_prefixes(prompts, tokenizer, engine.cache_block_size, settings)


@contextlib.contextmanager
def stored_prefixes(
    folder: Path, model: ModelConfig, engine: EngineConfig
) -> Iterator[StoredPrefixes]:
    """Open the SSD tier to look up what an engine of this configuration would find there.

    Reads all weights of a local model that is used for the first time, to know it by its content.
    Raises CacheError or ModelLoadError.
    """
    assert engine.ssd_cache_dir is not None
    summary = summarize_checkpoint(folder, model)
    namespace = prefix_namespace(folder, model, engine, kv_dtype=summary.dtype)
    rule = resume_rule(read_config(folder), engine.cache_block_size)
    tier = DiskTier.open(Path(engine.ssd_cache_dir), engine.ssd_cache_max_bytes)
    try:
        yield StoredPrefixes(tier, namespace, rule)
    finally:
        tier.close()
