"""Read and lay out the files that runs of KV blocks are stored in (see docs/disk-format.md).

A file describes itself: nothing outside it is needed to know what it holds and whether it is whole.
Checksums are CRC-32: they are to find torn writes and rotten bits, not attackers (who could as well
replace the whole file), and zlib's are several times as fast as a hash wherever the processor has
an instruction for them.
"""

from __future__ import annotations

import hashlib
import os
import re
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import BinaryIO

import msgspec

from vllm_mlx.engine.core.outputs import unpack_tokens
from vllm_mlx.engine.errors import CacheDamagedError, CacheVersionError
from vllm_mlx.engine.kv.block_hash import FORMAT_VERSION, Namespace, block_hash

#: Most blocks in one file.
MAX_RUN_BLOCKS = 8
#: What every file's name ends with.
RUN_SUFFIX = ".run"

MAGIC = b"VMLXRUN\n"
#: Magic, format version, header bytes, file bytes, CRC of the header, CRC of what comes before it.
#: The same in all versions, so that a file of another version is told from a damaged one.
_PREAMBLE = struct.Struct("<8sIIQII")
_NUM_CHECKED = _PREAMBLE.size - 4
_MAX_HEADER_BYTES = 1 << 26

#: Tensors of a page or more begin on a page of Apple's processors, so that they could be mapped.
_PAGE_BYTES = 16384
_SMALL_ALIGNMENT = 64

DTYPE_BYTES = {
    "bool": 1, "int8": 1, "uint8": 1,
    "int16": 2, "uint16": 2, "float16": 2, "bfloat16": 2,
    "int32": 4, "uint32": 4, "float32": 4,
    "int64": 8, "uint64": 8, "float64": 8, "complex64": 8,
}  # fmt: skip

_TENSOR_NAME = re.compile(r"(0|[1-9]\d*)/([a-z][a-z_]*)/(0|[1-9]\d*)")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Hold one tensor's bytes, contiguous and little-endian.

    `name` is `<block of the run>/<kind>/<number>`, such as `0/kv/1`; `dtype` is MLX's own name.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes | memoryview

    @property
    def block(self) -> int:
        """Return which block of the run it belongs to."""
        return int(self.name.partition("/")[0])

    @property
    def kind(self) -> str:
        """Return what it is of its block: `kv`, `window`, `state`."""
        return self.name.split("/")[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRun:
    """Hold consecutive blocks of one chain; `parent` is the hash of the block before, or None.

    `tokens` are the token ids of all the blocks as little-endian int32. `extra_keys` are what was
    hashed into each block besides its tokens; empty if nothing was. A run that was read in part
    has the tensors of that part only.
    """

    namespace: Namespace
    parent: bytes | None
    hashes: tuple[bytes, ...]
    tokens: bytes
    tensors: tuple[StoredTensor, ...]
    extra_keys: tuple[bytes, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all tensors."""
        return sum(memoryview(tensor.data).nbytes for tensor in self.tensors)

    @property
    def kinds(self) -> tuple[frozenset[str], ...]:
        """Return the kinds of tensors that each block has."""
        return _kinds(self.tensors, len(self.hashes))

    def of_block(self, block: int) -> list[StoredTensor]:
        """Return the tensors of one block of the run, in order."""
        return [tensor for tensor in self.tensors if tensor.block == block]


class TensorEntry(msgspec.Struct, frozen=True, kw_only=True):
    """Say what one tensor is and where; `offset` counts from the end of the header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int
    crc32: int

    @property
    def block(self) -> int:
        """Return which block of the run it belongs to."""
        return int(self.name.partition("/")[0])

    @property
    def kind(self) -> str:
        """Return what it is of its block."""
        return self.name.split("/")[1]


class RunHeader(msgspec.Struct, frozen=True, kw_only=True):
    """Hold what a file says of itself before its tensors."""

    namespace: Namespace
    #: The namespace's digest; stored so that no other program need compute it.
    digest: bytes
    parent: bytes | None
    hashes: tuple[bytes, ...]
    tokens: bytes
    tensors: tuple[TensorEntry, ...]
    extra_keys: tuple[bytes, ...] = ()

    @property
    def kinds(self) -> tuple[frozenset[str], ...]:
        """Return the kinds of tensors that each block has."""
        return _kinds(self.tensors, len(self.hashes))

    @property
    def file_name(self) -> str:
        """Return the name that the run is stored under."""
        return _file_name(self.hashes, self.kinds)

    @property
    def num_tokens(self) -> int:
        """Return how many tokens the run stands for."""
        return len(self.tokens) // 4


@dataclass(frozen=True, slots=True)
class EncodedRun:
    """Hold a run as the pieces that its file is made of, in order."""

    file_name: str
    num_bytes: int
    pieces: tuple[bytes | memoryview, ...]


def namespace_folder(digest: bytes) -> str:
    """Return the name of the folder that a namespace's runs are in."""
    return digest.hex()[:32]


def encode_run(run: StoredRun) -> EncodedRun:
    """Lay out a run as its file; raise ValueError for one that contradicts itself.

    The same run always gives the same bytes. Nothing is copied.
    """
    offset = 0
    entries: list[TensorEntry] = []
    pieces: list[bytes | memoryview] = []
    for tensor in run.tensors:
        view = memoryview(tensor.data)
        data = view.cast("B") if view.nbytes else memoryview(b"")
        padding = -offset % _alignment(data.nbytes)
        pieces += [bytes(padding), data]
        offset += padding
        entries.append(
            TensorEntry(
                name=tensor.name,
                dtype=tensor.dtype,
                shape=tensor.shape,
                offset=offset,
                num_bytes=data.nbytes,
                crc32=zlib.crc32(data),
            )
        )
        offset += data.nbytes
    header = RunHeader(
        namespace=run.namespace,
        digest=run.namespace.digest,
        parent=run.parent,
        hashes=run.hashes,
        tokens=run.tokens,
        tensors=tuple(entries),
        extra_keys=run.extra_keys,
    )
    _check(header, offset)
    encoded = msgspec.json.encode(header)
    alignment = max((_alignment(entry.num_bytes) for entry in entries), default=_SMALL_ALIGNMENT)
    encoded += b" " * (-(_PREAMBLE.size + len(encoded)) % alignment)
    total = _PREAMBLE.size + len(encoded) + offset
    head = _PREAMBLE.pack(MAGIC, FORMAT_VERSION, len(encoded), total, zlib.crc32(encoded), 0)
    head = head[:_NUM_CHECKED] + zlib.crc32(head[:_NUM_CHECKED]).to_bytes(4, "little")
    return EncodedRun(header.file_name, total, (head, encoded, *(p for p in pieces if len(p))))


def read_header(path: Path) -> RunHeader:
    """Read what a file holds without reading any tensor.

    Raises CacheDamagedError, CacheVersionError for a whole file of another format version, and
    OSError for a file that cannot be read at all.
    """
    with path.open("rb", buffering=0) as file:
        return _read_header(file, path)[0]


def read_run(
    path: Path,
    *,
    verify: bool = True,
    wanted: Callable[[int, str], bool] | None = None,
) -> StoredRun:
    """Read a file's tensors, or those that `wanted(block of the run, kind)` picks.

    `verify` checks the tensors that are read against their checksums; the header always is, and so
    are, when everything is read, the gaps between tensors. Files are read and never mapped: one
    that is cut off while it is mapped ends the process. Raises as `read_header` does.
    """
    with path.open("rb", buffering=0) as file:
        header, start = _read_header(file, path)
        tensors = []
        for entry in header.tensors:
            if wanted is None or wanted(entry.block, entry.kind):
                data = _read_at(file.fileno(), entry.num_bytes, start + entry.offset, path)
                if verify and zlib.crc32(data) != entry.crc32:
                    raise CacheDamagedError(f"{path} is damaged: checksum of {entry.name}")
                tensors.append(StoredTensor(entry.name, entry.dtype, entry.shape, data))
        if verify and wanted is None:
            _check_gaps(file.fileno(), header, start, path)
    return StoredRun(
        namespace=header.namespace,
        parent=header.parent,
        hashes=header.hashes,
        tokens=header.tokens,
        tensors=tuple(tensors),
        extra_keys=header.extra_keys,
    )


def _read_header(file: BinaryIO, path: Path) -> tuple[RunHeader, int]:
    """Return the checked header and where the tensors begin."""
    size = os.fstat(file.fileno()).st_size
    head = _read_at(file.fileno(), min(size, _PREAMBLE.size), 0, path)
    if len(head) < _PREAMBLE.size:
        raise CacheDamagedError(f"{path} is damaged: cut off at {size} bytes")
    magic, version, header_bytes, file_bytes, header_crc, head_crc = _PREAMBLE.unpack(head)
    if magic != MAGIC or zlib.crc32(head[:_NUM_CHECKED]) != head_crc:
        raise CacheDamagedError(f"{path} is damaged: not the beginning of a stored run")
    if version != FORMAT_VERSION:
        raise CacheVersionError(
            f"{path} has format version {version}; this program reads {FORMAT_VERSION}"
        )
    start = _PREAMBLE.size + header_bytes
    if size != file_bytes or start > size or header_bytes > _MAX_HEADER_BYTES:
        raise CacheDamagedError(f"{path} is damaged: {size} bytes of {file_bytes}")
    encoded = _read_at(file.fileno(), header_bytes, _PREAMBLE.size, path)
    if zlib.crc32(encoded) != header_crc:
        raise CacheDamagedError(f"{path} is damaged: checksum of its header")
    try:
        header = msgspec.json.decode(encoded, type=RunHeader)
        _check(header, file_bytes - start)
    except (msgspec.MsgspecError, ValueError) as error:
        raise CacheDamagedError(f"{path} is damaged: {error}") from error
    return header, start


def _read_at(descriptor: int, num_bytes: int, offset: int, path: Path) -> bytes:
    pieces: list[bytes] = []
    missing = num_bytes
    while missing:
        # One call reads at most 2 GiB.
        piece = os.pread(descriptor, missing, offset + num_bytes - missing)
        if not piece:
            raise CacheDamagedError(f"{path} is damaged: it became shorter while it was read")
        pieces.append(piece)
        missing -= len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _check(header: RunHeader, data_bytes: int) -> None:
    """Raise ValueError where a header contradicts itself or the bytes that follow it."""
    count, size = len(header.hashes), header.namespace.block_size
    if not 1 <= count <= MAX_RUN_BLOCKS:
        raise ValueError(f"a run has 1 to {MAX_RUN_BLOCKS} blocks, not {count}")
    if header.digest != header.namespace.digest:
        raise ValueError("the namespace's digest is not that of its fields")
    if len(header.tokens) != 4 * size * count:
        raise ValueError(f"{len(header.tokens)} bytes of tokens for {count} blocks of {size}")
    if header.extra_keys and len(header.extra_keys) != count:
        raise ValueError(f"{len(header.extra_keys)} extra keys for {count} blocks")
    parent = header.digest if header.parent is None else header.parent
    for index, expected in enumerate(header.hashes):
        tokens = unpack_tokens(header.tokens[4 * size * index : 4 * size * (index + 1)])
        extra = header.extra_keys[index] if header.extra_keys else b""
        parent = block_hash(parent, tokens, extra)
        if parent != expected:
            raise ValueError(f"the hash of block {index} is not that of its tokens")
    _check_tensors(header.tensors, count, data_bytes)


def _check_tensors(entries: Sequence[TensorEntry], num_blocks: int, data_bytes: int) -> None:
    names = [entry.name for entry in entries]
    if len(set(names)) != len(names):
        raise ValueError("two tensors have the same name")
    end = 0
    for entry in entries:
        if not _TENSOR_NAME.fullmatch(entry.name) or entry.block >= num_blocks:
            raise ValueError(f"{entry.name!r} does not name a tensor of a block")
        if entry.dtype not in DTYPE_BYTES or any(length < 0 for length in entry.shape):
            raise ValueError(f"{entry.name} is {entry.dtype} {list(entry.shape)}")
        if entry.num_bytes != prod(entry.shape) * DTYPE_BYTES[entry.dtype]:
            raise ValueError(f"{entry.name} has {entry.num_bytes} bytes")
        if entry.offset != end + -end % _alignment(entry.num_bytes):
            raise ValueError(f"{entry.name} is not where it should be")
        end = entry.offset + entry.num_bytes
    if end != data_bytes:
        raise ValueError(f"{data_bytes} bytes of tensors instead of {end}")


def _check_gaps(descriptor: int, header: RunHeader, start: int, path: Path) -> None:
    end = 0
    for entry in header.tensors:
        if any(_read_at(descriptor, entry.offset - end, start + end, path)):
            raise CacheDamagedError(f"{path} is damaged: bytes before {entry.name}")
        end = entry.offset + entry.num_bytes


def _alignment(num_bytes: int) -> int:
    return _PAGE_BYTES if num_bytes >= _PAGE_BYTES else _SMALL_ALIGNMENT


def _kinds(
    tensors: Sequence[StoredTensor] | Sequence[TensorEntry], num_blocks: int
) -> tuple[frozenset[str], ...]:
    found: list[set[str]] = [set() for _ in range(num_blocks)]
    for tensor in tensors:
        found[tensor.block].add(tensor.kind)
    return tuple(frozenset(kinds) for kinds in found)


def _file_name(hashes: Sequence[bytes], kinds: Sequence[frozenset[str]]) -> str:
    """Name a run by its last block, which stands for all before, its length and what it holds."""
    held = ";".join(",".join(sorted(names)) for names in kinds)
    mark = hashlib.sha256(held.encode()).hexdigest()[:8]
    return f"{hashes[-1].hex()}-{len(hashes)}-{mark}{RUN_SUFFIX}"


def iter_blocks(run: StoredRun) -> Iterator[tuple[bytes, list[StoredTensor]]]:
    """Yield each block's hash and tensors, in order."""
    by_block: list[list[StoredTensor]] = [[] for _ in run.hashes]
    for tensor in run.tensors:
        by_block[tensor.block].append(tensor)
    yield from zip(run.hashes, by_block, strict=True)
