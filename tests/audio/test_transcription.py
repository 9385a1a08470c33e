"""Hold that a file is heard as the plain library hears it, window by window."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from support.sound_files import BROKEN, wav_bytes, write
from support.tiny_whisper import make_whisper

from vllm_mlx.engine.audio.kind import (
    TranscriptionConfig,
    TranscriptionPart,
    TranscriptionRequest,
    transcript_of,
)
from vllm_mlx.engine.audio.loading import load_transcription
from vllm_mlx.engine.audio.transcript import Transcript
from vllm_mlx.engine.errors import InvalidRequestError, ModelLoadError, UnsupportedModelError

if TYPE_CHECKING:
    from vllm_mlx.engine.audio.transcription import TranscriptionService


def ask(service: TranscriptionService, path: Path, **fields: Any) -> list[TranscriptionPart]:
    """Return all parts of one answer."""
    return list(service.handle(TranscriptionRequest(path=str(path), **fields)))


def text_of(service: TranscriptionService, path: Path, **fields: Any) -> str:
    """Return the text of one answer."""
    return transcript_of(ask(service, path, **fields), "transcribe").text


@pytest.mark.parametrize("words", [False, True])
def test_a_file_is_heard_as_the_library_hears_it(
    service: TranscriptionService, sound: Path, words: bool
) -> None:
    """Text, times and words are those of mlx-audio's own loop over the same file."""
    ours = transcript_of(ask(service, sound, language="en", words=words), "transcribe")
    plain = service._whisper.model.generate(
        str(sound), language="en", word_timestamps=words, fp16=False
    )
    assert len(ours.text) > 20
    assert ours.text == plain.text.strip()
    spoken = [segment for segment in plain.segments if segment["text"]]
    assert [(round(s.start_s, 6), round(s.end_s, 6)) for s in ours.segments] == [
        (round(s["start"], 6), round(s["end"], 6)) for s in spoken
    ]
    assert [list(s.tokens) for s in ours.segments] == [list(s["tokens"]) for s in spoken]
    theirs = [w for s in spoken for w in s.get("words") or ()]
    assert [(w.word, w.start_s, w.end_s) for w in ours.words] == [
        (w["word"], w["start"], w["end"]) for w in theirs
    ]
    assert bool(ours.words) is words


def test_progress_is_told_with_each_window(service: TranscriptionService, sound: Path) -> None:
    """The first part says that the file is good, each later one how far the work is."""
    parts = ask(service, sound)
    assert (parts[0].segments, parts[0].done_s, parts[0].duration_s) == ((), 0.0, 33.0)
    done = [part.done_s for part in parts]
    assert done == sorted(set(done))
    assert done[-1] == 33.0
    assert len(parts) >= 3


def test_a_call_can_be_left_between_two_windows(
    service: TranscriptionService, sound: Path, short_sound: Path
) -> None:
    """A closed answer computes no further window, and the next one is not changed by it."""
    whole = text_of(service, short_sound)
    parts = service.handle(TranscriptionRequest(path=str(sound)))
    next(parts)
    next(parts)
    parts.close()  # type: ignore[attr-defined]
    assert list(parts) == []
    assert text_of(service, short_sound) == whole


def test_files_in_turn_do_not_change_each_other(
    service: TranscriptionService, short_sound: Path
) -> None:
    """Two files of which each takes a window in turn get what each gets alone, drawn or not."""
    requests = [
        TranscriptionRequest(path=str(short_sound), temperature=0.8),
        TranscriptionRequest(path=str(short_sound), language="de", prompt="w11 w12"),
    ]
    alone = [list(service.handle(request)) for request in requests]
    together: list[list[TranscriptionPart]] = [[], []]
    running = [service.handle(request) for request in requests]
    for _ in range(max(map(len, alone))):
        for parts, iterator in zip(together, running, strict=True):
            parts += [part for part in [next(iterator, None)] if part is not None]
    assert together == alone


def test_options_reach_the_model(service: TranscriptionService, short_sound: Path) -> None:
    """Language, task, prompt and temperature each change what this model says."""

    def heard(**fields: Any) -> list[tuple[str, float]]:
        parts = ask(service, short_sound, **fields)
        return [(s.text, s.avg_logprob) for part in parts for s in part.segments]

    plain = heard(language="en")
    others: list[dict[str, Any]] = [
        {"language": "de"},
        {"language": "en", "task": "translate"},
        {"language": "en", "prompt": "w5 w6 w7"},
        {"language": "en", "temperature": 1.0},
    ]
    assert [heard(**fields) != plain for fields in others] == [True] * 4
    assert heard(language="en", temperature=0.0) == plain


@pytest.mark.parametrize("name", ["German", "de", "DE", "de-AT", "de_DE"])
def test_a_language_has_several_names(
    service: TranscriptionService, short_sound: Path, name: str
) -> None:
    """Codes, names and what browsers call a language mean the same."""
    request = TranscriptionRequest(path=str(short_sound), language=name)
    first = next(service.handle(request))
    assert first is not None
    assert (first.language, first.language_name) == ("de", "german")


def test_the_language_is_heard_where_nobody_says_it(
    service: TranscriptionService, short_sound: Path
) -> None:
    """Without a language the most likely one of the first window is taken, and told."""
    parts = ask(service, short_sound)
    assert parts[0].language_name.isalpha()
    assert ask(service, short_sound, language=parts[0].language) == parts


def test_what_cannot_be_done_is_refused_by_name(
    service: TranscriptionService, short_sound: Path, tmp_path: Path
) -> None:
    """Unknown languages and files that are no sound are refused with the first part."""
    for path, fields, param in [
        (short_sound, {"language": "klingon"}, "language"),
        (write(tmp_path, "x.mp3", BROKEN["noise"]()), {}, "file"),
    ]:
        parts = service.handle(TranscriptionRequest(path=str(path), **fields))  # type: ignore[arg-type]
        with pytest.raises(InvalidRequestError) as caught:
            next(parts)
        assert caught.value.param == param


def test_a_short_and_a_silent_file_have_an_answer(
    service: TranscriptionService, tmp_path: Path
) -> None:
    """A tenth of a second, and silence, end without an error."""
    for samples in (np.zeros(1600), np.zeros(16000 * 3)):
        parts = ask(service, write(tmp_path, "x.wav", wav_bytes(samples)))
        assert parts[-1].done_s == len(samples) / 16000


@pytest.mark.slow
def test_a_model_of_english_only(tmp_path: Path, short_sound: Path) -> None:
    """It transcribes English, and neither translates nor knows another language."""
    folder = make_whisper(tmp_path / "english", is_multilingual=False)
    english = load_transcription(TranscriptionConfig(model=str(folder)), lambda *told: None)
    assert ask(english, short_sound)[-1].language == "en"
    for fields, param in [({"task": "translate"}, "model"), ({"language": "de"}, "language")]:
        with pytest.raises(InvalidRequestError, match="English only") as caught:
            ask(english, short_sound, **fields)
        assert caught.value.param == param


@pytest.mark.slow
def test_a_tokenizer_without_times_is_given_them(
    service: TranscriptionService, tmp_path: Path, short_sound: Path
) -> None:
    """The same weights with a tokenizer that lacks the times say the same."""
    folder = make_whisper(tmp_path / "timeless", has_times=False)
    timeless = load_transcription(TranscriptionConfig(model=str(folder)), lambda *told: None)
    assert text_of(timeless, short_sound) == text_of(service, short_sound)


@pytest.mark.slow
def test_a_quantised_checkpoint_is_loaded(
    service: TranscriptionService, whisper_folder: Path, short_sound: Path, tmp_path: Path
) -> None:
    """Eight bits, with the library's own names of the weights, say nearly the same."""
    import mlx.core as mx
    from mlx.nn.layers.quantized import quantize
    from mlx.utils import tree_flatten
    from mlx_audio.stt.models.whisper.whisper import Model

    shutil.copytree(whisper_folder, tmp_path / "q")
    loaded = service._whisper.model
    model = Model(loaded.dims, mx.float32)
    model.update(loaded.parameters())
    quantize(model, group_size=32, bits=8)
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(tmp_path / "q" / "model.safetensors"), weights)
    config = json.loads((whisper_folder / "config.json").read_text())
    config["quantization"] = {"group_size": 32, "bits": 8}
    (tmp_path / "q" / "config.json").write_text(json.dumps(config))
    small = load_transcription(TranscriptionConfig(model=str(tmp_path / "q")), lambda *told: None)
    assert small.info.weights_bytes < 0.5 * service.info.weights_bytes
    ours = text_of(service, short_sound, language="en").split()
    theirs = text_of(small, short_sound, language="en").split()
    assert sum(a == b for a, b in zip(ours, theirs, strict=False)) > 0.5 * len(ours)


def test_a_folder_that_is_no_speech_model_is_refused(whisper_folder: Path, tmp_path: Path) -> None:
    """Another architecture, no tokenizer, and weights of another size each say what is wrong."""

    def load(name: str) -> None:
        load_transcription(TranscriptionConfig(model=str(tmp_path / name)), lambda *told: None)

    for name in ("text", "mute", "wrong"):
        shutil.copytree(whisper_folder, tmp_path / name)
    (tmp_path / "text" / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "mute" / "tokenizer.json").unlink()
    config = tmp_path / "wrong" / "config.json"
    config.write_text(config.read_text().replace('"num_mel_bins": 80', '"num_mel_bins": 128'))
    with pytest.raises(UnsupportedModelError, match="llama model"):
        load("text")
    with pytest.raises(ModelLoadError, match="no tokenizer"):
        load("mute")
    with pytest.raises(ModelLoadError, match="do not fit"):
        load("wrong")


def test_without_the_extra_it_is_named(
    whisper_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a library is missing, loading says what to install."""
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "mlx_audio" else find(name)
    )
    with pytest.raises(ModelLoadError, match=r"pip install 'vllm-mlx\[audio\]'"):
        load_transcription(TranscriptionConfig(model=str(whisper_folder)), lambda *told: None)


def test_the_spectrum_in_pieces_is_the_librarys(
    service: TranscriptionService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Piece by piece comes out what the library computes at once, loudest moment included."""
    from mlx_audio.stt.models.whisper.audio import N_SAMPLES, log_mel_spectrogram

    from vllm_mlx.engine.audio import spectrum

    samples = np.random.default_rng(5).standard_normal(16000 * 4 + 37).astype(np.float32)
    samples[:30000] *= 0.001
    whole = np.array(log_mel_spectrogram(samples, n_mels=80, padding=N_SAMPLES))
    for frames in (6000, 97):
        monkeypatch.setattr(spectrum, "_PIECE_FRAMES", frames)
        ours = np.array(spectrum.log_mel_spectrum(samples, 80))
        assert ours.shape == whole.shape
        np.testing.assert_allclose(ours, whole, atol=2e-5)


def test_transcripts_are_put_together_from_parts() -> None:
    """The last part says how long the file is, and in what language."""
    parts = [TranscriptionPart(duration_s=2.0, language="en", language_name="english")]
    assert transcript_of(parts, "translate") == Transcript(
        task="translate", language="en", language_name="english", duration_s=2.0
    )
