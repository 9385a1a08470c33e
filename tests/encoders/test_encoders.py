"""Our encoders against transformers' own figures: tiny random models of each family."""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest
from support.tiny_encoders import HIDDEN, QUERY, TEXTS, write_modules, write_tiny_encoder

from tests.encoders import golden
from vllm_mlx.engine.core.outputs import pack_tokens
from vllm_mlx.engine.encoders import library_encoder
from vllm_mlx.engine.encoders.batches import batches
from vllm_mlx.engine.encoders.embedding_service import EmbeddingService, load_embedding
from vllm_mlx.engine.encoders.kinds import EmbedRequest, EncoderConfig, RerankPart, RerankRequest
from vllm_mlx.engine.encoders.pooling import POOLS
from vllm_mlx.engine.encoders.rerank_service import RerankService, load_rerank
from vllm_mlx.engine.errors import (
    ContextLengthExceededError,
    InvalidRequestError,
    ModelLoadError,
    UnsupportedModelError,
    UsageError,
)
from vllm_mlx.engine.models.progress import ignore_progress

Vectors = npt.NDArray[np.float32]

EXPECTED: dict[str, Any] = json.loads(golden.FILE.read_text())


def embedding(folder: Path, **config: Any) -> EmbeddingService:
    """Load a folder."""
    return load_embedding(EncoderConfig(model=str(folder), **config), ignore_progress)


def rerank(folder: Path, **config: Any) -> RerankService:
    """Load a folder."""
    return load_rerank(EncoderConfig(model=str(folder), **config), ignore_progress)


def vectors_of(service: EmbeddingService, **request: Any) -> Vectors:
    """Return the vectors in the order of the texts."""
    parts = list(service.handle(EmbedRequest(**request)))
    order = [index for part in parts for index in part.indices]
    assert sorted(order) == list(range(len(order)))
    rows = np.frombuffer(b"".join(part.vectors for part in parts), "<f4").reshape(len(order), -1)
    return rows[np.argsort(order)]


def scores_of(service: RerankService, **request: Any) -> list[float]:
    """Return the logits in the order of the documents."""
    parts: list[RerankPart] = list(service.handle(RerankRequest(**request)))
    found = {i: s for part in parts for i, s in zip(part.indices, part.logits, strict=True)}
    return [found[index] for index in range(len(found))]


@pytest.mark.parametrize("name", EXPECTED)
def test_a_model_computes_what_transformers_does(tmp_path: Path, name: str) -> None:
    """Vectors and scores of every activation, batched with padding and alone, are the library's."""
    family, _, activation = name.partition("/")
    encoder = embedding(write_tiny_encoder(tmp_path / "e", family, hidden_act=activation))
    expected = np.array(EXPECTED[name]["mean"])
    batched = vectors_of(encoder, texts=TEXTS)
    alone = np.concatenate([vectors_of(encoder, texts=(text,)) for text in TEXTS])
    assert np.abs(batched - expected).max() < 2e-5
    assert np.abs(alone - expected).max() < 2e-5
    folder = write_tiny_encoder(tmp_path / "c", family, hidden_act=activation, num_labels=1)
    scores = scores_of(rerank(folder), query=QUERY, documents=TEXTS)
    assert np.abs(np.array(scores) - EXPECTED[name]["scores"]).max() < 1e-4


if importlib.util.find_spec("torch") is not None:

    @pytest.mark.slow
    def test_the_figures_are_what_transformers_says_today() -> None:
        """The committed figures are recomputed where PyTorch is there."""
        for name, found in golden.computed().items():
            for part, values in found.items():
                assert np.abs(np.array(values) - EXPECTED[name][part]).max() < 1e-5


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"hidden_act": "quick_gelu"}, "hidden_act 'quick_gelu'.*adapter"),
        ({"position_embedding_type": "relative_key"}, "relative_key"),
        ({"is_decoder": True}, "is_decoder"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused(
    tmp_path: Path, config: dict[str, Any], said: str
) -> None:
    """An unknown activation, position or family is named at load."""
    folder = write_tiny_encoder(tmp_path / "model")
    fields = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(fields))
    with pytest.raises(UnsupportedModelError, match=said):
        embedding(folder)
    with pytest.raises(UnsupportedModelError, match=said):
        rerank(folder)


def test_a_reranker_of_another_family_is_refused(tmp_path: Path) -> None:
    """Only our own encoder scores pairs."""
    folder = write_tiny_encoder(tmp_path / "model", num_labels=1)
    fields = json.loads((folder / "config.json").read_text()) | {"model_type": "modernbert"}
    (folder / "config.json").write_text(json.dumps(fields))
    with pytest.raises(UnsupportedModelError, match="modernbert"):
        rerank(folder)


def test_a_classifier_of_several_labels_is_no_reranker(tmp_path: Path) -> None:
    """A reranker has one label."""
    with pytest.raises(UnsupportedModelError, match="3 labels"):
        rerank(write_tiny_encoder(tmp_path / "model", num_labels=3))


def test_missing_and_misshapen_weights_are_named(tmp_path: Path) -> None:
    """A plain encoder lacks a reranker's head; a wrong config names the weight at fault."""
    folder = write_tiny_encoder(tmp_path / "model", id2label={"0": "x"})
    with pytest.raises(ModelLoadError, match=r"classifier\.weight"):
        rerank(folder)
    with pytest.raises(ModelLoadError, match="intermediate"):
        embedding(write_tiny_encoder(tmp_path / "other", intermediate_size=64))


def test_pooling_follows_the_folder(tmp_path: Path) -> None:
    """Each way of pooling gives what it says of the token vectors; two ways are joined."""
    folder = write_tiny_encoder(tmp_path / "model")
    text = TEXTS[3]
    found = {}
    for mode in ("cls", "mean", "max", "lasttoken", "mean_sqrt_len_tokens", "weightedmean"):
        write_modules(folder, {"pooling_mode": mode})
        # Beside a longer text, so that there is padding.
        found[mode] = vectors_of(embedding(folder), texts=(text, TEXTS[4]))[0]
        alone = vectors_of(embedding(folder), texts=(text,))[0]
        assert np.abs(found[mode] - alone).max() < 1e-5
    assert np.abs(found["mean"] - found["mean_sqrt_len_tokens"]).max() < 1e-5
    distinct = [found[mode] for mode in ("cls", "mean", "max", "lasttoken", "weightedmean")]
    for number, one in enumerate(distinct):
        assert all(np.abs(one - other).max() > 1e-3 for other in distinct[:number])
    write_modules(folder, {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True})
    joined = vectors_of(embedding(folder), texts=(text,))[0]
    assert joined.shape == (2 * HIDDEN,)
    parts = joined.reshape(2, HIDDEN) / np.linalg.norm(joined.reshape(2, -1), axis=1)[:, None]
    assert np.abs(parts - [found["cls"], found["mean"]]).max() < 1e-5


def test_prompts_are_put_before_texts(tmp_path: Path) -> None:
    """A named prompt, or the default one, is the same as writing it; an unknown one is named."""
    folder = write_tiny_encoder(tmp_path / "model")
    write_modules(
        folder,
        {"pooling_mode": "mean"},
        prompts={"query": "how do i ", "document": ""},
        default_prompt_name="query",
    )
    service = embedding(folder)
    by_default = vectors_of(service, texts=("bake bread",))
    written = vectors_of(service, texts=("how do i bake bread",), prompt_name="document")
    assert np.array_equal(by_default, written)
    with pytest.raises(InvalidRequestError, match="'query', 'document'"):
        vectors_of(service, texts=("x",), prompt_name="passage")
    write_modules(
        folder,
        {"pooling_mode": "mean", "include_prompt": False},
        prompts={"query": "how do i "},
        default_prompt_name="query",
    )
    assert np.abs(vectors_of(embedding(folder), texts=("bake bread",)) - written).max() > 1e-3


def test_dimensions_are_cut_and_scaled_again(tmp_path: Path) -> None:
    """Fewer dimensions are the first ones, of length 1; more than there are is an error."""
    service = embedding(write_tiny_encoder(tmp_path / "model"))
    whole = vectors_of(service, texts=TEXTS)
    cut = vectors_of(service, texts=TEXTS, dimensions=5)
    expected = whole[:, :5] / np.linalg.norm(whole[:, :5], axis=1, keepdims=True)
    assert np.abs(cut - expected).max() < 1e-6
    with pytest.raises(InvalidRequestError, match="have 32") as refused:
        vectors_of(service, texts=TEXTS, dimensions=33)
    assert refused.value.param == "dimensions"


def test_long_texts_are_refused_or_cut(tmp_path: Path) -> None:
    """Over the limit is an error that names the text; cut, it is the beginning's vector."""
    service = embedding(write_tiny_encoder(tmp_path / "model"), max_length=8)
    long = "the cat sat on the mat with a dog"
    with pytest.raises(ContextLengthExceededError, match=r"11 tokens.*at most 8") as refused:
        vectors_of(service, texts=("a dog", long))
    assert refused.value.param == "input[1]"
    cut = vectors_of(service, texts=(long,), truncate=True)
    assert np.array_equal(cut, vectors_of(service, texts=("the cat sat on the mat",)))
    part = next(service.handle(EmbedRequest(texts=(long, "a dog"), truncate=True)))
    assert (part.num_tokens, part.num_truncated) == (8 + 4, 1)
    asked = vectors_of(service, texts=(long,), max_tokens=4)
    assert np.array_equal(asked, vectors_of(service, texts=("the cat",)))
    with pytest.raises(UsageError, match="6 to 40"):
        embedding(tmp_path / "model", max_length=41)


def test_token_lists_are_taken_as_they_are(tmp_path: Path) -> None:
    """Ids with their special tokens give the text's own vector; an unknown id is an error."""
    service = embedding(write_tiny_encoder(tmp_path / "model"))
    expected = vectors_of(service, texts=("a dog",))
    words = json.loads((tmp_path / "model" / "tokenizer.json").read_text())["model"]["vocab"]
    ids = [words[word] for word in ("[CLS]", "a", "dog", "[SEP]")]
    assert np.array_equal(vectors_of(service, tokens=(pack_tokens(ids),)), expected)
    with pytest.raises(InvalidRequestError, match="the vocabulary ends at"):
        vectors_of(service, tokens=(pack_tokens([10_000]),))


def test_documents_are_cut_as_transformers_does(tmp_path: Path) -> None:
    """A pair over the limit loses the end of its longer text, and is counted."""
    service = rerank(write_tiny_encoder(tmp_path / "model", num_labels=1), max_length=16)
    long = " ".join(["the cat sat on the mat"] * 5)
    parts = list(service.handle(RerankRequest(query="a dog", documents=(long, "a cat"))))
    assert sum(part.num_truncated for part in parts) == 1
    kept = " ".join(long.split()[: 16 - 3 - 2])
    scores = scores_of(service, query="a dog", documents=(long, kept))
    assert math.isclose(*scores, abs_tol=1e-5)
    short = scores_of(
        service, query="a dog", documents=(long, "the cat sat"), max_tokens_per_document=3
    )
    assert math.isclose(*short, abs_tol=1e-5)


@pytest.mark.parametrize("lengths", [[], [1], [5, 5, 5], [9, 1, 1, 7, 3, 3, 3], [50, 1]])
def test_batches_hold_each_text_once_and_no_more_than_the_cap(lengths: Sequence[int]) -> None:
    """The longest times the number stays within the cap, but for a single text."""
    found = list(batches(lengths, max_padded_tokens=10))
    assert sorted(index for batch in found for index in batch) == list(range(len(lengths)))
    for batch in found:
        longest = max(lengths[index] for index in batch)
        assert len(batch) == 1 or longest * len(batch) <= 10


@pytest.mark.parametrize("mode", POOLS)
def test_each_way_of_pooling_is_its_formula(mode: str) -> None:
    """Over the tokens of a row that is padded, against the same in NumPy."""
    random = np.random.default_rng(5)
    hidden = random.standard_normal((2, 5, 3)).astype(np.float32)
    mask = np.arange(5)[None, :] < np.array([5, 3])[:, None]
    found = np.asarray(POOLS[mode](mx.array(hidden), mx.array(mask[:, :, None] * 1.0)))
    for row, length in enumerate((5, 3)):
        tokens = hidden[row, :length]
        positions = np.arange(1, length + 1)[:, None]
        expected = {
            "cls": tokens[0],
            "max": tokens.max(0),
            "mean": tokens.mean(0),
            "mean_sqrt_len_tokens": tokens.sum(0) / math.sqrt(length),
            "weightedmean": (tokens * positions).sum(0) / positions.sum(),
            "lasttoken": tokens[-1],
        }[mode]
        assert np.abs(found[row] - expected).max() < 1e-5


def test_quantised_weights_are_expanded(tmp_path: Path) -> None:
    """A folder with MLX's own quantisation gives nearly the vectors of the plain one."""
    folder = write_tiny_encoder(tmp_path / "model")
    plain = vectors_of(embedding(folder), texts=TEXTS)
    file = folder / "model.safetensors"
    stored = cast("dict[str, mx.array]", mx.load(str(file)))
    for name in [name for name in stored if name.endswith("dense.weight")]:
        if stored[name].shape[1] % 32:
            continue
        weight, scales, biases = mx.quantize(stored[name], group_size=32, bits=8)
        path = name.removesuffix(".weight")
        stored |= {name: weight, f"{path}.scales": scales, f"{path}.biases": biases}
    # Under the names of a model within a model, as some converters write them.
    mx.save_safetensors(str(file), {f"model.{name}": array for name, array in stored.items()})
    fields = json.loads((folder / "config.json").read_text())
    fields["quantization"] = {"group_size": 32, "bits": 8}
    (folder / "config.json").write_text(json.dumps(fields))
    expanded = vectors_of(embedding(folder), texts=TEXTS)
    assert 1e-7 < np.abs(expanded - plain).max() < 0.02


def test_a_dense_layer_follows_the_pooling(tmp_path: Path) -> None:
    """The layer's product and its activation make the vector."""
    folder = write_tiny_encoder(tmp_path / "model")
    plain = vectors_of(embedding(folder), texts=TEXTS)
    pooled = EXPECTED["bert/gelu"]["mean"]
    assert np.abs(plain - pooled).max() < 2e-5
    write_modules(folder, {"pooling_mode": "mean"})
    modules = json.loads((folder / "modules.json").read_text())
    modules[2] = {"type": "sentence_transformers.models.Dense", "path": "2_Dense"}
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "2_Dense").mkdir()
    config = {"activation_function": "torch.nn.modules.linear.Identity"}
    (folder / "2_Dense" / "config.json").write_text(json.dumps(config))
    weight = np.random.default_rng(3).standard_normal((8, HIDDEN)).astype(np.float32)
    mx.save_safetensors(
        str(folder / "2_Dense" / "model.safetensors"), {"linear.weight": mx.array(weight)}
    )
    found = vectors_of(embedding(folder), texts=TEXTS)
    expected = np.array(pooled) @ weight.T
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    # The pooled vectors were scaled to length 1, which a product without a bias does not see.
    assert np.abs(found - expected).max() < 1e-4
    modules[2]["type"] = "sentence_transformers.models.LSTM"
    (folder / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(UnsupportedModelError, match="LSTM"):
        embedding(folder)


def test_another_family_needs_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without mlx-embeddings such a model says what to install, and under which licence."""
    folder = write_tiny_encoder(tmp_path / "model")
    fields = json.loads((folder / "config.json").read_text()) | {"model_type": "qwen3"}
    (folder / "config.json").write_text(json.dumps(fields))
    monkeypatch.setattr(library_encoder, "_LIBRARY", "no_such_library")
    with pytest.raises(UnsupportedModelError, match=r"'qwen3'.*GPL-3\.0.*vllm-mlx\[embeddings\]"):
        embedding(folder)
