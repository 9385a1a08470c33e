"""Read safetensors headers, and write a safetensors file one tensor at a time.

Format: https://github.com/huggingface/safetensors#format (8 bytes of length, JSON, raw data).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_mlx.engine.errors import ModelLoadError

#: The format's own bound on the JSON part.
_MAX_HEADER_BYTES = 100_000_000

_DTYPE_BITS = {
    "F64": 64, "I64": 64, "U64": 64, "C64": 64,
    "F32": 32, "I32": 32, "U32": 32,
    "F16": 16, "BF16": 16, "I16": 16, "U16": 16,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "I8": 8, "U8": 8, "BOOL": 8,
    "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
}  # fmt: skip
_DTYPE_OF = {"float32": "F32", "float16": "F16", "uint32": "U32"}


@dataclass(frozen=True)
class StoredTensor:
    """Say what a header tells of one tensor."""

    #: By safetensors' own names: `F32`, `BF16`, `U32`, ...
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        """Count the stored elements."""
        return prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Return the bytes that the elements take."""
        return self.num_elements * _DTYPE_BITS[self.dtype] // 8


@dataclass(frozen=True)
class PlannedTensor:
    """Say what will be written under one name; `make` is called once, when its turn comes."""

    dtype: str
    shape: tuple[int, ...]
    make: Callable[[], npt.NDArray[Any]]


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Read what `path` holds without reading any tensor.

    Raises ModelLoadError for a file that is cut off or not safetensors.
    """
    try:
        with path.open("rb") as file:
            (num_bytes,) = struct.unpack("<Q", file.read(8))
            if num_bytes > _MAX_HEADER_BYTES:
                raise ValueError(f"its header claims {num_bytes} bytes")
            entries = json.loads(file.read(num_bytes))
        entries.pop("__metadata__", None)
        tensors = {
            name: StoredTensor(entry["dtype"], tuple(entry["shape"]))
            for name, entry in entries.items()
        }
        end = 8 + num_bytes + max((e["data_offsets"][1] for e in entries.values()), default=0)
        if path.stat().st_size < end:
            raise ValueError(f"it is cut off: {path.stat().st_size} bytes of {end}")
        unknown = {tensor.dtype for tensor in tensors.values()} - _DTYPE_BITS.keys()
        if unknown:
            raise ValueError(f"dtypes {sorted(unknown)} are unknown")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise ModelLoadError(f"{path} is not a readable safetensors file: {error}") from error
    return tensors


def write_safetensors(
    path: Path,
    tensors: Sequence[tuple[str, PlannedTensor]],
    on_fraction: Callable[[float], None],
) -> None:
    """Write `tensors` in order, holding one of them in memory at a time.

    `on_fraction` hears the written part from 0 to 1. The caller makes the file durable.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "mlx"}}
    offset = 0
    for name, planned in tensors:
        dtype = _DTYPE_OF[planned.dtype]
        end = offset + StoredTensor(dtype, planned.shape).num_bytes
        header[name] = {
            "dtype": dtype,
            "shape": list(planned.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)  # the format wants aligned data
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        written = 0
        for name, planned in tensors:
            array = np.ascontiguousarray(planned.make(), dtype=np.dtype(planned.dtype))
            if array.shape != planned.shape:
                raise ModelLoadError(f"{name} has shape {array.shape}, not {planned.shape}")
            file.write(array.data)
            written += array.nbytes
            on_fraction(written / offset)
