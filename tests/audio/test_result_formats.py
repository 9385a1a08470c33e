"""Hold each form of a transcript to the letter."""

from __future__ import annotations

import json

import pytest
from openai.types.audio import Transcription, TranscriptionVerbose, TranslationVerbose

from vllm_mlx.engine.audio.result_formats import (
    plain_fields,
    render_json,
    render_srt,
    render_text,
    render_vtt,
    verbose_fields,
)
from vllm_mlx.engine.audio.transcript import Segment, Transcript, Word, text_of

WORDS = (Word(" Ever", 0.0, 0.42), Word(" tried,", 0.42, 1.0625))
TRANSCRIPT = Transcript(
    language="en",
    language_name="english",
    duration_s=3723.25,
    segments=(
        Segment(
            id=0, start_s=0.0, end_s=1.0625, text=" Ever tried,", tokens=(50363, 7), words=WORDS
        ),
        Segment(id=1, start_s=1.5, end_s=2.0, text="  "),
        Segment(
            id=2, start_s=59.9996, end_s=3723.25, text=" <i>a &\n\nb</i> --> c", avg_logprob=-0.5
        ),
    ),
)


def test_text_is_the_text_and_a_line_break() -> None:
    """Nothing but what was said."""
    assert render_text(TRANSCRIPT) == "Ever tried,   <i>a &\n\nb</i> --> c\n"


def test_srt_to_the_letter() -> None:
    """Numbers go on over segments without text, and no empty line is within one."""
    assert render_srt(TRANSCRIPT) == (
        "1\n00:00:00,000 --> 00:00:01,062\nEver tried,\n\n"
        "2\n00:01:00,000 --> 01:02:03,250\n<i>a & b</i> --> c\n\n"
    )


def test_vtt_to_the_letter() -> None:
    """What WebVTT would read as markup is escaped."""
    assert render_vtt(TRANSCRIPT) == (
        "WEBVTT\n\n"
        "00:00:00.000 --> 00:00:01.062\nEver tried,\n\n"
        "00:01:00.000 --> 01:02:03.250\n&lt;i&gt;a &amp; b&lt;/i&gt; --&gt; c\n\n"
    )


def test_the_plain_answer_is_openais() -> None:
    """The client's own type reads `json`."""
    read = Transcription.model_validate(plain_fields(TRANSCRIPT), strict=True)
    assert read.text == TRANSCRIPT.text
    assert read.usage is not None
    assert read.usage.type == "duration"
    assert read.usage.seconds == 3724


@pytest.mark.parametrize(
    ("granularities", "has_segments", "has_words"),
    [
        (("segment",), True, False),
        (("word",), False, True),
        (("word", "segment"), True, True),
    ],
)
def test_the_verbose_answer_is_openais(
    granularities: tuple[str, ...], has_segments: bool, has_words: bool
) -> None:
    """The client's own type reads `verbose_json`, with what was asked for and no more."""
    fields = verbose_fields(TRANSCRIPT, granularities)  # type: ignore[arg-type]
    read = TranscriptionVerbose.model_validate(fields, strict=True)
    assert (read.segments is not None, read.words is not None) == (has_segments, has_words)
    assert read.language == "english"
    if read.words is not None:
        assert [(word.word, word.start, word.end) for word in read.words] == [
            ("Ever", 0.0, 0.42),
            ("tried,", 0.42, 1.062),
        ]
    if read.segments is not None:
        assert read.segments[0].tokens == [50363, 7]
        assert read.segments[2].avg_logprob == -0.5
    TranslationVerbose.model_validate({**fields, "language": "english"}, strict=True)


def test_the_file_of_json_has_words_where_there_are_any() -> None:
    """What `transcribe` writes names the words exactly if they were computed."""
    assert json.loads(render_json(TRANSCRIPT))["words"][0]["word"] == "Ever"
    plain = Transcript(language="de", language_name="german", duration_s=1.0)
    assert "words" not in json.loads(render_json(plain))


def test_text_grows_at_its_end_only() -> None:
    """With each segment the text goes on where it was: streams send the difference."""
    for count in range(4):
        assert TRANSCRIPT.text.startswith(text_of(TRANSCRIPT.segments[:count]))
