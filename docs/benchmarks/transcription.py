"""Time whisper in this project beside the plain library, in turn, on the same model and file."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from vllm_mlx.engine.audio.kind import TranscriptionConfig, TranscriptionRequest, transcript_of
from vllm_mlx.engine.audio.loading import load_transcription
from vllm_mlx.engine.platform import require_backend


def main() -> None:
    """Print both real-time factors, and whether the texts are the same."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="folder or repository of a whisper model")
    parser.add_argument("file", type=Path, help="a sound file")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    require_backend()
    from mlx_audio.stt.models.whisper.whisper import Model

    config = TranscriptionConfig(model=arguments.model)
    service = load_transcription(config, lambda *told: print(*told))
    loaded = service._whisper.model
    # The same arrays in the library's own class, which looks up its tokens as it does.
    plain = Model(loaded.dims, loaded.dtype)
    plain.update(loaded.parameters())
    plain._processor = loaded._processor

    def ours() -> str:
        request = TranscriptionRequest(path=str(arguments.file))
        parts = list(service.handle(request))
        nonlocal duration_s
        duration_s = parts[-1].duration_s
        return transcript_of(parts, "transcribe").text

    def theirs() -> str:
        is_half = service.info.dtype == "float16"
        return str(plain.generate(str(arguments.file), fp16=is_half).text.strip())

    duration_s = 0.0
    texts = (ours(), theirs())
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(arguments.rounds):
        for run, each in zip((ours, theirs), times, strict=True):
            each.append(timed(run))
    for name, each in zip(("vllm-mlx", "mlx-audio"), times, strict=True):
        median = statistics.median(each)
        print(f"{name:10} {median:6.2f} s, {duration_s / median:5.1f}x real time ({min(each):.2f})")
    ratio = statistics.median(b / a for a, b in zip(*times, strict=True))
    print(f"{ratio:.2f} times the library's speed; the same text: {texts[0] == texts[1]}")


def timed(run: Callable[[], str]) -> float:
    """Return how long that takes, in seconds."""
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
