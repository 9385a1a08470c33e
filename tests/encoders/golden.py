"""Compute what transformers says of the tiny encoders: `python golden.py --write`.

Needs PyTorch and transformers, which the project itself does not; run it in the folder `tests`.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_suffix(".json")

ACTIVATIONS = ("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "relu", "silu", "swish")

#: Family and activation of each model.
MODELS = [
    *(("bert", activation) for activation in ACTIVATIONS),
    ("xlm-roberta", "gelu"),
]


def computed() -> dict[str, Any]:
    """Return the embeddings and the scores of each model, by its family and activation."""
    with tempfile.TemporaryDirectory() as folder:
        return {
            f"{family}/{activation}": {
                "mean": _embeddings(Path(folder) / "e", family, activation),
                "scores": _scores(Path(folder) / "c", family, activation),
            }
            for family, activation in MODELS
        }


def _embeddings(folder: Path, family: str, activation: str) -> list[list[float]]:
    """Return each text's mean vector, computed alone and scaled to length 1."""
    import torch
    from support.tiny_encoders import TEXTS, write_tiny_encoder
    from transformers import AutoModel

    write_tiny_encoder(folder, family, hidden_act=activation)
    model = AutoModel.from_pretrained(folder, attn_implementation="eager").eval()
    vectors = []
    with torch.no_grad():
        for text in TEXTS:
            ids, _ = _tokens(folder, text)
            hidden = model(input_ids=torch.tensor([ids])).last_hidden_state[0].mean(0)
            vectors.append((hidden / hidden.norm()).tolist())
    return vectors


def _scores(folder: Path, family: str, activation: str) -> list[float]:
    """Return the logit of each text as a document, computed alone."""
    import torch
    from support.tiny_encoders import QUERY, TEXTS, write_tiny_encoder
    from transformers import AutoModelForSequenceClassification

    write_tiny_encoder(folder, family, hidden_act=activation, num_labels=1)
    model = AutoModelForSequenceClassification.from_pretrained(
        folder, attn_implementation="eager"
    ).eval()
    scores = []
    with torch.no_grad():
        for text in TEXTS:
            ids, types = _tokens(folder, QUERY, text)
            output = model(input_ids=torch.tensor([ids]), token_type_ids=torch.tensor([types]))
            scores.append(output.logits.item())
    return scores


def _tokens(folder: Path, *texts: str) -> tuple[list[int], list[int]]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    encoding = tokenizer.encode(*texts)
    return encoding.ids, encoding.type_ids


if __name__ == "__main__" and "--write" in sys.argv:
    sys.path.insert(0, ".")
    FILE.write_text(json.dumps(computed()) + "\n")
