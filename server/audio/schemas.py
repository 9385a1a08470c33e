"""The forms of the audio routes, with every field that clients are known to send."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from vllm_mlx.engine.audio.result_formats import Granularity, ResultFormat
from vllm_mlx.server.openai.schemas import Body


class AudioForm(Body):
    """Hold the fields of a file that is to become text; all of them come as strings."""

    model_config = ConfigDict(extra="allow", strict=False, frozen=True)

    #: The name of the file; its bytes are kept elsewhere.
    file: Annotated[str, Field(json_schema_extra={"format": "binary"})]
    model: str | None = None
    prompt: str | None = None
    response_format: ResultFormat | None = None
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None


class TranscriptionForm(AudioForm):
    """Hold the form of `POST /v1/audio/transcriptions`."""

    language: str | None = None
    keywords: list[str] | None = None
    stream: bool | None = None
    timestamp_granularities: list[Granularity] | None = None
    # Refused until a build supports them.
    chunking_strategy: Any = None
    include: list[str] | None = None
    known_speaker_names: list[str] | None = None
    known_speaker_references: list[str] | None = None
    languages: list[str] | None = None


class TranslationForm(AudioForm):
    """Hold the form of `POST /v1/audio/translations`."""

    timestamp_granularities: list[Granularity] | None = None
    stream: bool | None = None


#: Fields that may come several times, also as `NAME[]`.
LIST_FIELDS = frozenset(
    {
        *("timestamp_granularities", "include", "keywords", "languages"),
        *("known_speaker_names", "known_speaker_references"),
    }
)

#: Formats whose text can be sent as it grows.
STREAMED_FORMATS: tuple[Literal["json", "text"], ...] = ("json", "text")
