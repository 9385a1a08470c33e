"""What was said in a sound file: the text, its segments and its words, as frozen messages."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

Task = Literal["transcribe", "translate"]


class Word(msgspec.Struct, frozen=True):
    """Hold one word and when it is said, in seconds from the start of the file."""

    word: str
    start_s: float
    end_s: float


class Segment(msgspec.Struct, frozen=True, kw_only=True):
    """Hold a piece of the text, about a sentence, as the model has marked it."""

    id: int
    start_s: float
    end_s: float
    #: With the space that stands before it.
    text: str
    #: The model's tokens, those of its times included.
    tokens: tuple[int, ...] = ()
    #: Where the window that it was read from begins, in hundredths of a second.
    seek: int = 0
    temperature: float = 0.0
    avg_logprob: float = 0.0
    compression_ratio: float = 0.0
    no_speech_prob: float = 0.0
    #: None where words were not asked for.
    words: tuple[Word, ...] | None = None


class Transcript(msgspec.Struct, frozen=True, kw_only=True):
    """Hold all of a file's text."""

    task: Task = "transcribe"
    #: Code of the spoken language, as `en`.
    language: str
    #: The same in words, as `english`.
    language_name: str
    duration_s: float
    segments: tuple[Segment, ...] = ()

    @property
    def text(self) -> str:
        """Return the whole text."""
        return text_of(self.segments)

    @property
    def words(self) -> list[Word]:
        """Return the words of all segments."""
        return [word for segment in self.segments for word in segment.words or ()]


def text_of(segments: Iterable[Segment]) -> str:
    """Return the text of segments in a row; with more of them it only grows at its end."""
    return "".join(segment.text for segment in segments).strip()
