"""Declare the engine kind `transcription`: what its process is told, asked and answers."""

from __future__ import annotations

import msgspec

from vllm_mlx.engine.audio.limits import AudioLimits
from vllm_mlx.engine.audio.transcript import Segment, Task, Transcript
from vllm_mlx.engine.config import DtypeName
from vllm_mlx.engine.host.service import ServiceKind


class TranscriptionConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Say which speech model to load and how."""

    #: A local folder, or a hub repository.
    model: str
    #: `auto` is float32 on CPU, and elsewhere the checkpoint's own.
    dtype: DtypeName = "auto"
    #: Never reach for the network.
    offline: bool = False
    limits: AudioLimits = AudioLimits()


class TranscriptionRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Ask for the text of one file, which the process reads itself."""

    path: str
    task: Task = "transcribe"
    #: Code or English name; None to find out.
    language: str | None = None
    #: What was said before, or words that are likely to come.
    prompt: str | None = None
    #: None, like 0, is greedy, and warmer where that fails; any other is taken as it is.
    temperature: float | None = None
    words: bool = False


class TranscriptionPart(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Say how far the work is, and what was understood since the part before.

    The first part has no segments: the file was decoded and the request is one that can be done.
    """

    segments: tuple[Segment, ...] = ()
    #: Seconds of sound that are done, of `duration_s`.
    done_s: float = 0.0
    duration_s: float
    language: str
    language_name: str


def transcript_of(parts: list[TranscriptionPart], task: Task) -> Transcript:
    """Put the parts of a whole answer together."""
    last = parts[-1]
    return Transcript(
        task=task,
        language=last.language,
        language_name=last.language_name,
        duration_s=last.duration_s,
        segments=tuple(segment for part in parts for segment in part.segments),
    )


TRANSCRIPTION = ServiceKind(
    name="transcription",
    reference="vllm_mlx.engine.audio.kind:TRANSCRIPTION",
    loader="vllm_mlx.engine.audio.loading:load_transcription",
    config_type=TranscriptionConfig,
    request_type=TranscriptionRequest,
    part_type=TranscriptionPart,
    # Each holds the spectrum of a whole file: 1.9 MB a minute.
    max_active=4,
)
