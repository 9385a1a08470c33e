"""The options of `serve` that say which speech models it serves, and what they take."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import click

from vllm_mlx.cli.options import Decorator, FiniteRange, option, stacked

if TYPE_CHECKING:
    from vllm_mlx.engine.audio.limits import AudioLimits
    from vllm_mlx.server.services.plan import ServicePlan

# Written out for the same reason as in `model_options`, and held equal by the same test.
MAX_AUDIO_MB = 100
MAX_AUDIO_MINUTES = 120.0

#: What bounds a sound file, for every command that reads any.
audio_limit_options: Decorator[Any] = stacked(
    option(
        "--max-audio-mb",
        type=click.IntRange(min=1),
        default=MAX_AUDIO_MB,
        metavar="MIB",
        help="Largest sound file.",
    ),
    option(
        "--max-audio-minutes",
        type=FiniteRange(min=0, min_open=True),
        default=MAX_AUDIO_MINUTES,
        metavar="MINUTES",
        help="Longest sound in a file, however small the file is.",
    ),
)

speech_options: Decorator[Any] = stacked(
    option(
        "--stt-model",
        multiple=True,
        metavar="[NAME=]MODEL",
        show_default=False,
        help="Whisper model for /v1/audio/transcriptions, a folder or a repository; may be given "
        "several times. Needs the extra `audio`.",
    ),
    audio_limit_options,
)


def audio_limits(max_audio_mb: int, max_audio_minutes: float) -> AudioLimits:
    """Return what the options of a command allow of a sound file."""
    from vllm_mlx.engine.audio.limits import AudioLimits

    return AudioLimits(max_bytes=max_audio_mb * 1024 * 1024, max_seconds=max_audio_minutes * 60)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpeechOptions:
    """Hold the parsed options of `speech_options`, by the names of their flags."""

    stt_model: tuple[str, ...]
    max_audio_mb: int
    max_audio_minutes: float

    def speech_plans(self, *, offline: bool) -> list[ServicePlan]:
        """Return the speech engines to serve; raise `UsageError`."""
        if not self.stt_model:
            return []
        from vllm_mlx.engine.audio.kind import TRANSCRIPTION, TranscriptionConfig
        from vllm_mlx.server.services.plan import ServicePlan, split_served_name

        plans = []
        for text in self.stt_model:
            name, model = split_served_name(text)
            limits = audio_limits(self.max_audio_mb, self.max_audio_minutes)
            config = TranscriptionConfig(model=model, offline=offline, limits=limits)
            plans.append(ServicePlan(TRANSCRIPTION, config, model, name))
        return plans
