"""Fewer experts a token: which models that is for, and that mlx-lm then asks no others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model

from vllm_mlx.engine.config import EngineConfig, ModelConfig
from vllm_mlx.engine.errors import UnsupportedModelError, UsageError
from vllm_mlx.engine.models.dummy_shapes import DUMMY_SHAPES
from vllm_mlx.engine.models.dummy_weights import dummy_model, dummy_weights
from vllm_mlx.engine.models.experts import with_fewer_experts
from vllm_mlx.engine.models.loader import load_model_and_engine, prefix_namespace
from vllm_mlx.engine.models.progress import ignore_progress
from vllm_mlx.engine.models.summary import summarize_checkpoint

MOE = DUMMY_SHAPES["tiny-moe"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return the folder of a stored mixture of 8 experts, of which a token asks 4."""
    (tmp_path / "config.json").write_text(json.dumps(MOE.document()))
    mx.save_safetensors(str(tmp_path / "model.safetensors"), dummy_weights(MOE))
    return tmp_path


@pytest.mark.parametrize(
    ("document", "changed"),
    [
        ({"num_experts": 8, "num_experts_per_tok": 4}, {"num_experts_per_tok": 2}),
        ({"num_local_experts": 8, "num_experts_per_tok": 2}, {"num_experts_per_tok": 2}),
        ({"n_routed_experts": 64, "moe_topk": [1, 6, 8]}, {"moe_topk": [1, 2, 2]}),
        (
            {"text_config": {"num_experts": 8, "num_experts_per_tok": 8, "a": 1}, "b": 2},
            {"text_config": {"num_experts": 8, "num_experts_per_tok": 2, "a": 1}},
        ),
    ],
)
def test_every_spelling_is_changed(document: dict[str, Any], changed: dict[str, Any]) -> None:
    """The number is found by each of its names, by layer and in nested parts; no more changes."""
    assert with_fewer_experts(document, 2) == changed


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ({"model_type": "llama"}, "'llama' is no mixture of experts"),
        ({"num_experts_per_tok": None, "n_routed_experts": None}, "is no mixture of experts"),
        ({"num_experts_per_tok": 2}, "is no mixture of experts"),
        ({"num_experts": 8, "num_experts_per_tok": 2}, "can be 1 to 2, not 3"),
    ],
)
def test_other_models_are_refused(document: dict[str, Any], expected: str) -> None:
    """A model without experts, and more experts than it asks by itself, are refused."""
    with pytest.raises(UnsupportedModelError, match=expected):
        with_fewer_experts(document, 3)


@pytest.mark.parametrize("is_dummy", [False, True])
def test_a_model_asks_as_many_as_it_is_told(folder: Path, is_dummy: bool) -> None:
    """Logits are those of mlx-lm's model whose config.json has the number, and no others."""
    from vllm_mlx.engine.models.text import load_text_model

    expected, _ = load_model(folder, model_config={"num_experts_per_tok": 2})
    loaded: Any = load_text_model(
        folder,
        shape=MOE if is_dummy else None,
        overrides=with_fewer_experts(MOE.document(), 2),
        dtype="float32",
        dequantize=False,
        adapter_path=None,
        trust_remote_code=False,
        on_progress=ignore_progress,
    )
    whole = dummy_model(MOE)
    for model in (expected, whole):
        # CPUs mix experts in float32 only.
        model.set_dtype(mx.float32)
    tokens = mx.array([[5, 6, 7, 8]])
    assert mx.array_equal(loaded(tokens), expected(tokens))
    assert not mx.allclose(loaded(tokens), whole(tokens), atol=1e-3)
    assert len(tree_flatten(loaded.parameters())) == len(tree_flatten(whole.parameters()))


def test_the_engine_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The option reaches the model's blocks, and prefixes are not shared with other numbers."""
    monkeypatch.setenv("VLLM_MLX_CACHE_DIR", str(tmp_path))
    config = ModelConfig(model="m", load_format="dummy", shape="tiny-moe", moe_top_k=1)
    model, engine = load_model_and_engine(config, EngineConfig(), ignore_progress)
    blocks = [module for module in model.modules() if hasattr(module, "switch_mlp")]
    assert [getattr(block, "top_k", None) for block in blocks] == [1, 1]
    path = Path(engine.info.path)
    engine.close()
    stored = EngineConfig(ssd_cache_dir=str(tmp_path / "ssd"))
    others = [ModelConfig(model="m", load_format="dummy", shape="tiny-moe"), config]
    found = {prefix_namespace(path, one, stored, kv_dtype="float32").digest for one in others}
    assert len(found) == 2


def test_it_is_refused_before_anything_is_loaded(demo_model_path: Path) -> None:
    """A dense model's summary already says so, and no experts at all are a usage error."""
    with pytest.raises(UnsupportedModelError, match="'llama' is no mixture of experts"):
        summarize_checkpoint(demo_model_path, ModelConfig(moe_top_k=2))
    with pytest.raises(UsageError, match="at least one expert"):
        ModelConfig(moe_top_k=0)
