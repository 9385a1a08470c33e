"""Read what a sentence-transformers folder says beside the encoder: pooling, layers and prompts.

Files: `modules.json` lists the modules in order, `1_Pooling/config.json` says how token vectors
become one, `sentence_bert_config.json` how long a text may be, and
`config_sentence_transformers.json` which prompts there are. A folder without them pools by mean.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_mlx.engine.errors import ModelLoadError, UnsupportedModelError

#: Ways of pooling, in the order in which several are joined; the older and the newer names.
POOLING_MODES: Mapping[str, str] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}

#: Activation functions of dense layers, by the last part of their class names.
DENSE_ACTIVATIONS = frozenset({"Tanh", "Identity"})

#: Longer limits only say that a tokenizer has none.
_NO_LIMIT = 1_000_000


@dataclass(frozen=True)
class DenseLayer:
    """Say which linear layer follows the pooling."""

    folder: Path
    #: One of `DENSE_ACTIVATIONS`.
    activation: str


@dataclass(frozen=True)
class SentenceSettings:
    """Hold what decides how token vectors become the vector of a text."""

    pooling: tuple[str, ...] = ("mean",)
    #: Pool over the tokens of a prompt, too.
    pools_prompt: bool = True
    dense: tuple[DenseLayer, ...] = ()
    #: Longest text in tokens, None where it is not said.
    max_length: int | None = None
    lowercases: bool = False
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None


def read_sentence_settings(folder: Path) -> SentenceSettings:
    """Read a model folder; raise `UnsupportedModelError` for a module that is not computed."""
    modules = _read(folder / "modules.json", list) or []
    pooling, pools_prompt, dense = _modules(folder, modules)
    transformer = _read(folder / "sentence_bert_config.json", dict) or {}
    texts = _read(folder / "config_sentence_transformers.json", dict) or {}
    prompts = {str(name): str(text) for name, text in (texts.get("prompts") or {}).items()}
    default_prompt = texts.get("default_prompt_name")
    if default_prompt is not None and default_prompt not in prompts:
        raise ModelLoadError(f"{folder}: the default prompt {default_prompt!r} is not there")
    return SentenceSettings(
        pooling=pooling,
        pools_prompt=pools_prompt,
        dense=dense,
        max_length=_max_length(folder, transformer),
        lowercases=bool(transformer.get("do_lower_case", False)),
        prompts=prompts,
        default_prompt=default_prompt,
    )


def _modules(
    folder: Path, modules: list[Any]
) -> tuple[tuple[str, ...], bool, tuple[DenseLayer, ...]]:
    pooling: tuple[str, ...] = ("mean",)
    pools_prompt = True
    dense: list[DenseLayer] = []
    for module in modules:
        kind = str(module.get("type", "")).rpartition(".")[2]
        part = folder / str(module.get("path", ""))
        if kind == "Pooling":
            config = _read(part / "config.json", dict) or {}
            pooling = _pooling(config, part)
            pools_prompt = bool(config.get("include_prompt", True))
        elif kind == "Dense":
            dense.append(_dense(part))
        elif kind not in ("Transformer", "Normalize"):
            raise UnsupportedModelError(
                f"the sentence-transformers module {module.get('type')!r} is not computed here"
            )
    return pooling, pools_prompt, tuple(dense)


def _pooling(config: Mapping[str, Any], folder: Path) -> tuple[str, ...]:
    named = config.get("pooling_mode")
    if named is None:
        modes = [mode for key, mode in POOLING_MODES.items() if config.get(key)]
    else:
        modes = [named] if isinstance(named, str) else list(named)
    unknown = [mode for mode in modes if mode not in POOLING_MODES.values()]
    if unknown or not modes:
        raise UnsupportedModelError(f"{folder}: pooling by {unknown or 'nothing'} is not computed")
    # Several are joined in this order, whatever the order in the file.
    return tuple(mode for mode in POOLING_MODES.values() if mode in modes)


def _dense(folder: Path) -> DenseLayer:
    config = _read(folder / "config.json", dict) or {}
    activation = str(config.get("activation_function", "Identity")).rpartition(".")[2]
    if activation not in DENSE_ACTIVATIONS:
        raise UnsupportedModelError(f"{folder}: the activation {activation!r} is not computed here")
    if not (folder / "model.safetensors").is_file():
        raise ModelLoadError(f"{folder} has no model.safetensors")
    return DenseLayer(folder, activation)


def _max_length(folder: Path, transformer: Mapping[str, Any]) -> int | None:
    tokenizer = _read(folder / "tokenizer_config.json", dict) or {}
    limits = [transformer.get("max_seq_length"), tokenizer.get("model_max_length")]
    known = [int(limit) for limit in limits if limit is not None and 0 < limit < _NO_LIMIT]
    return min(known, default=None)


def _read(file: Path, expected: type) -> Any:
    """Return what a JSON file holds, None if there is none."""
    if not file.is_file():
        return None
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{file} cannot be read: {error}") from error
    if not isinstance(content, expected):
        raise ModelLoadError(f"{file} is no JSON {expected.__name__}")
    return content
