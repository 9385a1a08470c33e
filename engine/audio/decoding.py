"""From a sound file of any kind to the samples that speech models hear: 16 kHz, mono, float32.

Files of unknown origin are decoded here, so it runs in an engine's process or a command's, never
in the server's. Nothing is held but the result: decoding ends as soon as there is too much.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm_mlx.engine.audio.containers import NATIVE, Container, container_of
from vllm_mlx.engine.audio.limits import AudioLimits
from vllm_mlx.engine.errors import InvalidRequestError

if TYPE_CHECKING:
    from numpy.typing import NDArray

SAMPLE_RATE = 16000

#: Shorter than a frame of any speech model.
_MIN_SAMPLES = 400

#: Frames that are decoded at a time.
_CHUNK_FRAMES = 16384
_PIPE_BYTES = 65536

#: What sound cards have ever been; others are faults of a header.
_MIN_RATE, _MAX_RATE = 1000, 768_000

#: ffmpeg's names of the containers. It is told which one to read: left to guess, it also opens
#: playlists, which name other files.
_DEMUXERS = {
    Container.MP4: "mov",
    Container.WEBM: "matroska",
    Container.OGG: "ogg",
    Container.AAC: "aac",
    Container.AIFF: "aiff",
    Container.CAF: "caf",
}


def decode_audio(
    path: Path, limits: AudioLimits, check: Callable[[], None] = lambda: None
) -> NDArray[np.float32]:
    """Decode a file to samples at `SAMPLE_RATE`, shape `[samples]`, full scale 1.

    `check` is called now and then; what it raises ends the decoding. Raises `InvalidRequestError`
    for what is no sound or has none in it, and `FileTooLargeError`.
    """
    if path.stat().st_size > limits.max_bytes:
        raise limits.too_large()
    with path.open("rb") as file:
        container = container_of(file)
    if container is None:
        raise _fault(
            "the file is not recognised as sound; wav, mp3 and flac are read, and mp4, m4a, webm, "
            "ogg, aac, aiff and caf with the help of ffmpeg"
        )
    if container in NATIVE:
        samples = _decode_natively(path, container, limits, check)
    else:
        samples = _decode_by_ffmpeg(path, container, limits, check)
    if len(samples) < _MIN_SAMPLES:
        raise _fault(f"there is no sound in the {container.value} file, or less than 0.03 s")
    return samples


def _fault(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, param="file")


def _decode_natively(
    path: Path, container: Container, limits: AudioLimits, check: Callable[[], None]
) -> NDArray[np.float32]:
    import miniaudio
    from mlx_audio.resample import resample_audio_chunks

    rate, num_channels = _rate_and_channels(path, container)
    # miniaudio mixes more than two by where loudspeakers stand, and so loudly that they clip.
    num_mixed = 1 if num_channels <= 2 else num_channels
    # One over the limit, so that more than the limit is seen.
    max_frames = int(limits.max_seconds * rate) + 1
    try:
        pcm = miniaudio.stream_file(
            str(path),
            output_format=miniaudio.SampleFormat.SIGNED16,
            nchannels=num_mixed,
            sample_rate=rate,
            frames_to_read=_CHUNK_FRAMES,
        )
        with contextlib.closing(pcm):
            chunks = _as_floats(pcm, num_mixed, max_frames, limits, check)
            samples: NDArray[np.float32] = resample_audio_chunks(
                chunks, rate, SAMPLE_RATE, max_frames, chunk_duration_seconds=10.0
            )
    except miniaudio.MiniaudioError as error:
        raise _fault(f"the {container.value} file cannot be decoded: {_reason(error)}") from None
    return samples


def _rate_and_channels(path: Path, container: Container) -> tuple[int, int]:
    """Return the sample rate and the number of channels that the file was made with."""
    import miniaudio

    readers: dict[Container, Callable[[str], Any]] = {
        Container.WAV: miniaudio.wav_get_file_info,
        Container.MP3: miniaudio.mp3_get_file_info,
        Container.FLAC: miniaudio.flac_get_file_info,
    }
    try:
        info = readers[container](str(path))
    except (miniaudio.MiniaudioError, ZeroDivisionError) as error:
        raise _fault(f"the {container.value} file cannot be decoded: {_reason(error)}") from None
    rate, num_channels = int(info.sample_rate), int(info.nchannels)
    if not _MIN_RATE <= rate <= _MAX_RATE:
        raise _fault(f"the {container.value} file says that it has {rate} samples a second")
    return rate, num_channels


def _reason(error: Exception) -> str:
    return str(error.args[0]) if error.args else type(error).__name__


def _as_floats(
    pcm: Iterator[Any],
    num_channels: int,
    max_frames: int,
    limits: AudioLimits,
    check: Callable[[], None],
) -> Iterator[NDArray[np.float32]]:
    """Yield interleaved 16-bit samples as floats of one channel; raise at more than the limit."""
    num_frames = 0
    for raw in pcm:
        check()
        num_frames += len(raw) // num_channels
        if num_frames >= max_frames:
            raise limits.too_long()
        samples = np.asarray(raw, dtype=np.int16).astype(np.float32) / 32768.0
        yield samples.reshape(-1, num_channels).mean(axis=1)


def _decode_by_ffmpeg(
    path: Path, container: Container, limits: AudioLimits, check: Callable[[], None]
) -> NDArray[np.float32]:
    program = shutil.which("ffmpeg")
    if program is None:
        raise _fault(
            f"{container.value} files are read by ffmpeg, which is not installed here; "
            "send wav, mp3 or flac"
        )
    max_bytes = int(limits.max_seconds * SAMPLE_RATE) * 2
    pieces: list[bytes] = []
    num_bytes = 0
    with _ffmpeg(program, path, container) as process:
        assert process.stdout is not None
        while piece := process.stdout.read(_PIPE_BYTES):
            check()
            num_bytes += len(piece)
            if num_bytes > max_bytes:
                raise limits.too_long()
            pieces.append(piece)
        code = process.wait()
    if code != 0 and not pieces:
        raise _fault(f"the {container.value} file cannot be decoded: ffmpeg finds no sound in it")
    whole = b"".join(pieces)
    return np.frombuffer(whole[: len(whole) // 2 * 2], dtype="<i2").astype(np.float32) / 32768.0


@contextlib.contextmanager
def _ffmpeg(program: str, path: Path, container: Container) -> Iterator[subprocess.Popen[bytes]]:
    """Run ffmpeg, which writes raw samples to its stdout; it is gone when the block is left."""
    command = [program, "-nostdin", "-v", "quiet", "-protocol_whitelist", "file,pipe"]
    command += ["-f", _DEMUXERS[container], "-i", f"file:{path}", "-map", "0:a:0", "-vn"]
    command += ["-ac", "1", "-ar", str(SAMPLE_RATE), "-f", "s16le", "-c:a", "pcm_s16le", "pipe:1"]
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
