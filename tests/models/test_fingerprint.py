"""Fingerprints of checkpoints: of their content, of all of it, and quick the second time."""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path

import pytest

from vllm_mlx.engine.errors import ModelLoadError
from vllm_mlx.engine.models import fingerprint
from vllm_mlx.engine.models.fingerprint import (
    adapter_fingerprint,
    kv_libraries,
    model_namespace,
    weights_fingerprint,
)

LONG_AGO = time.time() - 3600


@pytest.fixture(autouse=True)
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let files that were written before a call be old enough to be remembered."""
    monkeypatch.setattr(fingerprint, "_SETTLING_S", 0.0)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give an empty cache folder of the user's."""
    monkeypatch.setenv("VLLM_MLX_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Give the list of the files that are hashed."""
    names: list[str] = []
    real = fingerprint.sha256_of

    def noted(path: Path) -> str:
        names.append(path.name)
        return real(path)

    monkeypatch.setattr(fingerprint, "sha256_of", noted)
    return names


def put(path: Path, data: bytes) -> None:
    """Write a file that claims to have been changed long ago, as copied ones do."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    os.utime(path, (LONG_AGO, LONG_AGO))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Give a model folder of two shards."""
    folder = tmp_path / "model"
    put(folder / "model-1-of-2.safetensors", b"first shard " * 100)
    put(folder / "model-2-of-2.safetensors", b"second shard " * 100)
    put(folder / "config.json", b"{}")
    put(folder / "tokenizer.json", b"{}")
    return folder


@pytest.mark.parametrize(
    ("name", "data"),
    [
        # The same size and header: only the last byte of the last shard differs.
        ("model-2-of-2.safetensors", b"second shard " * 99 + b"second shard!"),
        ("config.json", b"[]"),
        ("hf_quant_config.json", b"{}"),
        ("modeling.py", b"pass"),
    ],
)
def test_a_change_of_content_is_another_model(model: Path, name: str, data: bytes) -> None:
    """Weights, configuration and code all count."""
    before = weights_fingerprint(model)
    put(model / name, data)
    assert weights_fingerprint(model) != before


def test_what_does_not_compute_does_not_count(model: Path, tmp_path: Path) -> None:
    """A copy elsewhere, other times and another tokenizer are the same model."""
    before = weights_fingerprint(model)
    put(model / "tokenizer.json", b"[]")
    put(model / "README.md", b"text")
    copy = tmp_path / "copy"
    for file in model.iterdir():
        put(copy / file.name, file.read_bytes())
        os.utime(copy / file.name)
    assert weights_fingerprint(model) == weights_fingerprint(copy) == before


def test_swapped_shards_are_another_model(model: Path) -> None:
    """The same bytes under other names are not the same weights."""
    before = weights_fingerprint(model)
    first, second = model / "model-1-of-2.safetensors", model / "model-2-of-2.safetensors"
    first.rename(model / "aside")
    second.rename(first)
    (model / "aside").rename(second)
    assert weights_fingerprint(model) != before


def test_a_file_is_hashed_once(model: Path, hashed: list[str]) -> None:
    """Content is read again only if size, times or inode of a file have changed."""
    before = weights_fingerprint(model)
    assert sorted(hashed) == sorted(
        ["config.json", "model-1-of-2.safetensors", "model-2-of-2.safetensors"]
    )
    hashed.clear()
    assert weights_fingerprint(model) == before
    assert hashed == []
    os.utime(model / "config.json", (LONG_AGO + 1, LONG_AGO + 1))
    put(model / "new", (model / "model-1-of-2.safetensors").read_bytes())
    (model / "new").replace(model / "model-1-of-2.safetensors")
    assert weights_fingerprint(model) == before
    assert sorted(hashed) == ["config.json", "model-1-of-2.safetensors"]


def test_a_file_that_was_just_written_is_not_trusted(
    model: Path, hashed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A change within the clock's tick after hashing would go unseen, so nothing is remembered."""
    monkeypatch.setattr(fingerprint, "_SETTLING_S", 60.0)
    weights_fingerprint(model)
    weights_fingerprint(model)
    assert len(hashed) == 6


def test_a_damaged_or_missing_cache_costs_only_time(
    model: Path, cache: Path, hashed: list[str]
) -> None:
    """What is remembered is not needed, and a cache folder that cannot be made is no error."""
    before = weights_fingerprint(model)
    for entry in (cache / "fingerprints").iterdir():
        entry.write_bytes(b"garbage")
    assert weights_fingerprint(model) == before
    for entry in (cache / "fingerprints").iterdir():
        entry.unlink()
    (cache / "fingerprints").rmdir()
    (cache / "fingerprints").write_text("in the way")
    assert weights_fingerprint(model) == before
    assert len(hashed) == 9


def test_the_hubs_own_hashes_are_used(tmp_path: Path, hashed: list[str]) -> None:
    """Of a snapshot only what the hub names by another hash is read: here the configuration."""
    repository = tmp_path / "hub" / "models--someone--some-model"
    weights = b"weights"
    sha256 = hashlib.sha256(weights).hexdigest()
    put(repository / "blobs" / sha256, weights)
    put(repository / "blobs" / ("c0ffee" * 7)[:40], b"{}")
    snapshot = repository / "snapshots" / "main"
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").symlink_to(repository / "blobs" / sha256)
    (snapshot / "config.json").symlink_to(repository / "blobs" / ("c0ffee" * 7)[:40])
    found = weights_fingerprint(snapshot)
    assert hashed == [("c0ffee" * 7)[:40]]
    local = tmp_path / "local"
    put(local / "model.safetensors", weights)
    put(local / "config.json", b"{}")
    assert weights_fingerprint(local) == found


def test_a_name_that_only_looks_like_a_hash_is_not_trusted(
    tmp_path: Path, hashed: list[str]
) -> None:
    """A link to a file outside the hub's cache is read, whatever that file is called."""
    put(tmp_path / "blobs" / ("ab" * 32), b"weights")
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").symlink_to(tmp_path / "blobs" / ("ab" * 32))
    weights_fingerprint(folder)
    assert hashed == ["ab" * 32]


def test_a_folder_without_weights_is_an_error(tmp_path: Path) -> None:
    """Two folders without weights are not the same model."""
    put(tmp_path / "config.json", b"{}")
    with pytest.raises(ModelLoadError, match="no weights"):
        weights_fingerprint(tmp_path)
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ModelLoadError, match="cannot be read"):
        weights_fingerprint(tmp_path)


def test_a_namespace_tells_everything_apart(model: Path, tmp_path: Path) -> None:
    """Model, adapter, dtype, block size and libraries each give KV of their own; the name not."""
    adapter = tmp_path / "adapter"
    put(adapter / "adapters.safetensors", b"lora")
    put(adapter / "adapter_config.json", b"{}")
    libraries = kv_libraries()
    plain = model_namespace(model, None, "bfloat16", 64, libraries, label="a")
    others = [
        model_namespace(model, adapter, "bfloat16", 64, libraries),
        model_namespace(model, None, "float32", 64, libraries),
        model_namespace(model, None, "bfloat16", 32, libraries),
        model_namespace(model, None, "bfloat16", 64, ["mlx 9"]),
    ]
    assert len({namespace.digest for namespace in [plain, *others]}) == 5
    renamed = model_namespace(model, None, "bfloat16", 64, libraries, label="b")
    assert renamed.digest == plain.digest
    assert others[0].adapter == adapter_fingerprint(adapter)
    assert [library.split(" ")[0] for library in libraries] == ["mlx", "mlx-lm"]
