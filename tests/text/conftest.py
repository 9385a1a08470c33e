"""Small tokenizers of each kind, built here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from vllm_mlx.engine.text.tokenizer import Tokenizer, load_tokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the dog sleeps on.",
    "Numbers: 0 1 2 3 42 1,000. Code: def f(x): return x + 1\n\n\tindented",
    "Grüße aus Köln! Ça va? Добрый день. 数学は楽しい。 한국어 문장입니다.",
    "emoji 🙂 👩‍👩‍👧 🏳️‍🌈 and more text to learn merges from the quick brown fox",
] * 3

CHAT_TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role == 'bad' %}{{ raise_exception('unknown role ' + m.role) }}{% endif %}"
    "<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n"
    "{% endfor %}"
    "{% if tools %}tools:{% for t in tools %}{{ t.function.name }};{% endfor %}{% endif %}"
    "{% if mood %}mood:{{ mood }}{% endif %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def write_folder(folder: Path, backend: Backend, **config: Any) -> Path:
    """Write `backend` as a model folder that transformers loads."""
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def train_byte_level(vocab_size: int = 420) -> Backend:
    """Train a byte-level BPE as GPT-2, Llama 3 and Qwen have it."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|bos|>", "<|end|>", "<|start|>"],
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens([AddedToken("<tool_call>", special=False, normalized=False)])
    # Characters outside the byte alphabet, and one that is inside it but is not its byte.
    backend.add_tokens([AddedToken("工具", special=False), AddedToken("é", special=False)])
    return backend


def train_sentencepiece(decoder: Any, *, vocab_size: int = 260) -> Backend:
    """Train a BPE with byte fallback as Llama 2, Mistral and Gemma have it."""
    learner = Backend(models.BPE(unk_token="<unk>"))
    learner.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, show_progress=False, special_tokens=["<unk>", "<s>", "</s>"]
    )
    learner.train_from_iterator([line for line in CORPUS if line.isascii()], trainer)
    model = json.loads(learner.to_str())["model"]
    vocab = dict(model["vocab"])
    for byte in range(256):
        vocab.setdefault(f"<0x{byte:02X}>", len(vocab))
    merges = [tuple(pair) for pair in model["merges"]]
    backend = Backend(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))
    backend.normalizer = learner.normalizer
    backend.decoder = decoder
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.add_tokens([AddedToken("<tool_call>", special=False, normalized=False)])
    return backend


def _llama_decoder(*, strip: bool) -> Any:
    stages = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence([*stages, decoders.Strip(" ", 1, 0)] if strip else stages)


def _word_piece() -> Backend:
    words = ["[UNK]", "[SEP]", "hello", "##ing", "world", ".", ",", "do", "n't", "##s", "日"]
    vocab = {word: index for index, word in enumerate(words)}
    backend = Backend(models.WordPiece(vocab, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    backend.add_special_tokens(["[UNK]", "[SEP]"])
    return backend


def _build(kind: str) -> Backend:
    if kind == "byte_level":
        return train_byte_level()
    if kind == "llama":
        return train_sentencepiece(_llama_decoder(strip=True))
    if kind == "gemma":
        return train_sentencepiece(_llama_decoder(strip=False))
    if kind == "metaspace":
        return train_sentencepiece(decoders.Metaspace("▁", "always"))
    if kind == "metaspace_never":
        return train_sentencepiece(decoders.Metaspace("▁", "never"))
    return _word_piece()


KINDS = ["byte_level", "llama", "gemma", "metaspace", "metaspace_never", "word_piece"]


@pytest.fixture(scope="session")
def tokenizers_by_kind(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    """Return one loaded tokenizer of each kind."""
    root = tmp_path_factory.mktemp("tokenizers")
    return {kind: load_tokenizer(write_folder(root / kind, _build(kind))) for kind in KINDS}


@pytest.fixture(scope="session")
def chat_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model folder with a byte-level tokenizer that adds BOS, and a chat template."""
    from tokenizers import processors

    backend = train_byte_level()
    bos = backend.token_to_id("<|bos|>")
    backend.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", pair="<|bos|> $A $B", special_tokens=[("<|bos|>", bos)]
    )
    backend.enable_truncation(8)
    folder = write_folder(
        tmp_path_factory.mktemp("chat"),
        backend,
        bos_token="<|bos|>",
        eos_token="<|end|>",
        chat_template="{{ bos_token }}" + CHAT_TEMPLATE,
        clean_up_tokenization_spaces=True,
    )
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8]}))
    (folder / "config.json").write_text(
        json.dumps({"eos_token_id": 9, "text_config": {"eos_token_id": [10]}})
    )
    return folder


@pytest.fixture(scope="session")
def chat_tokenizer(chat_folder: Path) -> Tokenizer:
    """Return the loaded tokenizer of `chat_folder`."""
    return load_tokenizer(chat_folder)


@pytest.fixture(scope="session")
def python_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Return a tokenizer that is written in Python: no Rust backend, one token for each byte."""
    from transformers import ByT5Tokenizer

    folder = tmp_path_factory.mktemp("python")
    ByT5Tokenizer().save_pretrained(folder)
    return load_tokenizer(folder)
