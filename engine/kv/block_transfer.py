"""Turn blocks of KV into the bytes that are stored on disk, and back, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from vllm_mlx.engine.core.outputs import pack_tokens
from vllm_mlx.engine.errors import CacheDamagedError
from vllm_mlx.engine.kv.block_codec import Block
from vllm_mlx.engine.kv.block_hash import Namespace
from vllm_mlx.engine.kv.disk_format import StoredRun, StoredTensor

#: Numpy has no bfloat16: its bits travel as integers of the same size.
_AS_INTEGERS = {"bfloat16": mx.uint16}


def to_run(
    namespace: Namespace,
    parent: bytes | None,
    hashes: Sequence[bytes],
    tokens: Sequence[int],
    blocks: Sequence[Block],
) -> StoredRun:
    """Copy consecutive blocks to host memory; call on the engine thread."""
    return StoredRun(
        namespace=namespace,
        parent=parent,
        hashes=tuple(hashes),
        tokens=pack_tokens(tokens),
        tensors=tuple(
            tensor for index, block in enumerate(blocks) for tensor in _tensors(index, block)
        ),
    )


def from_run(run: StoredRun) -> list[Block]:
    """Copy a run's blocks to the device; lazy but for the copy. Call on the engine thread.

    Raises CacheDamagedError if a block lacks what every block has.
    """
    blocks = []
    for index in range(len(run.hashes)):
        kinds: dict[str, list[mx.array | None]] = {"kv": [], "window": [], "state": []}
        for tensor in run.of_block(index):
            kinds[tensor.kind].append(_array(tensor))
        state = kinds["state"]
        window = [array for array in kinds["window"] if array is not None]
        kv = [array for array in kinds["kv"] if array is not None]
        if not (kv or window or state):
            raise CacheDamagedError(f"block {index} of a stored run holds nothing")
        blocks.append(
            Block(
                kv=tuple(kv),
                window=tuple(window) if window else None,
                state=tuple(state) if state else None,
            )
        )
    return blocks


def _tensors(index: int, block: Block) -> list[StoredTensor]:
    groups = (("kv", block.kv), ("window", block.window or ()), ("state", block.state or ()))
    return [
        _stored(f"{index}/{kind}/{number}", array)
        for kind, arrays in groups
        for number, array in enumerate(arrays)
    ]


def _stored(name: str, array: mx.array | None) -> StoredTensor:
    if array is None:
        # A state that the model never set; an empty tensor keeps its place in the order.
        return StoredTensor(name, "uint8", (0,), b"")
    dtype = str(array.dtype).removeprefix("mlx.core.")
    integers = _AS_INTEGERS.get(dtype)
    host = np.ascontiguousarray(np.array(array.view(integers) if integers else array))
    return StoredTensor(name, dtype, tuple(array.shape), host.data.cast("B"))


def _array(tensor: StoredTensor) -> mx.array | None:
    if tensor.shape == (0,):
        return None
    dtype = getattr(mx, tensor.dtype)
    integers = _AS_INTEGERS.get(tensor.dtype)
    raw = np.frombuffer(tensor.data, dtype="uint16" if integers else tensor.dtype)
    array = mx.array(raw.reshape(tensor.shape))
    return array.view(dtype) if integers else array
