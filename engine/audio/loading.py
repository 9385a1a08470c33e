"""Load speech models, or say what has to be installed first; importing this loads nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_mlx.engine.audio.extra import require_audio_extra
from vllm_mlx.engine.audio.kind import TranscriptionConfig
from vllm_mlx.engine.host.service import ProgressCallback

if TYPE_CHECKING:
    from vllm_mlx.engine.audio.transcription import TranscriptionService


def load_transcription(
    config: TranscriptionConfig, on_progress: ProgressCallback
) -> TranscriptionService:
    """Load the model of the kind `transcription`; raise `ModelLoadError`."""
    require_audio_extra()
    from vllm_mlx.engine.audio.transcription import load_service

    return load_service(config, on_progress)
