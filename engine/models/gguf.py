"""Read GGUF files with numpy alone: metadata, and the tensor kinds that map exactly onto MLX.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little-endian).
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from vllm_mlx.engine.errors import ModelLoadError

GgufValue = str | bool | int | float | list["GgufValue"]
TensorKind = Literal["F32", "F16", "Q4_1", "Q8_0"]

#: Weights in one block of Q4_1 and Q8_0, and so the group size on the MLX side.
BLOCK_SIZE = 32

_MAGIC = b"GGUF"
_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_U32, _U64 = _SCALARS[4], _SCALARS[10]
#: By ggml's type number: name, weights a block, bytes a block.
_KINDS: dict[int, tuple[TensorKind, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    3: ("Q4_1", BLOCK_SIZE, 2 + 2 + BLOCK_SIZE // 2),
    8: ("Q8_0", BLOCK_SIZE, 2 + BLOCK_SIZE),
}


@dataclass(frozen=True)
class GgufTensor:
    """Hold one tensor's raw blocks; `shape` is row-major (rows first), unlike in the file."""

    name: str
    shape: tuple[int, ...]
    kind: TensorKind
    #: A view of the mapped file, read-only uint8.
    raw: npt.NDArray[np.uint8]


@dataclass(frozen=True)
class GgufFile:
    """Hold a parsed file; tensors are views of the mapping and cost no memory until read."""

    metadata: dict[str, GgufValue]
    tensors: dict[str, GgufTensor]


@dataclass(frozen=True)
class AffineWeight:
    """Hold a matrix in MLX's affine quantisation, group 32: value = scale * code + bias.

    `codes` is uint32 [rows, columns * bits / 32], the first code in the lowest bits; `scales` and
    `biases` are float16 [rows, columns / 32], bit for bit what the file holds (Q8_0's bias is
    -128 times its scale, which float16 holds exactly).
    """

    codes: npt.NDArray[np.uint32]
    scales: npt.NDArray[np.float16]
    biases: npt.NDArray[np.float16]
    bits: int

    def dequantize(self) -> npt.NDArray[np.float32]:
        """Return the float32 values; both products and sums are rounded as MLX rounds them."""
        codes = self.codes.view(np.uint8)
        if self.bits == 4:
            codes = np.stack([codes & 0xF, codes >> 4], axis=-1)
        rows, groups = self.scales.shape
        values = codes.reshape(rows, groups, BLOCK_SIZE).astype(np.float32)
        values *= self.scales.astype(np.float32)[..., None]
        values += self.biases.astype(np.float32)[..., None]
        return values.reshape(rows, groups * BLOCK_SIZE)


def read_gguf(path: Path) -> GgufFile:
    """Parse the header of `path` and map its tensors.

    Raises ModelLoadError for a file that is cut off, not GGUF, or holds other tensor kinds.
    """
    try:
        with path.open("rb") as file:
            buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return _Reader(buffer).read_file()
    except (OSError, ValueError, struct.error, UnicodeDecodeError) as error:
        raise ModelLoadError(f"{path} is not a readable GGUF file: {error}") from error


def affine_weight(tensor: GgufTensor) -> AffineWeight:
    """Re-pack a Q4_1 or Q8_0 matrix for MLX, exactly."""
    rows, columns = tensor.shape
    blocks = tensor.raw.reshape(rows, columns // BLOCK_SIZE, -1)
    scales = blocks[..., 0:2].copy().view("<f2")[..., 0]
    if tensor.kind == "Q4_1":
        biases = blocks[..., 2:4].copy().view("<f2")[..., 0]
        packed = blocks[..., 4:]
        # A block's low nibbles are its first 16 weights, its high nibbles the other 16.
        codes = np.concatenate([packed & 0xF, packed >> 4], axis=-1)
        codes = codes[..., 0::2] | (codes[..., 1::2] << 4)
        bits = 4
    elif tensor.kind == "Q8_0":
        biases = (scales * np.float16(-128)).astype(np.float16)
        codes = blocks[..., 2:] ^ 0x80  # int8 to uint8 with an offset of 128
        bits = 8
    else:
        raise ModelLoadError(f"tensor {tensor.name} is {tensor.kind}, not quantised in blocks")
    words = np.ascontiguousarray(codes).reshape(rows, -1).view("<u4")
    return AffineWeight(words, scales, biases, bits)


def float_values(tensor: GgufTensor) -> npt.NDArray[np.float32]:
    """Return an F32 or F16 tensor as float32."""
    if tensor.kind not in ("F32", "F16"):
        raise ModelLoadError(f"tensor {tensor.name} is {tensor.kind}, not a plain float")
    dtype = "<f4" if tensor.kind == "F32" else "<f2"
    return tensor.raw.view(dtype).reshape(tensor.shape).astype(np.float32)


class _Reader:
    """Walk the header once, front to back."""

    def __init__(self, buffer: mmap.mmap) -> None:
        self._buffer = buffer
        self._offset = 0

    def read_file(self) -> GgufFile:
        if self._take(4) != _MAGIC:
            raise ValueError("it does not begin with GGUF")
        version = self._scalar(_U32)
        if version not in (2, 3):
            raise ValueError(f"version {version} is not supported")
        num_tensors, num_values = self._scalar(_U64), self._scalar(_U64)
        metadata: dict[str, GgufValue] = {}
        for _ in range(num_values):
            key = self._string()
            metadata[key] = self._value(self._scalar(_U32))
        infos = [self._tensor_info() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"alignment {alignment!r} is not a positive integer")
        data_start = -(-self._offset // alignment) * alignment
        tensors = [self._tensor(*info, data_start) for info in infos]
        return GgufFile(metadata, {tensor.name: tensor for tensor in tensors})

    def _tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        shape = tuple(self._scalar(_U64) for _ in range(self._scalar(_U32)))
        return name, shape[::-1], self._scalar(_U32), self._scalar(_U64)

    def _tensor(
        self, name: str, shape: tuple[int, ...], type_number: int, offset: int, data_start: int
    ) -> GgufTensor:
        if type_number not in _KINDS:
            raise ValueError(f"tensor {name} has ggml type {type_number}, which is not supported")
        kind, block_size, block_bytes = _KINDS[type_number]
        if not shape or shape[-1] % block_size:
            raise ValueError(f"tensor {name} of shape {shape} is not whole blocks of {kind}")
        num_bytes = prod(shape) // block_size * block_bytes
        start = data_start + offset
        if start + num_bytes > len(self._buffer):
            raise ValueError(f"it is cut off within tensor {name}")
        raw = np.frombuffer(self._buffer, np.uint8, num_bytes, start)
        return GgufTensor(name, shape, kind, raw)

    def _value(self, type_number: int) -> GgufValue:
        if type_number == _STRING:
            return self._string()
        if type_number == _ARRAY:
            item_type, length = self._scalar(_U32), self._scalar(_U64)
            return [self._value(item_type) for _ in range(length)]
        if type_number not in _SCALARS:
            raise ValueError(f"metadata type {type_number} is unknown")
        return self._scalar(_SCALARS[type_number])  # type: ignore[no-any-return]

    def _string(self) -> str:
        return self._take(self._scalar(_U64)).decode("utf-8")

    def _scalar(self, layout: struct.Struct):  # type: ignore[no-untyped-def] # noqa: ANN202
        (value,) = layout.unpack_from(self._buffer, self._offset)
        self._offset += layout.size
        return value

    def _take(self, num_bytes: int) -> bytes:
        end = self._offset + num_bytes
        if end > len(self._buffer):
            raise ValueError("it is cut off within its header")
        taken = self._buffer[self._offset : end]
        self._offset = end
        return taken
