"""The service of the kind `transcription`: from a request to the parts of its answer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx

from vllm_mlx.engine import platform
from vllm_mlx.engine.audio.decoding import decode_audio
from vllm_mlx.engine.audio.kind import (
    TranscriptionConfig,
    TranscriptionPart,
    TranscriptionRequest,
)
from vllm_mlx.engine.audio.limits import AudioLimits
from vllm_mlx.engine.audio.transcript import Segment
from vllm_mlx.engine.audio.whisper_model import WhisperModel, language_name, load_whisper
from vllm_mlx.engine.audio.windows import FileReading
from vllm_mlx.engine.config import ModelConfig
from vllm_mlx.engine.errors import InvalidRequestError
from vllm_mlx.engine.host.messages import ServiceInfo
from vllm_mlx.engine.host.service import ProgressCallback
from vllm_mlx.engine.models.resolve import resolve_model


def load_service(
    config: TranscriptionConfig, on_progress: ProgressCallback
) -> TranscriptionService:
    """Load a speech model; raise `ModelLoadError`. MLX's backend must be prepared."""
    model = ModelConfig(model=config.model, offline=config.offline)
    folder = resolve_model(model, on_progress)
    on_progress("loading weights", None)
    whisper = load_whisper(folder, config.dtype)
    info = ServiceInfo(
        model=config.model,
        path=str(folder),
        model_type="whisper",
        dtype=whisper.dtype,
        weights_bytes=whisper.weights_bytes,
        device=platform.device_name(),
        details={"is_multilingual": whisper.is_multilingual},
    )
    return TranscriptionService(whisper, info, config.limits)


class TranscriptionService:
    """Own one speech model; MLX's thread only."""

    def __init__(self, whisper: WhisperModel, info: ServiceInfo, limits: AudioLimits) -> None:
        self._whisper = whisper
        self._info = info
        self._limits = limits

    @property
    def info(self) -> ServiceInfo:
        """Return what was loaded."""
        return self._info

    def handle(self, request: TranscriptionRequest) -> Iterator[TranscriptionPart]:
        """Read one file, a window with each part; the first part has the file decoded."""
        if request.task == "translate" and not self._whisper.is_multilingual:
            raise InvalidRequestError(
                f"{self._info.model} knows English only and cannot translate; serve a multilingual "
                "model",
                param="model",
            )
        if request.language is not None:
            self._whisper.language_code(request.language)
        samples = decode_audio(Path(request.path), self._limits)
        reading = FileReading(self._whisper, samples, request)
        del samples
        segments: tuple[Segment, ...] = ()
        while True:
            yield TranscriptionPart(
                segments=segments,
                done_s=reading.done_s,
                duration_s=reading.duration_s,
                language=reading.language,
                language_name=language_name(reading.language),
            )
            if reading.is_done:
                return
            segments = tuple(reading.read_window())
            # Each window leaves buffers of its own sizes behind.
            mx.clear_cache()

    def close(self) -> None:
        """Do nothing: the weights go with the process."""
