"""List the models on this machine: in the hub's cache and in LM Studio's folders."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

#: Where LM Studio keeps models, newest place first.
_LM_STUDIO_FOLDERS = ("~/.lmstudio/models", "~/.cache/lm-studio/models")

_HUB_PREFIX = "models--"


class FoundModel(msgspec.Struct, frozen=True, kw_only=True):
    """Describe a folder that holds a configuration and safetensors weights."""

    #: What `vllm-mlx serve` takes.
    name: str
    source: str
    path: str
    num_bytes: int
    #: None where the configuration does not say, or cannot be read.
    model_type: str | None
    #: Bits of a weight in a quantised model.
    bits: int | None


def hub_cache_dir() -> Path:
    """Return the hub's cache folder, by its own client's rules if that is installed."""
    try:
        from huggingface_hub import constants
    except ImportError:
        home = os.environ.get("HF_HOME", "~/.cache/huggingface")
        return Path(os.environ.get("HF_HUB_CACHE", f"{home}/hub")).expanduser()
    return Path(constants.HF_HUB_CACHE)


def lm_studio_dirs() -> list[Path]:
    """Return LM Studio's model folders that are there."""
    folders = [Path(folder).expanduser() for folder in _LM_STUDIO_FOLDERS]
    return [folder for folder in folders if folder.is_dir()]


def found_models() -> list[FoundModel]:
    """Return every model found, by source and name; what cannot be read is left out."""
    found = [*_in_hub_cache(hub_cache_dir())]
    for folder in lm_studio_dirs():
        found += _in_lm_studio(folder)
    return sorted(found, key=lambda model: (model.source, model.name))


def _in_hub_cache(folder: Path) -> Iterator[FoundModel]:
    for repository in _children(folder):
        if not repository.name.startswith(_HUB_PREFIX):
            continue
        name = repository.name.removeprefix(_HUB_PREFIX).replace("--", "/")
        # Of several revisions the newest: what is served without a revision.
        snapshots = sorted(_children(repository / "snapshots"), key=_modified, reverse=True)
        for snapshot in snapshots:
            model = _model_in(snapshot, name, "hub")
            if model is not None:
                yield model
                break


def _in_lm_studio(folder: Path) -> Iterator[FoundModel]:
    for publisher in _children(folder):
        for place in _children(publisher):
            model = _model_in(place, str(place), "LM Studio")
            if model is not None:
                yield model


def _model_in(folder: Path, name: str, source: str) -> FoundModel | None:
    try:
        sizes = [file.stat().st_size for file in folder.glob("*.safetensors")]
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not sizes or not isinstance(config, dict):
        return None
    quantization = config.get("quantization")
    bits = quantization.get("bits") if isinstance(quantization, dict) else None
    model_type = config.get("model_type")
    return FoundModel(
        name=name,
        source=source,
        path=str(folder),
        num_bytes=sum(sizes),
        model_type=model_type if isinstance(model_type, str) else None,
        bits=bits if isinstance(bits, int) else None,
    )


def _children(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if path.is_dir())
    except OSError:
        return []


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
