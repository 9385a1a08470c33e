"""A Whisper of random weights: all parts of a real one, and what it says is nonsense."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers.models.whisper.tokenization_whisper import LANGUAGES

_WIDTH = 32
_MELS = 80
_HEADS = 2
_NUM_TEXT_TOKENS = 50257
#: Tokens that a window can have: its 30 s take as many steps of the decoder.
_TEXT_CONTEXT = 24


def make_whisper(folder: Path, *, is_multilingual: bool = True, has_times: bool = True) -> Path:
    """Write a checkpoint in the layout of transformers, the same at each call."""
    folder.mkdir(parents=True, exist_ok=True)
    num_text = _NUM_TEXT_TOKENS if is_multilingual else _NUM_TEXT_TOKENS - 1
    special = ["<|endoftext|>", "<|startoftranscript|>"]
    special += [f"<|{code}|>" for code in list(LANGUAGES)[:99]]
    special += ["<|translate|>", "<|transcribe|>", "<|startoflm|>", "<|startofprev|>"]
    special += ["<|nospeech|>", "<|notimestamps|>"]
    _write_tokenizer(folder, num_text, special, has_times=has_times)
    vocab_size = num_text + len(special) + 1501
    config = {
        "model_type": "whisper",
        "d_model": _WIDTH,
        "vocab_size": vocab_size,
        "encoder_layers": 1,
        "decoder_layers": 2,
        "encoder_attention_heads": _HEADS,
        "decoder_attention_heads": _HEADS,
        "num_mel_bins": _MELS,
        "max_source_positions": 1500,
        "max_target_positions": _TEXT_CONTEXT,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"alignment_heads": [[1, 0]]}))
    save_file(_weights(vocab_size), folder / "model.safetensors")
    return folder


def _write_tokenizer(folder: Path, num_text: int, special: list[str], *, has_times: bool) -> None:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*letters, *(f"Ġw{index}" for index in range(num_text - len(letters)))]
    vocab = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in special])
    if has_times:
        times = [f"<|{index * 0.02:.2f}|>" for index in range(1501)]
        tokenizer.add_tokens([AddedToken(time, normalized=False) for time in times])
    tokenizer.save(str(folder / "tokenizer.json"))
    end = special[0]
    fields = {"tokenizer_class": "WhisperTokenizer", "bos_token": end, "eos_token": end}
    (folder / "tokenizer_config.json").write_text(json.dumps({**fields, "unk_token": end}))


def _weights(vocab_size: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(7)

    def normal(*shape: int, scale: float = 0.3) -> np.ndarray:
        return (scale * random.standard_normal(shape)).astype(np.float32)

    weights = {
        "model.encoder.conv1.weight": normal(_WIDTH, _MELS, 3),
        "model.encoder.conv2.weight": normal(_WIDTH, _WIDTH, 3),
        # So large that it is sure of what it says: no window is drawn a second time.
        "model.decoder.embed_tokens.weight": normal(vocab_size, _WIDTH, scale=3.0),
        # Outweighs the token before: else each would be said again and again.
        "model.decoder.embed_positions.weight": normal(_TEXT_CONTEXT, _WIDTH, scale=20.0),
    }
    for name in ("model.encoder.conv1", "model.encoder.conv2"):
        weights[f"{name}.bias"] = normal(_WIDTH)
    for side, count in (("encoder", 1), ("decoder", 2)):
        _norm(weights, f"model.{side}.layer_norm")
        for layer in range(count):
            _layer(weights, f"model.{side}.layers.{layer}", normal, has_cross=side == "decoder")
    return weights


def _layer(weights: dict[str, np.ndarray], name: str, normal: object, *, has_cross: bool) -> None:
    assert callable(normal)
    attentions = ["self_attn", "encoder_attn"] if has_cross else ["self_attn"]
    for attention in attentions:
        _norm(weights, f"{name}.{attention}_layer_norm")
        for part in ("q_proj", "k_proj", "v_proj", "out_proj"):
            weights[f"{name}.{attention}.{part}.weight"] = normal(_WIDTH, _WIDTH)
            if part != "k_proj":
                weights[f"{name}.{attention}.{part}.bias"] = normal(_WIDTH)
    _norm(weights, f"{name}.final_layer_norm")
    for part, rows, columns in (("fc1", 4 * _WIDTH, _WIDTH), ("fc2", _WIDTH, 4 * _WIDTH)):
        weights[f"{name}.{part}.weight"] = normal(rows, columns)
        weights[f"{name}.{part}.bias"] = normal(rows)


def _norm(weights: dict[str, np.ndarray], name: str) -> None:
    weights[f"{name}.weight"] = np.ones(_WIDTH, np.float32)
    weights[f"{name}.bias"] = np.zeros(_WIDTH, np.float32)
