"""Hold that sound of any kind becomes the same samples, and that what is none is refused."""

from __future__ import annotations

import stat
from pathlib import Path

import numpy as np
import pytest
from support.sound_files import (
    BROKEN,
    DATA,
    flac_bomb,
    silent_mp3,
    tone,
    wav_bytes,
    write,
)

from vllm_mlx.engine.audio.containers import Container, container_of
from vllm_mlx.engine.audio.decoding import SAMPLE_RATE, decode_audio
from vllm_mlx.engine.audio.limits import AudioLimits
from vllm_mlx.engine.errors import InvalidRequestError, UsageError

pytest.importorskip("miniaudio", reason="the extra `audio` is not installed")
pytest.importorskip("mlx_audio", reason="the extra `audio` is not installed")

LIMITS = AudioLimits()


def middle_error(samples: np.ndarray, seconds: float) -> float:
    """Return how far samples are from the tone, but for the edges, where a filter has less."""
    expected = tone(seconds)
    assert abs(len(samples) - len(expected)) <= 1
    count = min(len(samples), len(expected)) - 1600
    return float(np.abs(samples[1600:count] - expected[1600:count]).max())


@pytest.mark.parametrize("num_channels", [1, 2, 6])
@pytest.mark.parametrize("rate", [8000, 11025, 16000, 22050, 44100, 48000, 96000, 192000])
def test_any_rate_and_any_channels_give_the_same_samples(
    tmp_path: Path, rate: int, num_channels: int
) -> None:
    """A tone at 8 to 192 kHz, mono or not, is that tone at 16 kHz."""
    path = write(tmp_path, "x.wav", wav_bytes(tone(0.5, rate), rate, num_channels=num_channels))
    samples = decode_audio(path, LIMITS)
    assert samples.dtype == np.float32
    assert middle_error(samples, 0.5) < 1e-3


@pytest.mark.parametrize("name", ["tone.flac", "tone.mp3"])
@pytest.mark.parametrize("called", ["x.wav", "x.flac", "x.mp3", "x", "x.txt"])
def test_the_name_of_a_file_says_nothing(tmp_path: Path, name: str, called: str) -> None:
    """Flac and mp3 files are read whatever they are called."""
    path = write(tmp_path, called, (DATA / name).read_bytes())
    samples = decode_audio(path, LIMITS)
    spectrum = np.abs(np.fft.rfft(samples))
    loudest = spectrum.argmax() * SAMPLE_RATE / len(samples)
    assert loudest == pytest.approx(440, abs=3)
    assert np.abs(samples).max() == pytest.approx(0.5, abs=0.05)


def test_samples_are_the_librarys_own() -> None:
    """Files decode to what mlx-audio itself hears in them."""
    from mlx_audio.audio_io import read

    for path in sorted(DATA.iterdir()):
        expected, _ = read(str(path), dtype="float32", sample_rate=SAMPLE_RATE, nchannels=1)
        ours = decode_audio(path, LIMITS)
        count = min(len(ours), len(expected))
        assert abs(len(ours) - len(expected)) <= 2
        np.testing.assert_allclose(ours[:count], expected[:count], atol=1e-6)


@pytest.mark.parametrize("fault", sorted(BROKEN))
def test_what_is_no_sound_is_refused_by_the_name_of_its_field(tmp_path: Path, fault: str) -> None:
    """Garbage, nothing, and broken headers are faults of `file`."""
    path = write(tmp_path, "x.wav", BROKEN[fault]())
    with pytest.raises(InvalidRequestError) as caught:
        decode_audio(path, LIMITS)
    assert caught.value.param == "file"


def test_a_file_that_was_cut_off_gives_what_there_is(tmp_path: Path) -> None:
    """Half a wav file and half an mp3 file give half of the sound."""
    for name, data in [("a.wav", wav_bytes(tone(1.0))), ("a.mp3", silent_mp3(1.0))]:
        path = write(tmp_path, name, data[: len(data) // 2])
        assert len(decode_audio(path, LIMITS)) == pytest.approx(8000, rel=0.1)


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("bomb.flac", flac_bomb(100)),
        ("bomb.mp3", silent_mp3(3.0)),
        ("bomb.wav", wav_bytes(np.zeros(8000 * 3), 8000)),
    ],
)
def test_a_bomb_ends_while_it_is_decoded(tmp_path: Path, name: str, data: bytes) -> None:
    """A file of more sound than is allowed is refused after no more than that was decoded."""
    num_checks = 0

    def check() -> None:
        nonlocal num_checks
        num_checks += 1

    path = write(tmp_path, name, data)
    with pytest.raises(InvalidRequestError, match="minutes of sound"):
        decode_audio(path, AudioLimits(max_seconds=2.0), check)
    # 16,384 frames each: two seconds at 48 kHz are six of them.
    assert 1 <= num_checks <= 8


def test_as_much_as_is_allowed_is_allowed(tmp_path: Path) -> None:
    """A file of just the longest length is decoded."""
    path = write(tmp_path, "x.wav", wav_bytes(np.zeros(32000)))
    assert len(decode_audio(path, AudioLimits(max_seconds=2.0))) == 32000


def test_a_file_of_too_many_bytes_is_not_opened(tmp_path: Path) -> None:
    """The limit on bytes names its flag."""
    path = write(tmp_path, "x.wav", bytes(3000))
    with pytest.raises(InvalidRequestError, match="--max-audio-mb"):
        decode_audio(path, AudioLimits(max_bytes=2999))


def test_decoding_can_be_cancelled(tmp_path: Path) -> None:
    """What the check raises comes out."""

    def check() -> None:
        raise KeyboardInterrupt

    path = write(tmp_path, "x.wav", wav_bytes(np.zeros(100_000)))
    with pytest.raises(KeyboardInterrupt):
        decode_audio(path, LIMITS, check)


@pytest.mark.parametrize("maximum", [{"max_bytes": 0}, {"max_seconds": 0.0}])
def test_limits_that_allow_nothing_are_refused(maximum: dict[str, float]) -> None:
    """A limit below everything is a usage error."""
    with pytest.raises(UsageError):
        AudioLimits(**maximum)


M4A = b"\0\0\0\x20ftypM4A " + bytes(100)


def test_other_files_need_ffmpeg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without ffmpeg, an m4a file is refused and ffmpeg named."""
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InvalidRequestError, match="ffmpeg, which is not installed"):
        decode_audio(write(tmp_path, "x.m4a", M4A), LIMITS)


def _install_ffmpeg(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    program = write(folder, "ffmpeg", f"#!/bin/sh\n{script}\n".encode())
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(folder), prepend=":")


def test_ffmpeg_is_told_what_to_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the container nor what may be opened is left to ffmpeg's guess."""
    arguments = tmp_path / "arguments"
    _install_ffmpeg(tmp_path, monkeypatch, f'echo "$@" > {arguments}; head -c 2000 /dev/zero')
    assert len(decode_audio(write(tmp_path, "x.m4a", M4A), LIMITS)) == 1000
    words = arguments.read_text()
    assert "-f mov -i file:" in words
    assert "-protocol_whitelist file,pipe" in words


def test_ffmpeg_that_never_ends_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bomb that ffmpeg reads is ended at the limit, and ffmpeg with it."""
    _install_ffmpeg(tmp_path, monkeypatch, "exec cat /dev/zero")
    with pytest.raises(InvalidRequestError, match="minutes of sound"):
        decode_audio(write(tmp_path, "x.m4a", M4A), AudioLimits(max_seconds=5.0))


def test_ffmpeg_that_fails_is_a_fault_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What ffmpeg cannot read is a clear refusal."""
    _install_ffmpeg(tmp_path, monkeypatch, "exit 1")
    with pytest.raises(InvalidRequestError, match="cannot be decoded"):
        decode_audio(write(tmp_path, "x.m4a", M4A), LIMITS)


TAG = b"ID3\x04\x00\x00\x00\x00\x00\x0a" + bytes(10)

KINDS = [
    (b"RIFF\0\0\0\0WAVEfmt ", Container.WAV),
    (b"RIFF\0\0\0\0AVI LIST", None),
    (b"fLaC\0\0\0\x22", Container.FLAC),
    (TAG + b"fLaC\0\0\0\x22", Container.FLAC),
    (TAG + bytes(100) + b"\xff\xfb\x90\xc4", Container.MP3),
    (TAG + TAG + b"\xff\xfb\x90\xc4", Container.MP3),
    (TAG, None),
    (b"\xff\xf1\x50\x80", Container.AAC),
    (b"\xff\xff\xff\xff", None),
    (b"\xff\xeb\x90\xc4", None),
    (b"\xff", None),
    (b"OggS\0\2", Container.OGG),
    (b"\x1a\x45\xdf\xa3", Container.WEBM),
    (b"FORM\0\0\0\0AIFF", Container.AIFF),
    (b"caff\0\1", Container.CAF),
    (M4A, Container.MP4),
    (b"#EXTM3U\nhttp://", None),
    (b"", None),
]


@pytest.mark.parametrize(("beginning", "kind"), KINDS)
def test_a_file_is_known_by_its_beginning(
    tmp_path: Path, beginning: bytes, kind: Container | None
) -> None:
    """Magic bytes decide, behind tags too; a playlist is no sound."""
    with write(tmp_path, "x", beginning).open("rb") as file:
        assert container_of(file) is kind
