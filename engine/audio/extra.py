"""The libraries behind speech, which the extra `audio` installs, and what is said without it."""

from __future__ import annotations

import importlib.util

from vllm_mlx.engine.errors import ModelLoadError

#: What the extra brings.
_MODULES = ("miniaudio", "mlx_audio", "scipy")


def require_audio_extra() -> None:
    """Raise `ModelLoadError` that says what to install, where something is missing."""
    if any(importlib.util.find_spec(name) is None for name in _MODULES):
        raise ModelLoadError(
            "speech needs libraries that are not installed; "
            "install them with: pip install 'vllm-mlx[audio]'"
        )
