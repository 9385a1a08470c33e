"""A transcript as plain text, as JSON, and as subtitles."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterator
from typing import Any, Literal, get_args

from vllm_mlx.engine.audio.transcript import Segment, Transcript

ResultFormat = Literal["json", "text", "srt", "verbose_json", "vtt"]
RESULT_FORMATS: tuple[ResultFormat, ...] = get_args(ResultFormat)

Granularity = Literal["segment", "word"]
GRANULARITIES: tuple[Granularity, ...] = get_args(Granularity)
_SEGMENTS: tuple[Granularity, ...] = ("segment",)


def render_text(transcript: Transcript) -> str:
    """Return the text and a line break."""
    return transcript.text + "\n"


def render_srt(transcript: Transcript) -> str:
    """Return SubRip subtitles, one for each segment that has text."""
    return "".join(
        f"{number}\n{_clock(segment.start_s, ',')} --> {_clock(segment.end_s, ',')}\n{text}\n\n"
        for number, (segment, text) in enumerate(_cues(transcript), start=1)
    )


def render_vtt(transcript: Transcript) -> str:
    """Return WebVTT subtitles, one for each segment that has text."""
    return "WEBVTT\n\n" + "".join(
        f"{_clock(segment.start_s, '.')} --> {_clock(segment.end_s, '.')}\n{_vtt_text(text)}\n\n"
        for segment, text in _cues(transcript)
    )


def plain_fields(transcript: Transcript) -> dict[str, Any]:
    """Return the fields of OpenAI's `json` answer."""
    return {"text": transcript.text, "usage": _usage(transcript)}


def verbose_fields(
    transcript: Transcript, granularities: Collection[Granularity] = _SEGMENTS
) -> dict[str, Any]:
    """Return the fields of OpenAI's `verbose_json` answer, with what `granularities` ask for."""
    fields: dict[str, Any] = {
        "task": transcript.task,
        "language": transcript.language_name,
        "duration": _rounded(transcript.duration_s),
        "text": transcript.text,
        "usage": _usage(transcript),
    }
    if "segment" in granularities:
        fields["segments"] = [_segment_fields(segment) for segment in transcript.segments]
    if "word" in granularities:
        fields["words"] = [
            {
                "word": word.word.strip(),
                "start": _rounded(word.start_s),
                "end": _rounded(word.end_s),
            }
            for word in transcript.words
        ]
    return fields


def render_json(transcript: Transcript) -> str:
    """Return all that is known as JSON for people, words included where there are any."""
    has_words = any(segment.words is not None for segment in transcript.segments)
    granularities: tuple[Granularity, ...] = ("segment", "word") if has_words else ("segment",)
    fields = verbose_fields(transcript, granularities)
    return json.dumps(fields, ensure_ascii=False, indent=2) + "\n"


#: How a format that is one text is written.
TEXT_RENDERERS: dict[ResultFormat, Callable[[Transcript], str]] = {
    "text": render_text,
    "srt": render_srt,
    "vtt": render_vtt,
}


def _usage(transcript: Transcript) -> dict[str, Any]:
    return {"type": "duration", "seconds": math.ceil(transcript.duration_s)}


def _segment_fields(segment: Segment) -> dict[str, Any]:
    return {
        "id": segment.id,
        "seek": segment.seek,
        "start": _rounded(segment.start_s),
        "end": _rounded(segment.end_s),
        "text": segment.text,
        "tokens": list(segment.tokens),
        "temperature": segment.temperature,
        "avg_logprob": segment.avg_logprob,
        "compression_ratio": segment.compression_ratio,
        "no_speech_prob": segment.no_speech_prob,
    }


def _cues(transcript: Transcript) -> Iterator[tuple[Segment, str]]:
    """Yield the segments with text, and that on one line: an empty line would end a subtitle."""
    for segment in transcript.segments:
        text = " ".join(segment.text.split())
        if text:
            yield segment, text


def _vtt_text(text: str) -> str:
    """Escape what WebVTT reads as markup."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _clock(seconds: float, decimal_mark: str) -> str:
    milliseconds = round(max(0.0, seconds) * 1000)
    minutes, milliseconds = divmod(milliseconds, 60_000)
    hours, minutes = divmod(minutes, 60)
    whole, milliseconds = divmod(milliseconds, 1000)
    return f"{hours:02d}:{minutes:02d}:{whole:02d}{decimal_mark}{milliseconds:03d}"


def _rounded(seconds: float) -> float:
    return round(seconds, 3)
