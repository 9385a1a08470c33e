"""Read a file window by window: 30 s are heard, and the next window begins where they made sense.

The rules are those of OpenAI's Whisper. What is heard is decoded by mlx-audio.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_audio.stt.models.whisper.audio import HOP_LENGTH, N_FRAMES, SAMPLE_RATE
from mlx_audio.stt.models.whisper.decoding import DecodingOptions
from mlx_audio.stt.models.whisper.timing import add_word_timestamps
from numpy.typing import NDArray

from vllm_mlx.engine.audio.kind import TranscriptionRequest
from vllm_mlx.engine.audio.spectrum import log_mel_spectrum
from vllm_mlx.engine.audio.transcript import Segment, Word
from vllm_mlx.engine.audio.whisper_model import WhisperModel

#: Greedy first; a window that came out badly is drawn again, ever more freely.
_TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)

#: Text that compresses better than this repeats itself.
_MAX_COMPRESSION = 2.4
#: Mean log-probability below which a window was guessed.
_MIN_LOGPROB = -1.0
_MAX_NO_SPEECH = 0.6

#: A window drawn more freely than this misleads the next one.
_MAX_PROMPT_TEMPERATURE = 0.5


class FileReading:
    """Own the reading of one file, from its samples to its last segment; MLX's thread only."""

    def __init__(
        self, whisper: WhisperModel, samples: NDArray[np.float32], request: TranscriptionRequest
    ) -> None:
        """Compute the spectrum and, where the request does not name it, hear the language."""
        self._model = whisper.model
        self._dtype = whisper.model.dtype
        self._request = request
        self.duration_s: float = len(samples) / SAMPLE_RATE
        self._spectrum = log_mel_spectrum(samples, whisper.model.dims.n_mels)
        self._num_frames: int = self._spectrum.shape[0] - N_FRAMES
        self.language = self._language(whisper)
        self._tokenizer = self._model.get_tokenizer(language=self.language, task=request.task)
        self._seek = 0
        self._num_segments = 0
        self._last_speech_s = 0.0
        #: What the next window is told that came before it.
        self._context: list[int] = []
        if request.prompt is not None and request.prompt.strip():
            self._context = self._tokenizer.encode(" " + request.prompt.strip())

    @property
    def is_done(self) -> bool:
        """Say whether the end of the file was reached."""
        return self._seek >= self._num_frames

    @property
    def done_s(self) -> float:
        """Return how many seconds have been read."""
        return min(self.duration_s, float(self._seek * HOP_LENGTH / SAMPLE_RATE))

    def read_window(self) -> list[Segment]:
        """Hear the next 30 s and return the segments that were understood in them."""
        size = min(N_FRAMES, self._num_frames - self._seek)
        window = self._window(self._seek, size)
        result = self._decode(window)
        if result.no_speech_prob > _MAX_NO_SPEECH and result.avg_logprob <= _MIN_LOGPROB:
            self._seek += size
            return []
        tokens = list(result.tokens)
        drafts, advance = self._split(tokens, size)
        if self._request.words:
            advance = self._add_words(drafts, window, size, tokens, advance)
        self._seek += max(1, advance)
        return self._finish(drafts, result)

    def _language(self, whisper: WhisperModel) -> str:
        if self._request.language is not None:
            return whisper.language_code(self._request.language)
        if not whisper.is_multilingual:
            return "en"
        _, probabilities = self._model.detect_language(self._window(0, N_FRAMES))
        return str(max(probabilities, key=probabilities.get))

    def _window(self, start: int, size: int) -> mx.array:
        """Return 30 s of spectrum of which `size` frames are sound."""
        window = self._spectrum[start : start + size]
        return mx.pad(window, [(0, N_FRAMES - size), (0, 0)]).astype(self._dtype)

    def _decode(self, window: mx.array) -> Any:
        """Return the library's result for one window, of the first temperature that will do."""
        temperature = self._request.temperature
        # What is drawn depends on the file and the place in it alone.
        mx.random.seed(self._seek)
        result = None
        for each in (temperature,) if temperature else _TEMPERATURES:
            options = DecodingOptions(
                task=self._request.task,
                language=self.language,
                temperature=each,
                prompt=self._context,
                fp16=self._dtype == mx.float16,
            )
            result = self._model.decode(window, options)
            is_guessed = result.avg_logprob < _MIN_LOGPROB
            is_silence = is_guessed and result.no_speech_prob > _MAX_NO_SPEECH
            is_bad = is_guessed or result.compression_ratio > _MAX_COMPRESSION
            if is_silence or not is_bad:
                break
        return result

    def _split(self, tokens: list[int], size: int) -> tuple[list[dict[str, Any]], int]:
        """Cut a window's tokens where two times follow each other.

        Returns the segments and how many frames they account for: all of the window if it ends
        with one time, which says that nothing comes after it; else up to the last pair of times.
        """
        begin = self._tokenizer.timestamp_begin
        is_time = [token >= begin for token in tokens]
        cuts = [i for i in range(1, len(tokens)) if is_time[i - 1] and is_time[i]]
        frames_per_time = N_FRAMES // self._model.dims.n_audio_ctx
        if cuts:
            advance = (tokens[cuts[-1] - 1] - begin) * frames_per_time
            if self._ends_with_one_time(tokens):
                cuts.append(len(tokens))
                advance = size
            pieces = [tokens[a:b] for a, b in zip([0, *cuts], cuts, strict=False)]
            times = [(piece[0] - begin, piece[-1] - begin) for piece in pieces]
        else:
            marks = [token - begin for token in tokens if token >= begin]
            end = marks[-1] if marks and marks[-1] > 0 else size // frames_per_time
            pieces, times, advance = [tokens], [(0, end)], size
        seconds = frames_per_time * HOP_LENGTH / SAMPLE_RATE
        offset = self._seek * HOP_LENGTH / SAMPLE_RATE
        drafts = [
            self._draft(piece, offset + start * seconds, offset + end * seconds)
            for piece, (start, end) in zip(pieces, times, strict=True)
        ]
        return drafts, advance

    def _ends_with_one_time(self, tokens: Sequence[int]) -> bool:
        begin = self._tokenizer.timestamp_begin
        return [token >= begin for token in tokens[-2:]] == [False, True]

    def _draft(self, tokens: list[int], start: float, end: float) -> dict[str, Any]:
        """Return a segment in the library's form, which its alignment of words works on."""
        text = [token for token in tokens if token < self._tokenizer.eot]
        return {
            "seek": self._seek,
            "start": start,
            "end": end,
            "text": self._tokenizer.decode(text),
            "tokens": tokens,
            "words": None,
        }

    def _add_words(
        self,
        drafts: list[dict[str, Any]],
        window: mx.array,
        size: int,
        tokens: Sequence[int],
        advance: int,
    ) -> int:
        """Find when each word is said, and return how far the window is good for."""
        add_word_timestamps(
            segments=drafts,
            model=self._model,
            tokenizer=self._tokenizer,
            mel=window,
            num_frames=size,
            last_speech_timestamp=self._last_speech_s,
        )
        ends = [word["end"] for draft in drafts for word in draft["words"] or ()]
        last_s = ends[-1] if ends else drafts[-1]["end"]
        self._last_speech_s = last_s
        if self._ends_with_one_time(tokens):
            return advance
        frames = round(last_s * SAMPLE_RATE / HOP_LENGTH)
        return frames - self._seek if frames > self._seek else advance

    def _finish(self, drafts: Sequence[dict[str, Any]], result: Any) -> list[Segment]:
        """Turn drafts into segments, without those that say nothing or take no time."""
        segments: list[Segment] = []
        for draft in drafts:
            if draft["start"] == draft["end"] or not draft["text"].strip():
                continue
            words = draft["words"] or () if self._request.words else None
            segments.append(
                Segment(
                    id=self._num_segments + len(segments),
                    seek=draft["seek"],
                    start_s=draft["start"],
                    end_s=min(draft["end"], self.duration_s),
                    text=draft["text"],
                    tokens=tuple(draft["tokens"]),
                    temperature=result.temperature,
                    avg_logprob=result.avg_logprob,
                    compression_ratio=result.compression_ratio,
                    no_speech_prob=result.no_speech_prob,
                    words=None if words is None else tuple(map(_word, words)),
                )
            )
        self._num_segments += len(segments)
        self._context += [token for segment in segments for token in segment.tokens]
        if result.temperature > _MAX_PROMPT_TEMPERATURE:
            self._context = []
        return segments


def _word(fields: dict[str, Any]) -> Word:
    return Word(fields["word"], fields["start"], fields["end"])
