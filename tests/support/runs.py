"""Make runs of KV blocks whose tensors can be told right from wrong by their names alone."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from vllm_mlx.engine.core.outputs import pack_tokens
from vllm_mlx.engine.kv.block_hash import BlockHasher, Namespace
from vllm_mlx.engine.kv.disk_format import StoredRun, StoredTensor, encode_run, iter_blocks

BLOCK_SIZE = 4
NAMESPACE = Namespace(
    weights="aa" * 32, kv_dtype="bfloat16", block_size=BLOCK_SIZE, label="model-a"
)
OTHER = Namespace(weights="bb" * 32, kv_dtype="float16", block_size=BLOCK_SIZE, label="model-b")


def tokens_of(*blocks: int) -> list[int]:
    """Return the tokens of blocks that each repeat one token."""
    return [token for block in blocks for token in [block] * BLOCK_SIZE]


def chain_of(*blocks: int, namespace: Namespace = NAMESPACE) -> list[bytes]:
    """Return the hashes of blocks that each repeat one token."""
    return BlockHasher(namespace.digest, BLOCK_SIZE).extend(tokens_of(*blocks))


def content(block_hash: bytes, kind: str, num_bytes: int) -> bytes:
    """Return the bytes that a block's tensors of one kind have."""
    piece = hashlib.sha256(block_hash + kind.encode()).digest()
    return (piece * (num_bytes // len(piece) + 1))[:num_bytes]


def run_of(
    blocks: Sequence[int],
    start: int = 0,
    stop: int | None = None,
    *,
    namespace: Namespace = NAMESPACE,
    size: int = 128,
    with_state: Sequence[int] = (),
) -> StoredRun:
    """Make the run of blocks `start` to `stop` of a chain; `with_state` counts from the chain.

    Each block has `size` bytes of KV, half of them keys.
    """
    hashes = chain_of(*blocks, namespace=namespace)
    stop = len(blocks) if stop is None else stop
    tensors = []
    for index in range(start, stop):
        at = index - start
        data = content(hashes[index], "kv", size // 2)
        tensors += [
            StoredTensor(f"{at}/kv/{number}", "bfloat16", (1, size // 4), data) for number in (0, 1)
        ]
        if index in with_state:
            state = content(hashes[index], "state", 16)
            tensors.append(StoredTensor(f"{at}/state/1", "float32", (2, 2), state))
    return StoredRun(
        namespace=namespace,
        parent=hashes[start - 1] if start else None,
        hashes=tuple(hashes[start:stop]),
        tokens=pack_tokens(tokens_of(*blocks[start:stop])),
        tensors=tuple(tensors),
    )


def is_right(run: StoredRun) -> bool:
    """Tell whether every tensor of a run holds what `run_of` put there."""
    return all(
        tensor.data == content(block_hash, tensor.kind, len(tensor.data))
        for block_hash, tensors in iter_blocks(run)
        for tensor in tensors
    )


def stored_bytes(run: StoredRun) -> int:
    """Return how large a run's file is."""
    return encode_run(run).num_bytes


def write_run(path: Path, run: StoredRun) -> None:
    """Write a run's file, in one go and with none of the store's care."""
    path.write_bytes(b"".join(bytes(piece) for piece in encode_run(run).pieces))


def files_in(store: Path) -> list[Path]:
    """List the run files of a store."""
    return sorted((store / "runs").glob("*/*.run"))
