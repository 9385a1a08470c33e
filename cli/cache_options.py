"""The options of the prefix store, shared by every command that computes or stores prefixes."""

from __future__ import annotations

import dataclasses
from typing import Any

import click

from vllm_mlx.cli.options import Decorator, FiniteRange, option, stacked

# Written out because the engine's configuration is not imported for `--help`; a test holds them
# equal.
CACHE_MEMORY_FRACTION = 0.2
CACHE_BLOCK_SIZE = 64
SSD_CACHE_MAX_GB = 10.0

_MIB = 2**20
_GIB = 2**30

cache_options: Decorator[Any] = stacked(
    option(
        "--prefix-cache/--no-prefix-cache",
        default=True,
        help="Keep the computed prefixes of prompts for later requests.",
    ),
    option(
        "--cache-memory-mb",
        type=FiniteRange(min=0, min_open=True),
        metavar="MIB",
        help="Most RAM for prefixes; default: see --cache-memory-percent.",
    ),
    option(
        "--cache-memory-percent",
        type=FiniteRange(0, 1),
        default=CACHE_MEMORY_FRACTION,
        metavar="FRACTION",
        help="Most RAM for prefixes, as a part (0 to 1) of the memory.",
    ),
    option(
        "--cache-block-size",
        type=click.IntRange(min=1),
        default=CACHE_BLOCK_SIZE,
        metavar="TOKENS",
        help="Tokens that are stored and found together.",
    ),
    option(
        "--ssd-cache-dir",
        type=click.Path(file_okay=False),
        metavar="DIR",
        help="Keep prefixes on SSD too, in this folder; several processes may share it.",
    ),
    option(
        "--ssd-cache-max-gb",
        type=FiniteRange(min=0, min_open=True),
        default=SSD_CACHE_MAX_GB,
        metavar="GIB",
        help="Most of the SSD that the folder may take, over all models.",
    ),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheOptions:
    """Hold the parsed options of the prefix store, by the names of their flags."""

    prefix_cache: bool
    cache_memory_mb: float | None
    cache_memory_percent: float
    cache_block_size: int
    ssd_cache_dir: str | None
    ssd_cache_max_gb: float

    def cache_fields(self) -> dict[str, Any]:
        """Return the fields of `EngineConfig` that they become."""
        memory = None if self.cache_memory_mb is None else int(self.cache_memory_mb * _MIB)
        return {
            "prefix_cache": self.prefix_cache,
            "cache_memory_bytes": memory,
            "cache_memory_fraction": self.cache_memory_percent,
            "cache_block_size": self.cache_block_size,
            "ssd_cache_dir": self.ssd_cache_dir,
            "ssd_cache_max_bytes": int(self.ssd_cache_max_gb * _GIB),
        }
