"""Random weights by shape: what is planned of them, what is loaded, and what writes with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from transformers import AutoTokenizer

from vllm_mlx.engine.config import EngineConfig, ModelConfig
from vllm_mlx.engine.core.outputs import pack_tokens
from vllm_mlx.engine.core.request import GenerationRequest, SamplingParams
from vllm_mlx.engine.errors import UsageError
from vllm_mlx.engine.models.dummy_shapes import DUMMY_SHAPES, DummyShape
from vllm_mlx.engine.models.dummy_weights import dummy_model
from vllm_mlx.engine.models.fingerprint import weights_fingerprint
from vllm_mlx.engine.models.loader import load_engine, prefix_namespace
from vllm_mlx.engine.models.progress import ignore_progress
from vllm_mlx.engine.models.resolve import resolve_model
from vllm_mlx.engine.models.summary import summarize_checkpoint


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_MLX_CACHE_DIR", str(tmp_path / "cache"))


def config(shape: str, **fields: Any) -> ModelConfig:
    """Return the configuration of random weights."""
    return ModelConfig(model=shape, load_format="dummy", shape=shape, **fields)


def small(shape: DummyShape) -> DummyShape:
    """Return a shape of the same kind and quantisation that is quickly made."""
    sizes = {"num_hidden_layers": 1, "vocab_size": 1024}
    if "num_experts" in shape.config:
        sizes["num_experts"] = 8
    return DummyShape({**shape.config, **sizes}, shape.bits)


@pytest.mark.parametrize("name", DUMMY_SHAPES)
def test_what_is_planned_is_what_the_library_has(name: str) -> None:
    """mlx-lm's model of the shape takes every planned tensor, has no other, and computes."""
    shape = small(DUMMY_SHAPES[name])
    model = dummy_model(shape)
    arrays = dict(tree_flatten(model.parameters()))
    planned = shape.tensors()
    assert {key: array.shape for key, array in arrays.items()} == {
        key: tensor.shape for key, tensor in planned.items()
    }
    assert sum(array.nbytes for array in arrays.values()) == sum(
        tensor.num_bytes for tensor in planned.values()
    )
    model.set_dtype(mx.float32)
    logits = model(mx.array([[5, 6, 7]]))
    assert bool(mx.isfinite(logits).all().item())
    assert float(logits.std().item()) > 0.1


@pytest.mark.parametrize(
    ("name", "billions", "kv_bytes"),
    [
        ("qwen3-0.6b-8bit", 0.6, 28 * 2 * 8 * 128 * 2),
        ("llama-3.2-3b-4bit", 3.2, 28 * 2 * 8 * 128 * 2),
        ("qwen3-30b-a3b-4bit", 30.5, 48 * 2 * 4 * 128 * 2),
    ],
)
def test_shapes_are_as_large_as_their_names(name: str, billions: float, kv_bytes: int) -> None:
    """The weights are as many, and take as many bytes, as the model of that name has."""
    shape = DUMMY_SHAPES[name]
    bits = shape.bits
    assert bits is not None
    folder = resolve_model(config(name), ignore_progress)
    summary = summarize_checkpoint(folder, config(name), backend="metal")
    assert summary.weights_bytes == pytest.approx(billions * 1e9 * (bits + 0.5) / 8, rel=0.03)
    assert summary.kv_bytes_per_token == kv_bytes
    assert summary.quantization == f"{bits}-bit affine, group 64"


def test_every_token_of_the_synthetic_tokenizer_is_text() -> None:
    """What a model of random weights draws decodes to words that encode to the same tokens."""
    folder = resolve_model(config("tiny"), ignore_progress)
    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    assert len(tokenizer) == 1024
    words = [300, 1023, 777, 259]
    text = tokenizer.decode(words)
    assert tokenizer.encode(text) == words
    assert text.split() == sorted(set(text.split()), key=text.split().index)
    assert tokenizer.decode(tokenizer.encode("Grüße, 你好!\n")) == "Grüße, 你好!\n"
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, tokenize=False
    )
    assert chat == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_an_engine_writes_with_random_weights() -> None:
    """A tiny shape is loaded and decoded like any model, twice alike."""
    answers = []
    for _ in range(2):
        engine = load_engine(config("tiny"), EngineConfig(max_num_seqs=2), ignore_progress)
        assert (engine.info.model, engine.info.max_model_len) == ("tiny", 8192)
        sampling = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
        engine.add_request(
            GenerationRequest(
                request_id="one", prompt=pack_tokens(range(300, 340)), sampling=sampling
            )
        )
        text = ""
        while engine.has_work:
            text += "".join(row.text for row in engine.step().rows)
        answers.append(text)
        engine.close()
    assert answers[0] == answers[1]
    assert len(answers[0].split()) >= 4


def test_stored_prefixes_tell_shapes_apart(tmp_path: Path) -> None:
    """Prefixes on SSD are named by the shape, without a file of weights to read."""
    engine = EngineConfig(ssd_cache_dir=str(tmp_path))
    found = {
        name: prefix_namespace(
            resolve_model(config(name), ignore_progress), config(name), engine, kv_dtype="float32"
        ).weights
        for name in ("tiny", "tiny-moe")
    }
    assert found["tiny"] == DUMMY_SHAPES["tiny"].fingerprint
    assert len({*found.values()}) == 2


def test_the_script_writes_the_same_weights(tmp_path: Path) -> None:
    """A folder written for other programs holds the weights that a dummy model has."""
    import runpy

    from click.testing import CliRunner

    script = Path(__file__).parents[2] / "docs" / "benchmarks" / "random_model.py"
    command = runpy.run_path(str(script))["main"]
    result = CliRunner().invoke(command, [str(tmp_path / "m"), "--shape", "tiny"])
    assert result.exit_code == 0, result.output
    stored = mx.load(str(tmp_path / "m" / "model.safetensors"))
    model = dummy_model(DUMMY_SHAPES["tiny"])
    assert isinstance(stored, dict)
    for name, array in tree_flatten(model.parameters()):
        assert mx.array_equal(array, stored[name]), name
    assert resolve_model(ModelConfig(model=str(tmp_path / "m")), ignore_progress)
    assert weights_fingerprint(tmp_path / "m")


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"shape": "tiny"}, "random weights need a shape"),
        ({"load_format": "dummy"}, "random weights need a shape"),
        ({"load_format": "dummy", "shape": "huge"}, "no shape is called 'huge'; there are tiny,"),
    ],
)
def test_a_shape_is_for_random_weights(fields: dict[str, Any], expected: str) -> None:
    """A shape without random weights, random weights without one, and unknown ones are refused."""
    with pytest.raises(UsageError, match=expected):
        ModelConfig(**fields)
