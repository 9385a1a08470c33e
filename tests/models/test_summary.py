"""What a checkpoint takes is read from its headers, and what fits follows from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors.numpy import save_file

from vllm_mlx.engine.config import EngineConfig, ModelConfig
from vllm_mlx.engine.errors import InsufficientMemoryError, ModelLoadError
from vllm_mlx.engine.memory import GIB, MIB, AttentionShape, MemoryLimits
from vllm_mlx.engine.models.fit import (
    context_that_fits,
    fit_lines,
    plan_kv_budget,
    row_bytes,
    rows_that_fit,
)
from vllm_mlx.engine.models.summary import CheckpointSummary, summarize_checkpoint

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 2048,
}


def write_model(folder: Path, tensors: dict[str, np.ndarray[Any, Any]], **config: Any) -> Path:
    """Write a model folder with these tensors."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **config}))
    save_file(tensors, folder / "model.safetensors")
    return folder


def plain_tensors() -> dict[str, np.ndarray[Any, Any]]:
    """Return 1,000 float16 weights and 10 float32 ones."""
    return {"a.weight": np.zeros((10, 100), np.float16), "norm.weight": np.zeros(10, np.float32)}


def quantized_model(folder: Path) -> Path:
    """Write a 4-bit matrix of 16 x 128 beside an 8-bit one of 16 x 64, scales in float16."""
    tensors: dict[str, np.ndarray[Any, Any]] = {
        "a.weight": np.zeros((16, 16), np.uint32),
        "a.scales": np.zeros((16, 2), np.float16),
        "a.biases": np.zeros((16, 2), np.float16),
        "e.weight": np.zeros((16, 16), np.uint32),
        "e.scales": np.zeros((16, 2), np.float16),
        "e.biases": np.zeros((16, 2), np.float16),
        "norm.weight": np.zeros(100, np.float16),
    }
    settings = {"group_size": 64, "bits": 4, "e": {"group_size": 32, "bits": 8}}
    return write_model(folder, tensors, quantization=settings)


def test_plain_weights_follow_the_dtype_policy(tmp_path: Path) -> None:
    """As stored on a GPU, in float32 on CPU, and in what was asked for anywhere."""
    folder = write_model(tmp_path / "m", plain_tensors())
    on_gpu = summarize_checkpoint(folder, ModelConfig(), backend="metal")
    assert (on_gpu.weights_bytes, on_gpu.load_bytes, on_gpu.dtype) == (2040, 2040, "float16")
    assert on_gpu.kv_bytes_per_token == 2 * 2 * 2 * 16 * 2
    on_cpu = summarize_checkpoint(folder, ModelConfig(), backend="cpu")
    assert (on_cpu.weights_bytes, on_cpu.load_bytes, on_cpu.dtype) == (2040, 4040, "float32")
    assert on_cpu.kv_bytes_per_token == 2 * 2 * 2 * 16 * 4
    asked = summarize_checkpoint(folder, ModelConfig(dtype="bfloat16"), backend="cpu")
    assert (asked.load_bytes, asked.dtype) == (2020, "bfloat16")


def test_quantized_weights_are_dequantized_on_cpu_where_they_fit(tmp_path: Path) -> None:
    """They stay as they are elsewhere, and on CPU if their float32 values take too much."""
    folder = quantized_model(tmp_path / "m")
    stored = 2 * 1024 + 4 * 64 + 200
    on_gpu = summarize_checkpoint(folder, ModelConfig(), backend="cuda")
    assert (on_gpu.load_bytes, on_gpu.dequantizes, on_gpu.dtype) == (stored, False, "float16")
    assert on_gpu.quantization == "4-bit affine, group 64"
    plain = (16 * 128 + 16 * 64 + 100) * 4
    roomy = summarize_checkpoint(folder, ModelConfig(), backend="cpu", available_bytes=2 * plain)
    assert (roomy.load_bytes, roomy.dequantizes, roomy.dtype) == (plain, True, "float32")
    tight = summarize_checkpoint(
        folder, ModelConfig(), backend="cpu", available_bytes=2 * plain - 2
    )
    kept = 2 * 1024 + 4 * 128 + 400
    assert (tight.load_bytes, tight.dequantizes, tight.dtype) == (kept, False, "float32")


def test_parts_that_a_text_model_leaves_unread_do_not_count_as_loaded(tmp_path: Path) -> None:
    """A vision tower is stored, not loaded."""
    tensors = {**plain_tensors(), "vision_tower.w": np.zeros(500, np.float16)}
    summary = summarize_checkpoint(
        write_model(tmp_path / "m", tensors), ModelConfig(), backend="metal"
    )
    assert (summary.weights_bytes, summary.load_bytes) == (3040, 2040)


@pytest.mark.parametrize(
    ("config", "max_model_len", "expected"),
    [
        ({}, None, 2048),
        ({}, 100, 100),
        ({}, 10_000, 2048),
        ({"text_config": {**CONFIG, "max_position_embeddings": 4096}}, None, 4096),
        ({"max_position_embeddings": None, "n_positions": 1024}, None, 1024),
        ({"max_position_embeddings": None}, None, 32_768),
    ],
)
def test_context_length(
    tmp_path: Path, config: dict[str, Any], max_model_len: int | None, expected: int
) -> None:
    """The model's own word by any of its names, nested too, and only ever shortened."""
    folder = write_model(tmp_path / "m", plain_tensors(), **config)
    model = ModelConfig(max_model_len=max_model_len)
    assert summarize_checkpoint(folder, model, backend="metal").context_length == expected


def test_an_unreadable_config_is_named(tmp_path: Path) -> None:
    """A config.json that is not JSON, or not an object, is one clear error."""
    folder = write_model(tmp_path / "m", plain_tensors())
    for text in ("{", "[]"):
        (folder / "config.json").write_text(text)
        with pytest.raises(ModelLoadError, match=r"config\.json"):
            summarize_checkpoint(folder, ModelConfig())


def test_the_demo_takes_what_it_takes(demo_model_path: Path) -> None:
    """The real demo's figures: weights, 30 layers of 3 heads of 64, 8,192 tokens."""
    summary = summarize_checkpoint(demo_model_path, ModelConfig(), backend="cpu")
    assert summary.kv_bytes_per_token == 30 * 2 * 3 * 64 * 4
    assert summary.context_length == 8192
    assert summary.load_bytes == 134_515_008 * 4


SMALL = CheckpointSummary(
    model_type="llama",
    weights_bytes=1 * GIB,
    load_bytes=2 * GIB,
    kv_bytes_per_token=1 * MIB,
    state_bytes_per_row=10 * MIB,
    context_length=1000,
    dtype="float32",
    quantization="4-bit affine, group 64",
    dequantizes=True,
    attention=AttentionShape(
        num_heads=4,
        hidden_size=64,
        intermediate_size=128,
        vocab_size=100,
        itemsize=4,
        is_fused=True,
    ),
)


def machine(total_gib: float) -> MemoryLimits:
    """Return an idle machine of this size."""
    return MemoryLimits(total_bytes=int(total_gib * GIB), available_bytes=int(total_gib * GIB))


def test_rows_and_context_that_fit() -> None:
    """A row takes its state and its tokens; what fits is what divides the budget."""
    assert row_bytes(SMALL, 90) == 100 * MIB
    assert rows_that_fit(SMALL, 350 * MIB, 90) == 3
    assert context_that_fits(SMALL, 300 * MIB, 3) == 90
    assert context_that_fits(SMALL, 300 * GIB, 3) == 1000
    assert context_that_fits(SMALL, 9 * MIB, 3) == 0
    recurrent = msgspec.structs.replace(SMALL, kv_bytes_per_token=0)
    assert context_that_fits(recurrent, 30 * MIB, 3) == 1000
    assert context_that_fits(recurrent, 29 * MIB, 3) == 0


def test_budget_before_and_after_loading() -> None:
    """The weights are taken off while they are still to come, and not again afterwards."""
    before = plan_kv_budget(SMALL, EngineConfig(max_num_seqs=64), machine(20))
    after = plan_kv_budget(SMALL, EngineConfig(max_num_seqs=64), machine(20), is_loaded=True)
    assert after - before == 2 * GIB
    assert 15 * GIB < before < 16 * GIB


def test_a_budget_is_no_larger_than_what_rows_and_prefixes_can_use() -> None:
    """Few rows still have prefixes beside them: one row alone would push its own prefix out."""
    rows = 2 * row_bytes(SMALL, 1000)
    few = EngineConfig(max_num_seqs=2)
    assert plan_kv_budget(SMALL, few, machine(20)) == rows + int(machine(20).total_bytes * 0.2)
    without = msgspec.structs.replace(few, prefix_cache=False)
    assert plan_kv_budget(SMALL, without, machine(20)) == rows
    little = msgspec.structs.replace(few, cache_memory_bytes=100)
    assert plan_kv_budget(SMALL, little, machine(20)) == rows + 100


def test_a_budget_of_the_users_own_is_kept_or_refused() -> None:
    """It is taken as it is if it fits beside the weights."""
    asked = EngineConfig(kv_memory_bytes=3 * GIB)
    assert plan_kv_budget(SMALL, asked, machine(20)) == 3 * GIB
    with pytest.raises(InsufficientMemoryError, match=r"KV budget of 3 GiB does not fit: 2 GiB"):
        plan_kv_budget(SMALL, asked, machine(4))


def test_a_machine_without_room_for_one_row_is_refused() -> None:
    """Weights that fit with nothing beside them are as useless as those that do not."""
    with pytest.raises(InsufficientMemoryError):
        plan_kv_budget(SMALL, EngineConfig(), machine(2))
    wide = msgspec.structs.replace(
        SMALL, attention=msgspec.structs.replace(SMALL.attention, is_fused=False, num_heads=600)
    )
    plan_kv_budget(SMALL, EngineConfig(), machine(3.5))
    with pytest.raises(InsufficientMemoryError, match="left for KV beside the weights"):
        plan_kv_budget(wide, EngineConfig(), machine(3.5))


def test_lines_for_people() -> None:
    """Weights and how they are stored, KV a token and a row, and what fits, in three lines."""
    assert fit_lines(SMALL, 4 * GIB, 8) == [
        "weights  2 GiB in memory as float32 (stored: 1 GiB, 4-bit affine, group 64)",
        "KV       1 MiB a token and 10 MiB a row, budget 4 GiB",
        "fits     4 rows at the full context of 1,000 tokens, or 8 rows of 502 each",
    ]
    plain = msgspec.structs.replace(
        SMALL, weights_bytes=2 * GIB, state_bytes_per_row=0, quantization=None, dequantizes=False
    )
    assert fit_lines(plain, 40 * GIB, 8) == [
        "weights  2 GiB in memory as float32",
        "KV       1 MiB a token, budget 40 GiB",
        "fits     8 rows at the full context of 1,000 tokens",
    ]
