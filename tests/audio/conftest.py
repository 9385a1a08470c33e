"""One tiny speech model for all tests of this folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from numpy.typing import NDArray
from support.sound_files import wav_bytes, write

if TYPE_CHECKING:
    from vllm_mlx.engine.audio.transcription import TranscriptionService


@pytest.fixture(scope="session")
def whisper_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint of random weights that knows 99 languages."""
    from support.tiny_whisper import make_whisper

    return make_whisper(tmp_path_factory.mktemp("models") / "tiny-whisper")


@pytest.fixture(scope="session")
def service(whisper_folder: Path) -> TranscriptionService:
    """Return that checkpoint, loaded."""
    pytest.importorskip("mlx_audio", reason="the extra `audio` is not installed")
    from vllm_mlx.engine.audio.kind import TranscriptionConfig
    from vllm_mlx.engine.audio.loading import load_transcription
    from vllm_mlx.engine.platform import require_backend

    require_backend()
    return load_transcription(
        TranscriptionConfig(model=str(whisper_folder)), lambda stage, fraction: None
    )


@pytest.fixture(scope="session")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return 33 s of noise that is louder and softer: two windows of anything but silence."""
    return write(tmp_path_factory.mktemp("sounds"), "noise.wav", wav_bytes(_noise(33)))


@pytest.fixture(scope="session")
def short_sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return 3 s of the same: one window."""
    return write(tmp_path_factory.mktemp("sounds"), "short.wav", wav_bytes(_noise(3)))


def _noise(seconds: int) -> NDArray[np.float64]:
    random = np.random.default_rng(3)
    loudness = np.repeat(random.random(seconds), 16000)
    return np.clip(0.3 * random.standard_normal(len(loudness)) * loudness, -1, 1)
