"""A real embedding model against transformers' own BertModel, where both are there.

Needs PyTorch in this environment, and `VLLM_MLX_TEST_EMBEDDING_MODEL`: the folder of a
sentence-transformers model that pools by mean.
"""

from __future__ import annotations

import importlib.util
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vllm_mlx.engine.encoders.embedding_service import load_embedding
from vllm_mlx.engine.encoders.kinds import EmbedRequest, EncoderConfig
from vllm_mlx.engine.models.progress import ignore_progress

FOLDER = os.environ.get("VLLM_MLX_TEST_EMBEDDING_MODEL")

TEXT = (
    "the of a model server cache token bread river seven quick brown fox Paris 42 3.14 naïve café "
    "你好 世界 http://x.y (parentheses) it's antidisestablishmentarianism zzzqqq émigré 🙂 end."
)


def texts() -> list[str]:
    """Return 100 texts of one word to more than the model reads."""
    source = random.Random(7)
    lengths = (1, 2, 5, 9, 17, 40, 90, 180)
    return [" ".join(source.choices(TEXT.split(), k=source.choice(lengths))) for _ in range(100)]


def expected_of(folder: str, given: list[str], max_length: int) -> Any:
    """Return the mean vectors of transformers' model, each text alone."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder).eval()
    vectors = []
    with torch.no_grad():
        for text in given:
            tokens = tokenizer(
                text, truncation=True, max_length=max_length, padding=False, return_tensors="pt"
            )
            vectors.append(model(**tokens).last_hidden_state[0].mean(0).numpy())
    rows = np.stack(vectors)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


if FOLDER is not None and importlib.util.find_spec("torch") is not None:

    @pytest.mark.slow
    def test_vectors_are_those_of_transformers_batched_and_alone() -> None:
        """The cosine is at least 0.9999 for each of 100 texts."""
        assert FOLDER is not None
        assert Path(FOLDER).is_dir()
        service = load_embedding(EncoderConfig(model=FOLDER), ignore_progress)
        given = texts()
        expected = expected_of(FOLDER, given, service.info.details["max_model_len"])
        found = np.zeros_like(expected)
        for part in service.handle(EmbedRequest(texts=tuple(given), truncate=True)):
            rows = np.frombuffer(part.vectors, "<f4").reshape(len(part.indices), -1)
            found[list(part.indices)] = rows
        assert (found * expected).sum(axis=1).min() >= 0.9999
        for text, vector in zip(given, expected, strict=True):
            [part] = service.handle(EmbedRequest(texts=(text,), truncate=True))
            assert np.frombuffer(part.vectors, "<f4") @ vector >= 0.9999
