"""From samples to the log-mel spectrum that Whisper hears; MLX's thread only."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
from mlx_audio.stt.models.whisper.audio import HOP_LENGTH, N_FFT, N_SAMPLES, SAMPLE_RATE
from mlx_audio.utils import hanning, mel_filters, stft
from numpy.typing import NDArray

#: Frames computed at a time: all frequencies of an hour at once would take gigabytes.
_PIECE_FRAMES = 6000

#: How far below the loudest moment of the file a value can be, in powers of ten.
_DYNAMIC_RANGE = 8.0
_FLOOR = 1e-10


def log_mel_spectrum(samples: NDArray[np.float32], num_mels: int) -> mx.array:
    """Return the spectrum of a file and of 30 s of silence behind it, shape `[frames, mels]`.

    The same as the library's own of the whole file, computed piece by piece. A frame is 10 ms.
    """
    edge = N_FFT // 2
    padded = np.concatenate([samples, np.zeros(N_SAMPLES, np.float32)])
    padded = np.pad(padded, edge, mode="reflect")
    # The library drops the last frame.
    num_frames = (len(padded) - N_FFT) // HOP_LENGTH
    window = hanning(N_FFT, periodic=True)
    filters = mel_filters(SAMPLE_RATE, N_FFT, num_mels, norm="slaney", mel_scale=None).T
    pieces = [
        _log_mel(padded, start, min(num_frames, start + _PIECE_FRAMES), window, filters)
        for start in range(0, num_frames, _PIECE_FRAMES)
    ]
    spectrum = mx.concatenate(pieces)
    spectrum = (mx.maximum(spectrum, spectrum.max() - _DYNAMIC_RANGE) + 4.0) / 4.0
    mx.eval(spectrum)
    return spectrum


def _log_mel(
    padded: NDArray[np.float32], start: int, end: int, window: Any, filters: mx.array
) -> mx.array:
    samples = mx.array(padded[start * HOP_LENGTH : (end - 1) * HOP_LENGTH + N_FFT])
    frequencies = stft(samples, window=window, n_fft=N_FFT, hop_length=HOP_LENGTH, center=False)
    piece = mx.maximum(frequencies.abs().square() @ filters, _FLOOR).log10()
    mx.eval(piece)
    return piece
