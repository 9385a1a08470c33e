"""Write tiny random BERT and XLM-RoBERTa folders, as transformers and sentence-transformers do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

HIDDEN, LAYERS, HEADS, INNER, POSITIONS = 32, 2, 4, 48, 40

WORDS = tuple(
    "the cat sat on mat a dog ran in park market fell today stock prices rain bread bake how do i "  # noqa: SIM905
    "recipe of for with and is was paris berlin capital france germany ? . ,".split()
)

#: Texts of several lengths, one with words that the vocabulary lacks.
TEXTS = (
    "the cat sat on the mat .",
    "a dog",
    "how do i bake bread ?",
    "stock prices fell today in the market , and the rain fell in the park",
    "paris is the capital of france , berlin is the capital of germany .",
    "quantum",
)

QUERY = "how do i bake bread ?"

_SPECIAL = {
    "bert": ("[PAD]", "[UNK]", "[CLS]", "[SEP]"),
    "xlm-roberta": ("<s>", "<pad>", "</s>", "<unk>"),
}

Arrays = dict[str, npt.NDArray[np.float32]]


def write_tiny_encoder(
    folder: Path,
    model_type: str = "bert",
    *,
    hidden_act: str = "gelu",
    num_labels: int | None = None,
    **config: Any,
) -> Path:
    """Write a random model, the same each time; a sequence classifier if it has `num_labels`."""
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = {word: number for number, word in enumerate((*_SPECIAL[model_type], *WORDS))}
    fields: dict[str, Any] = {
        "model_type": model_type,
        "architectures": [_architecture(model_type, num_labels)],
        "vocab_size": len(vocabulary),
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "intermediate_size": INNER,
        "hidden_act": hidden_act,
        "max_position_embeddings": POSITIONS,
        "type_vocab_size": 2 if model_type == "bert" else 1,
        "layer_norm_eps": 1e-5,
        "pad_token_id": 0 if model_type == "bert" else 1,
    }
    if num_labels is not None:
        fields["id2label"] = {str(label): f"LABEL_{label}" for label in range(num_labels)}
        fields["label2id"] = {f"LABEL_{label}": label for label in range(num_labels)}
    fields |= config
    (folder / "config.json").write_text(json.dumps(fields))
    save_file(_weights(fields, model_type, num_labels), folder / "model.safetensors")
    _tokenizer(model_type, vocabulary).save(str(folder / "tokenizer.json"))
    return folder


def write_modules(folder: Path, pooling: dict[str, Any], **settings: Any) -> None:
    """Add what makes it a folder of sentence-transformers."""
    names = (("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize"))
    modules = [
        {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.{kind}"}
        for number, (kind, path) in enumerate(names)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    (folder / "config_sentence_transformers.json").write_text(json.dumps(settings))


def _architecture(model_type: str, num_labels: int | None) -> str:
    name = "Bert" if model_type == "bert" else "XLMRoberta"
    return f"{name}Model" if num_labels is None else f"{name}ForSequenceClassification"


def _weights(fields: dict[str, Any], model_type: str, num_labels: int | None) -> Arrays:
    random = np.random.default_rng(11)
    arrays: Arrays = {}

    def add(name: str, *shape: int) -> None:
        arrays[name] = (0.4 * random.standard_normal(shape)).astype(np.float32)

    def linear(name: str, out: int, size: int) -> None:
        add(f"{name}.weight", out, size)
        add(f"{name}.bias", out)

    def norm(name: str) -> None:
        add(f"{name}.weight", HIDDEN)
        arrays[f"{name}.weight"] += 1
        add(f"{name}.bias", HIDDEN)

    prefix = "" if num_labels is None else f"{model_type.removeprefix('xlm-')}."
    add(f"{prefix}embeddings.word_embeddings.weight", fields["vocab_size"], HIDDEN)
    add(f"{prefix}embeddings.position_embeddings.weight", POSITIONS, HIDDEN)
    add(f"{prefix}embeddings.token_type_embeddings.weight", fields["type_vocab_size"], HIDDEN)
    norm(f"{prefix}embeddings.LayerNorm")
    for number in range(LAYERS):
        layer = f"{prefix}encoder.layer.{number}"
        for part in ("query", "key", "value"):
            linear(f"{layer}.attention.self.{part}", HIDDEN, HIDDEN)
        linear(f"{layer}.attention.output.dense", HIDDEN, HIDDEN)
        norm(f"{layer}.attention.output.LayerNorm")
        linear(f"{layer}.intermediate.dense", INNER, HIDDEN)
        linear(f"{layer}.output.dense", HIDDEN, INNER)
        norm(f"{layer}.output.LayerNorm")
    if model_type == "bert":
        linear(f"{prefix}pooler.dense", HIDDEN, HIDDEN)
    if num_labels is not None and model_type == "bert":
        linear("classifier", num_labels, HIDDEN)
    elif num_labels is not None:
        linear("classifier.dense", HIDDEN, HIDDEN)
        linear("classifier.out_proj", num_labels, HIDDEN)
    return arrays


def _tokenizer(model_type: str, vocabulary: dict[str, int]) -> Tokenizer:
    is_bert = model_type == "bert"
    first, last = ("[CLS]", "[SEP]") if is_bert else ("<s>", "</s>")
    unknown = "[UNK]" if is_bert else "<unk>"
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=unknown))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    pair = f"{first} $A {last} $B:1 {last}:1" if is_bert else f"{first} $A {last} {last} $B {last}"
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{first} $A {last}",
        pair=pair,
        special_tokens=[(first, vocabulary[first]), (last, vocabulary[last])],
    )
    # As the files of real models: settings of whoever trained them, which must not be followed.
    tokenizer.enable_padding(length=16, pad_id=vocabulary["[PAD]" if is_bert else "<pad>"])
    tokenizer.enable_truncation(8)
    return tokenizer
