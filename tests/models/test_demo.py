"""The demo model is converted exactly, and answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import regex

from vllm_mlx.engine.models.cached_folder import sha256_of
from vllm_mlx.engine.models.demo import convert_gguf, ensure_demo_model
from vllm_mlx.engine.models.demo_source import installed_gguf
from vllm_mlx.engine.models.gguf import read_gguf
from vllm_mlx.engine.models.progress import ignore_progress
from vllm_mlx.engine.platform import require_backend

require_backend()

import mlx.core as mx  # noqa: E402
import mlx_lm  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402

NUM_HEADS = {"attn_q": 9, "attn_k": 3}
HEAD_DIM = 64
NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
#: Texts that tell pre-tokenizers apart.
TEXTS = [
    "Hello, world!",
    "In 1984, 1,234.5 and 007: 3rd2go",
    "  two  spaces\tand\n\nlines ",
    "na\u00efve caf\u00e9 \u2014 \U0001f600\U0001f1eb\U0001f1f7",
    "\u65e5\u672c\u8a9e \ud55c\uad6d\uc5b4",
    "I'll we've SHE'S don't",
    "def f(x):\n    return x**2 # \u00b2\u0663",
    "<|im_start|>user\nhi<|im_end|>",
]


@pytest.fixture(scope="module")
def gguf_path() -> Path:
    """Return the GGUF file of the installed package."""
    path = installed_gguf()
    assert path is not None, "the demo package is not installed: uv sync"
    return path


@pytest.fixture(scope="module")
def quantized_path(gguf_path: Path) -> Iterator[Path]:
    """Convert the quantised variant with the code as it is now."""
    with TemporaryDirectory() as folder:
        convert_gguf(gguf_path, Path(folder), "4bit", lambda fraction: None)
        yield Path(folder)


@pytest.fixture(scope="module")
def plain_path() -> Path:
    """Return the float32 variant, from the user's cache."""
    return ensure_demo_model("float32", ignore_progress)


def reordered(array: mx.array, name: str) -> mx.array:
    """Put q and k rows in rotate-half order, written independently of the converter."""
    if name not in NUM_HEADS:
        return array
    rows = [
        head * HEAD_DIM + 2 * index + half
        for head in range(NUM_HEADS[name])
        for half in (0, 1)
        for index in range(HEAD_DIM // 2)
    ]
    return array[mx.array(rows)]


def reference_parts(gguf: dict[str, mx.array]) -> Iterator[tuple[str, int, list[mx.array]]]:
    """Yield module name, bits and (codes, scales, biases) of every quantised tensor, by MLX."""
    kinds = ("weight", "scales", "biases")
    for key in gguf:
        parts = key.split(".")
        if key.endswith(".scales"):
            stem = key.removesuffix(".scales")
            arrays = [gguf[f"{stem}.{kind}"] for kind in kinds]
            if parts[0] == "blk":
                arrays = [reordered(array, parts[2]) for array in arrays]
                yield f"model.layers.{parts[1]}.{NAMES[parts[2]]}", 4, arrays
            else:
                assert parts[0] == "token_embd"
                yield "model.embed_tokens", 8, arrays


def test_quantized_variant_equals_mlxs_own_reading_bit_for_bit(
    gguf_path: Path, quantized_path: Path
) -> None:
    """Every code, scale, bias and norm equals what MLX itself reads from the file."""
    gguf = mx.load(str(gguf_path))
    ours = mx.load(str(quantized_path / "model.safetensors"))
    seen = 0
    for name, _, (codes, scales, biases) in reference_parts(gguf):
        assert mx.array_equal(ours[f"{name}.weight"], codes), name
        assert mx.array_equal(ours[f"{name}.scales"], scales), name
        assert mx.array_equal(ours[f"{name}.biases"], biases), name
        seen += 1
    assert seen == 30 * 7 + 1
    assert len(ours) == 3 * seen + 61
    norms = {
        "model.norm.weight": "output_norm.weight",
        "model.layers.3.input_layernorm.weight": "blk.3.attn_norm.weight",
        "model.layers.3.post_attention_layernorm.weight": "blk.3.ffn_norm.weight",
    }
    for name, key in norms.items():
        assert mx.array_equal(ours[name].astype(mx.float32), gguf[key]), name


def test_plain_variant_equals_dequantized_values_bit_for_bit(
    gguf_path: Path, plain_path: Path
) -> None:
    """The float32 folder holds exactly what MLX dequantises; a stale one must be re-versioned."""
    gguf = mx.load(str(gguf_path))
    ours = mx.load(str(plain_path / "model.safetensors"))
    assert len(ours) == 30 * 7 + 1 + 61
    for name, bits, (codes, scales, biases) in reference_parts(gguf):
        if "layers.0." in name or "layers.29." in name or "embed" in name:
            values = mx.dequantize(
                codes,
                scales.astype(mx.float32),
                biases.astype(mx.float32),
                group_size=32,
                bits=bits,
            )
            assert mx.array_equal(ours[f"{name}.weight"], values), name
    norm = "model.layers.3.post_attention_layernorm.weight"
    assert mx.array_equal(ours[norm], gguf["blk.3.ffn_norm.weight"])


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"]
)
def test_cached_folder_is_what_the_code_makes_now(
    plain_path: Path, quantized_path: Path, name: str
) -> None:
    """A change of the conversion must raise its format version, or old folders live on."""
    assert sha256_of(plain_path / name) == sha256_of(quantized_path / name)


def bpe(word: str, ranks: dict[tuple[str, str], int]) -> list[str]:
    """Merge the pairs of one word, lowest rank first."""
    pieces = list(word)
    while len(pieces) > 1:
        pairs = list(pairwise(pieces))
        best = min(pairs, key=lambda pair: ranks.get(pair, 1 << 30))
        if best not in ranks:
            break
        merged = []
        index = 0
        while index < len(pieces):
            step = 2 if tuple(pieces[index : index + 2]) == best else 1
            merged.append("".join(pieces[index : index + step]))
            index += step
        pieces = merged
    return pieces


def byte_letters() -> dict[int, str]:
    """Return the printable letter that stands for each byte in GPT-2's vocabulary."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable}
    return letters | {byte: chr(256 + index) for index, byte in enumerate(others)}


def reference_encode(text: str, metadata: dict[str, Any]) -> list[int]:
    """Encode as llama.cpp's `smollm` pre-tokenizer and plain byte pair merging do."""
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    merges = [merge.split(" ") for merge in metadata["tokenizer.ggml.merges"]]
    ranks = {(first, second): rank for rank, (first, second) in enumerate(merges)}
    special = [
        t for t, k in zip(tokens, metadata["tokenizer.ggml.token_type"], strict=True) if k == 3
    ]
    words = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    letters = byte_letters()
    ids: list[int] = []
    for part in regex.split("(" + "|".join(map(regex.escape, special)) + ")", text):
        if part in special:
            ids.append(vocabulary[part])
            continue
        for piece in regex.split(r"(\p{N})", part):
            for word in regex.findall(words, piece):
                spelled = "".join(letters[byte] for byte in word.encode())
                ids += [vocabulary[token] for token in bpe(spelled, ranks)]
    return ids


def test_tokenizer_equals_the_plain_algorithm(gguf_path: Path, quantized_path: Path) -> None:
    """tokenizer.json, also as transformers loads it, encodes digits, marks and scripts alike."""
    metadata: dict[str, Any] = dict(read_gguf(gguf_path).metadata)
    plain = Tokenizer.from_file(str(quantized_path / "tokenizer.json"))
    loaded = mlx_lm.utils.load_tokenizer(quantized_path)
    for text in TEXTS:
        expected = reference_encode(text, metadata)
        assert plain.encode(text, add_special_tokens=False).ids == expected, text
        assert loaded.encode(text, add_special_tokens=False) == expected, text
        assert loaded.decode(expected) == text
    assert loaded.eos_token_ids == {2}


def test_the_model_answers(demo_model_path: Path) -> None:
    """mlx-lm itself loads the folder, renders its chat template and answers greedily."""
    model, tokenizer = mlx_lm.load(str(demo_model_path))
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True)
    answer = mlx_lm.generate(model, tokenizer, prompt, max_tokens=12)
    assert answer == "The capital of France is Paris."


def test_config_holds_what_the_metadata_says(plain_path: Path, quantized_path: Path) -> None:
    """The architecture is the model's, and only the quantised variant says that it is one."""
    plain = json.loads((plain_path / "config.json").read_text())
    assert (plain["rope_theta"], plain["rms_norm_eps"]) == (100_000.0, 1e-5)
    assert (plain["max_position_embeddings"], plain["vocab_size"]) == (8192, 49_152)
    assert plain["tie_word_embeddings"] is True
    assert "quantization" not in plain
    quantized = json.loads((quantized_path / "config.json").read_text())
    assert quantized["quantization"]["bits"] == 4
    assert quantized["quantization"]["model.embed_tokens"]["bits"] == 8
