"""Measure embeddings a second on CPU, here and in sentence-transformers, in turns.

    uv run python docs/benchmarks/embeddings.py MODEL_FOLDER PYTHON

MODEL_FOLDER is a folder of sentence-transformers; PYTHON is an interpreter that has that library
and PyTorch, which this project does not. Both load the same weights in float32, use all cores, and
are asked in turns for the same texts: tokenizing, the model, pooling and normalising.
"""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
import time

#: Texts of one call, and how often each side is asked.
ROUNDS = ((1, 15), (16, 5), (256, 2))

#: Words of a text: those of a question, and of a passage.
LENGTHS = {"questions": (6, 16), "passages": (80, 160)}

TEXT = (
    "the a of and in to is was on for with as by at from river seven quick brown market price"
    " water stone north music letter paper window garden history science question answer model"
)

#: What the other interpreter runs: a line of JSON with texts in, the seconds that they took out.
REFERENCE = """
import json, sys, time
from sentence_transformers import SentenceTransformer
model = SentenceTransformer(sys.argv[1], device="cpu")
for line in sys.stdin:
    texts = json.loads(line)
    started = time.perf_counter()
    model.encode(texts, batch_size=32, normalize_embeddings=True, show_progress_bar=False)
    print("seconds", time.perf_counter() - started, flush=True)
"""


def texts_of(kind: str, count: int, seed: int) -> list[str]:
    """Return random texts, the same for both sides."""
    source = random.Random(f"{kind} {count} {seed}")
    return [
        " ".join(source.choices(TEXT.split(), k=source.randint(*LENGTHS[kind])))
        for _ in range(count)
    ]


class Reference:
    """Own the other interpreter."""

    def __init__(self, python: str, folder: str) -> None:
        self._process = subprocess.Popen(
            [python, "-c", REFERENCE, folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def seconds(self, texts: list[str]) -> float:
        """Have texts embedded and return how long that took."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(texts) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("seconds "):
                return float(line.split()[1])
        raise RuntimeError("the other interpreter has ended; does it have sentence-transformers?")

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()


def main() -> None:
    """Print a table of both rates."""
    folder, python = sys.argv[1:]
    from vllm_mlx.engine.platform import require_backend

    require_backend()
    from vllm_mlx.engine.encoders.embedding_service import load_embedding
    from vllm_mlx.engine.encoders.kinds import EmbedRequest, EncoderConfig

    service = load_embedding(EncoderConfig(model=folder, dtype="float32"), lambda *_: None)

    def seconds(texts: list[str]) -> float:
        started = time.perf_counter()
        for _ in service.handle(EmbedRequest(texts=tuple(texts), truncate=True)):
            pass
        return time.perf_counter() - started

    reference = Reference(python, folder)
    print("| texts | a call | here, texts/s | sentence-transformers | ratio of medians |")
    print("|---|---:|---:|---:|---:|")
    for kind in LENGTHS:
        for count, rounds in ROUNDS:
            ours, theirs = [], []
            for number in range(-1, rounds):
                texts = texts_of(kind, count, number)
                both = seconds(texts), reference.seconds(texts)
                # The first round warms both up.
                if number >= 0:
                    ours.append(both[0])
                    theirs.append(both[1])
            here, there = (count / statistics.median(times) for times in (ours, theirs))
            print(
                f"| {kind} | {count} | {here:.1f} | {there:.1f} | {here / there:.2f} |", flush=True
            )
    reference.close()


if __name__ == "__main__":
    main()
