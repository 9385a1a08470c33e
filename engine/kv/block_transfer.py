"""Turn blocks of KV into the bytes that are stored on disk, and back, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from vllm_mlx.engine.kv.block_codec import Block
from vllm_mlx.engine.kv.block_hash import Namespace
from vllm_mlx.engine.kv.disk_format import StoredRun, StoredTensor

#: Numpy has no bfloat16: its bits travel as integers of the same size.
_AS_INTEGERS = {"bfloat16": mx.uint16}


def to_run(
    namespace: Namespace,
    parent: bytes | None,
    hashes: Sequence[bytes],
    blocks: Sequence[Block],
) -> StoredRun:
    """Copy consecutive blocks to host memory; call on the engine thread."""
    return StoredRun(
        namespace=namespace,
        parent=parent,
        hashes=tuple(hashes),
        tokens=b"".join(block.tokens for block in blocks),
        tensors=tuple(
            tensor for index, block in enumerate(blocks) for tensor in _tensors(index, block)
        ),
    )


def from_run(run: StoredRun) -> list[tuple[bytes, Block]]:
    """Copy to the device what was read of a run: (hash, block) in order, parts not read missing.

    Call on the engine thread; evaluates.
    """
    token_bytes = len(run.tokens) // len(run.hashes)
    found = []
    for index, block_hash in enumerate(run.hashes):
        kinds: dict[str, list[mx.array | None]] = {"kv": [], "window": [], "state": []}
        for tensor in run.of_block(index):
            kinds[tensor.kind].append(_array(tensor))
        if not any(kinds.values()):
            continue
        block = Block(
            tokens=run.tokens[index * token_bytes : (index + 1) * token_bytes],
            kv=tuple(array for array in kinds["kv"] if array is not None),
            window=tuple(array for array in kinds["window"] if array is not None) or None,
            state=tuple(kinds["state"]) or None,
        )
        found.append((block_hash, block))
    mx.eval([array for _, block in found for array in block.arrays()])
    return found


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
