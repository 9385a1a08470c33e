"""The GGUF reader gives what MLX's own reader gives, and refuses damaged files."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from vllm_mlx.engine.errors import ModelLoadError
from vllm_mlx.engine.models.gguf import affine_weight, float_values, read_gguf
from vllm_mlx.engine.platform import require_backend

require_backend()

import mlx.core as mx  # noqa: E402


def string(text: str) -> bytes:
    """Encode a GGUF string."""
    return struct.pack("<Q", len(text.encode())) + text.encode()


def small_gguf(kind: int, data: bytes, columns: int, rows: int) -> bytes:
    """Return a file of one tensor `w.weight` and a few metadata values."""
    head = b"GGUF" + struct.pack("<IQQ", 3, 1, 3)
    head += string("name") + struct.pack("<I", 8) + string("tiny \u00e9")
    head += string("numbers") + struct.pack("<IIQ3i", 9, 5, 3, -1, 2, 3)
    head += string("half") + struct.pack("<If", 6, 0.5)
    head += string("w.weight") + struct.pack("<I2QIQ", 2, columns, rows, kind, 0)
    return head + b"\0" * (-len(head) % 32) + data


def random_blocks(rng: np.random.Generator, count: int, num_scales: int, num_bytes: int) -> bytes:
    """Return blocks with finite random scales and random codes."""
    scales = rng.standard_normal((count, num_scales)).astype("<f2").view(np.uint8)
    codes = rng.integers(0, 256, (count, num_bytes), dtype=np.uint8)
    return np.concatenate([scales, codes], axis=1).tobytes()


@pytest.mark.parametrize(("kind", "scales", "codes", "bits"), [(3, 2, 16, 4), (8, 1, 32, 8)])
def test_blocks_equal_those_of_mlx(
    tmp_path: Path, kind: int, scales: int, codes: int, bits: int
) -> None:
    """Codes, scales, biases and dequantised values equal MLX's bit for bit, for random blocks."""
    blocks = random_blocks(np.random.default_rng(kind), 6 * 3, scales, codes)
    path = tmp_path / "w.gguf"
    path.write_bytes(small_gguf(kind, blocks, columns=96, rows=6))
    ours = affine_weight(read_gguf(path).tensors["w.weight"])
    theirs = mx.load(str(path))
    np.testing.assert_array_equal(ours.codes, np.array(theirs["w.weight"]))
    np.testing.assert_array_equal(ours.scales, np.array(theirs["w.scales"]))
    np.testing.assert_array_equal(ours.biases, np.array(theirs["w.biases"]))
    expected = mx.dequantize(
        mx.array(ours.codes),
        mx.array(ours.scales).astype(mx.float32),
        mx.array(ours.biases).astype(mx.float32),
        group_size=32,
        bits=bits,
    )
    np.testing.assert_array_equal(ours.dequantize(), np.array(expected))


def test_metadata_and_plain_tensors(tmp_path: Path) -> None:
    """Strings, arrays and numbers come out typed, and plain floats as they are."""
    values = np.arange(8, dtype="<f2").reshape(2, 4)
    path = tmp_path / "w.gguf"
    path.write_bytes(small_gguf(1, values.tobytes(), columns=4, rows=2))
    file = read_gguf(path)
    assert file.metadata == {"name": "tiny \u00e9", "numbers": [-1, 2, 3], "half": 0.5}
    np.testing.assert_array_equal(float_values(file.tensors["w.weight"]), values.astype(np.float32))


def test_a_file_cut_off_anywhere_is_refused(tmp_path: Path) -> None:
    """Every proper beginning of a file is an error that names it, never wrong tensors."""
    whole = small_gguf(1, np.zeros(8, "<f2").tobytes(), columns=4, rows=2)
    path = tmp_path / "w.gguf"
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(ModelLoadError, match=r"w\.gguf is not a readable GGUF file"):
            read_gguf(path)


def test_other_kinds_are_refused_by_number(tmp_path: Path) -> None:
    """A tensor kind without an exact counterpart is named."""
    path = tmp_path / "w.gguf"
    path.write_bytes(small_gguf(12, b"\0" * 144, columns=256, rows=1))
    with pytest.raises(ModelLoadError, match="ggml type 12"):
        read_gguf(path)
