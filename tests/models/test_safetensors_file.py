"""Safetensors files written here are read by the library, and headers by us."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from vllm_mlx.engine.errors import ModelLoadError
from vllm_mlx.engine.models.safetensors_file import (
    PlannedTensor,
    StoredTensor,
    read_header,
    write_safetensors,
)


def planned(array: np.ndarray[Any, Any]) -> PlannedTensor:
    """Plan to write `array` as it is."""
    return PlannedTensor(str(array.dtype), array.shape, lambda: array)


def test_the_library_reads_what_is_written(tmp_path: Path) -> None:
    """Names, shapes, dtypes and every value survive, and progress ends at 1."""
    arrays = {
        "b": np.arange(6, dtype=np.float32).reshape(2, 3),
        "a": np.array([1, 2, 2**32 - 1], np.uint32),
        "c": np.linspace(-1, 1, 10, dtype=np.float16).reshape(5, 2),
    }
    heard: list[float] = []
    path = tmp_path / "x.safetensors"
    write_safetensors(path, [(n, planned(a)) for n, a in arrays.items()], heard.append)
    loaded = load_file(path)
    assert loaded.keys() == arrays.keys()
    for name, array in arrays.items():
        assert loaded[name].dtype == array.dtype
        np.testing.assert_array_equal(loaded[name], array)
    assert heard == sorted(heard)
    assert heard[-1] == 1.0


def test_a_tensor_of_another_shape_than_planned_is_refused(tmp_path: Path) -> None:
    """A wrong plan is an error and not a file with shifted tensors."""
    wrong = PlannedTensor("float32", (2, 2), lambda: np.zeros((2, 3), np.float32))
    with pytest.raises(ModelLoadError, match=r"shape \(2, 3\), not \(2, 2\)"):
        write_safetensors(tmp_path / "x.safetensors", [("w", wrong)], lambda fraction: None)


def test_header_of_a_library_file(tmp_path: Path) -> None:
    """Dtypes and shapes are read from a file that the library wrote."""
    path = tmp_path / "x.safetensors"
    save_file({"w": np.zeros((4, 8), np.float16)}, path, metadata={"format": "pt"})
    assert read_header(path) == {"w": StoredTensor("F16", (4, 8))}
    assert read_header(path)["w"].num_bytes == 64


@pytest.mark.parametrize("damage", ["cut", "empty", "not json", "huge header"])
def test_a_damaged_file_is_one_clear_error(tmp_path: Path, damage: str) -> None:
    """A file cut off anywhere, or of another format, is named in a ModelLoadError."""
    path = tmp_path / "x.safetensors"
    save_file({"w": np.zeros((4, 8), np.float16)}, path)
    whole = path.read_bytes()
    damaged = {
        "cut": whole[:-1],
        "empty": b"",
        "not json": struct.pack("<Q", 5) + b"hello",
        "huge header": struct.pack("<Q", 1 << 60) + whole[8:],
    }
    path.write_bytes(damaged[damage])
    with pytest.raises(ModelLoadError, match=r"x\.safetensors is not a readable safetensors"):
        read_header(path)
