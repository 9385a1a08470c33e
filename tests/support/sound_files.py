"""Small sound files, made here byte by byte, so that tests need no encoder and no recording."""

from __future__ import annotations

import io
import struct
import wave
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

#: A sine of 440 Hz, 0.5 s at 22,050 Hz and half of full scale: one mono mp3, one stereo flac.
DATA = Path(__file__).parent.parent / "audio" / "data"


def tone(seconds: float, rate: int = 16000, hertz: float = 440.0) -> NDArray[np.float64]:
    """Return a sine at half of full scale."""
    return 0.5 * np.sin(2 * np.pi * hertz * np.arange(int(seconds * rate)) / rate)


def wav_bytes(samples: NDArray[np.float64], rate: int = 16000, *, num_channels: int = 1) -> bytes:
    """Return a 16-bit WAV file with the same samples in each channel."""
    target = io.BytesIO()
    with wave.open(target, "wb") as file:
        file.setnchannels(num_channels)
        file.setsampwidth(2)
        file.setframerate(rate)
        pcm = (np.repeat(samples, num_channels) * 32767).astype("<i2")
        file.writeframes(pcm.tobytes())
    return target.getvalue()


def silent_mp3(seconds: float) -> bytes:
    """Return an MP3 file of frames with nothing in them: 44.1 kHz, mono, 128 kbit/s."""
    frame = bytes([0xFF, 0xFB, 0x90, 0xC4]) + bytes(413)
    return frame * round(seconds * 44100 / 1152)


def flac_bomb(seconds: int, rate: int = 48000) -> bytes:
    """Return a FLAC file of silence that takes 15 bytes a second."""
    marker = b"fLaC"
    info = struct.pack(">HH", rate, rate) + bytes(6)
    # 20 bits of rate, 3 of channels - 1, 5 of bits a sample - 1, 36 of the number of samples.
    info += ((rate << 44) | (15 << 36) | (seconds * rate)).to_bytes(8, "big") + bytes(16)
    header = bytes([0x80]) + len(info).to_bytes(3, "big")
    return marker + header + info + b"".join(_silent_frame(n, rate) for n in range(seconds))


def _silent_frame(number: int, block: int) -> bytes:
    """Return one frame of `block` samples that are all zero."""
    # Sync, fixed block size; 16 bits of block size follow, rate and width as in STREAMINFO.
    head = bytes([0xFF, 0xF8, 0x70, 0x00]) + chr(number).encode() + struct.pack(">H", block - 1)
    head += bytes([_crc(head, 0x07, 8)])
    body = head + bytes([0x00]) + struct.pack(">h", 0)
    return body + struct.pack(">H", _crc(body, 0x8005, 16))


def _crc(data: bytes, polynomial: int, bits: int) -> int:
    value, top, mask = 0, 1 << (bits - 1), (1 << bits) - 1
    for byte in data:
        value ^= byte << (bits - 8)
        for _ in range(8):
            value = ((value << 1) ^ polynomial if value & top else value << 1) & mask
    return value


def write(folder: Path, name: str, data: bytes) -> Path:
    """Write one file and return its path."""
    path = folder / name
    path.write_bytes(data)
    return path


#: Files that hold no sound, by what is wrong with them.
BROKEN: dict[str, Callable[[], bytes]] = {
    "empty": lambda: b"",
    "text": lambda: b"This is not a sound, whatever its name says.\n" * 20,
    "zeros": lambda: bytes(5000),
    "noise": lambda: bytes(np.random.default_rng(1).integers(0, 255, 5000, dtype=np.uint8)),
    "wav without samples": lambda: wav_bytes(np.zeros(0)),
    "cut-off wav header": lambda: wav_bytes(tone(1.0))[:30],
    "wav without a rate": lambda: _patched(wav_bytes(tone(1.0)), 24, bytes(4)),
    "wav without channels": lambda: _patched(wav_bytes(tone(1.0)), 22, bytes(2)),
    "wav that is too fast": lambda: _patched(wav_bytes(tone(1.0)), 24, b"\xff\xff\xff\x7f"),
    "flac header alone": lambda: flac_bomb(1)[:42],
    "one mp3 frame's head": lambda: bytes([0xFF, 0xFB, 0x90, 0xC4]),
}


def _patched(data: bytes, offset: int, piece: bytes) -> bytes:
    return data[:offset] + piece + data[offset + len(piece) :]
