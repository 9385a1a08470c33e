"""Name blocks of KV by everything that they depend on; pure.

A block's hash covers its tokens, all tokens before it (through its parent's hash) and the
namespace: whatever else makes KV differ. Storing and looking up call the same function.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec

from vllm_mlx.engine.core.outputs import pack_tokens

#: Raise it when the stored form of KV changes; older entries are then never found.
FORMAT_VERSION = 1
DEFAULT_BLOCK_SIZE = 64


class Namespace(msgspec.Struct, frozen=True, kw_only=True):
    """Say what KV depends on besides the tokens; two that differ in anything share no block."""

    #: Content hash of the weights and of config.json.
    weights: str
    #: Content hash of the adapter; empty without one.
    adapter: str = ""
    #: What KV is computed and stored in, such as `bfloat16`.
    kv_dtype: str
    block_size: int = DEFAULT_BLOCK_SIZE
    format_version: int = FORMAT_VERSION
    #: Libraries whose change may change KV, such as `mlx 0.32.4`.
    libraries: tuple[str, ...] = ()
    #: What the model was called when the namespace was made; not part of the identity.
    label: str = ""

    @property
    def digest(self) -> bytes:
        """Return the 32 bytes that the hash chains of this namespace are rooted in."""
        identity = msgspec.structs.replace(self, label="")
        return hashlib.sha256(msgspec.json.encode(identity, order="deterministic")).digest()


class BlockHasher:
    """Hash the complete blocks of one token list as it grows; owned by one sequence.

    `extra_keys[i]` is mixed into block i: hashes of the images that its placeholder tokens stand
    for.
    """

    def __init__(
        self, namespace: bytes, block_size: int, extra_keys: dict[int, bytes] | None = None
    ) -> None:
        self._parent = namespace
        self._block_size = block_size
        self._extra = extra_keys or {}
        self.hashes: list[bytes] = []

    def extend(self, tokens: Sequence[int]) -> list[bytes]:
        """Hash the blocks that `tokens`, the whole list so far, completes; return all hashes."""
        size = self._block_size
        while (len(self.hashes) + 1) * size <= len(tokens):
            index = len(self.hashes)
            block = tokens[index * size : (index + 1) * size]
            self._parent = block_hash(self._parent, block, self._extra.get(index, b""))
            self.hashes.append(self._parent)
        return self.hashes


def block_hash(parent: bytes, tokens: Sequence[int], extra: bytes = b"") -> bytes:
    """Return the SHA-256 of a block: parent's hash (or the namespace's digest), tokens, extra."""
    digest = hashlib.sha256(parent)
    digest.update(len(extra).to_bytes(4, "little"))
    digest.update(extra)
    digest.update(pack_tokens(tokens))
    return digest.digest()
