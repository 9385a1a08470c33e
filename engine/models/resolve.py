"""Turn a model's name into a folder on disk: the demo, a local folder, or a hub repository."""

from __future__ import annotations

import json
from pathlib import Path

from vllm_mlx.engine.config import DEMO_MODEL, ModelConfig
from vllm_mlx.engine.errors import ModelLoadError, ModelNotFoundError
from vllm_mlx.engine.models.progress import ProgressCallback
from vllm_mlx.engine.platform import installed_backend


def resolve_model(config: ModelConfig, on_progress: ProgressCallback) -> Path:
    """Return the folder that holds the model's config.json and safetensors weights.

    That of random weights holds none: they are made anew at each load. Makes the demo model or
    downloads a repository if it is not on disk; MLX is not imported.
    `on_progress` is called from the calling thread only. Raises ModelNotFoundError,
    HubUnreachableError or another ModelLoadError, each with one line that says what to do.
    """
    on_progress("resolving", None)
    name = config.model
    if config.shape is not None:
        from vllm_mlx.engine.models.dummy_folder import ensure_dummy_folder

        return ensure_dummy_folder(config.shape, on_progress)
    if name == DEMO_MODEL:
        from vllm_mlx.engine.models.demo import DemoVariant, ensure_demo_model

        variant: DemoVariant = "float32" if installed_backend() == "cpu" else "4bit"
        return ensure_demo_model(variant, on_progress, offline=config.offline)
    folder = Path(name).expanduser()
    if folder.exists() or _is_path_like(name):
        return _local_folder(folder)
    from vllm_mlx.engine.models.hub import fetch_repository

    folder = fetch_repository(
        name,
        on_progress,
        offline=config.offline,
        with_code=config.trust_remote_code,
    )
    return _local_folder(folder)


def weight_files(folder: Path) -> list[Path]:
    """Return the folder's weight files in order, as mlx-lm will load them.

    Raises ModelLoadError if files that the index names are missing.
    """
    found = sorted(folder.glob("model*.safetensors"))
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            named = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise ModelLoadError(f"{index} is damaged: {error!r}; fetch it again") from error
        missing = sorted(named - {path.name for path in found})
        if missing:
            raise ModelNotFoundError(
                f"{folder} lacks {len(missing)} of {len(named)} weight files, "
                f"{missing[0]} for one; fetch the model again"
            )
    return found


def _is_path_like(name: str) -> bool:
    """Tell a path from a repository's name, which is `name` or `owner/name`."""
    return name.startswith(("/", ".", "~")) or name.endswith("/") or name.count("/") > 1


def _local_folder(folder: Path) -> Path:
    if not folder.exists():
        raise ModelNotFoundError(f"no model folder {folder}: check the path")
    if not folder.is_dir():
        raise ModelNotFoundError(
            f"{folder} is a file; give the folder that holds config.json and *.safetensors"
        )
    if not (folder / "config.json").is_file():
        raise ModelNotFoundError(f"{folder} is not a model folder: it has no config.json")
    if not weight_files(folder):
        others = sorted(
            path.name
            for pattern in ("*.gguf", "*.bin", "*.npz", "*.safetensors")
            for path in folder.glob(pattern)
        )
        hint = f"; {others[0]} is in a format that is not read: convert it first" if others else ""
        raise ModelNotFoundError(f"{folder} has no model*.safetensors weights{hint}")
    return folder
