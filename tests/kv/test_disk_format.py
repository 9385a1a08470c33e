"""The files of stored runs: what goes in comes out, and nothing damaged ever does."""

from __future__ import annotations

import hashlib
import json
import os
import struct
import zlib
from base64 import b64decode
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from support.runs import BLOCK_SIZE, NAMESPACE, run_of, tokens_of, write_run

from vllm_mlx.engine.core.outputs import pack_tokens
from vllm_mlx.engine.errors import CacheDamagedError, CacheError, CacheVersionError
from vllm_mlx.engine.kv.block_hash import BlockHasher, Namespace
from vllm_mlx.engine.kv.disk_format import (
    StoredRun,
    StoredTensor,
    encode_run,
    iter_blocks,
    read_header,
    read_run,
)

GOLDEN = Path(__file__).parent / "golden" / "version-1.run"


def golden_run() -> StoredRun:
    """Return what the golden file holds, put together without the store's own helpers."""
    namespace = Namespace(
        weights="5e" * 32,
        adapter="ad" * 32,
        kv_dtype="bfloat16",
        block_size=4,
        libraries=("mlx 0.32.4", "mlx-lm 0.32.2"),
        label="a-model",
    )
    tokens = [1, 2, 3, 4, 2**31 - 1, 0, 7, 8, 9, 10, 11, 12]
    hashes = BlockHasher(namespace.digest, 4, {2: b"image"}).extend(tokens)
    return StoredRun(
        namespace=namespace,
        parent=hashes[0],
        hashes=(hashes[1], hashes[2]),
        tokens=pack_tokens(tokens[4:]),
        extra_keys=(b"", b"image"),
        tensors=(
            # 1.0, -2.0, the smallest and a NaN with a payload, as bfloat16.
            StoredTensor("0/kv/0", "bfloat16", (1, 2, 2), bytes.fromhex("803f00c00100c17f")),
            StoredTensor("0/kv/1", "bfloat16", (1, 2, 2), bytes(range(8))),
            StoredTensor("1/kv/0", "bfloat16", (1, 2, 2), bytes(range(8, 16))),
            StoredTensor("1/kv/1", "bfloat16", (1, 2, 2), bytes(range(16, 24))),
            StoredTensor("1/window/0", "float16", (3,), bytes(range(6))),
            StoredTensor("1/state/0", "float32", (), b"\0\0\x80?"),
            StoredTensor("1/state/2", "float32", (0, 4), b""),
        ),
    )


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """Give the path of a file with two small blocks."""
    path = tmp_path / "some.run"
    write_run(path, run_of([1, 2], with_state=[1]))
    return path


def test_the_golden_file_stays_readable() -> None:
    """A file of format version 1 that was written once reads as what was written."""
    assert read_run(GOLDEN) == golden_run()


def test_the_golden_file_stays_the_same() -> None:
    """The same run is written as the very same bytes, so that a change must be a new version."""
    assert b"".join(map(bytes, encode_run(golden_run()).pieces)) == GOLDEN.read_bytes()


def test_the_golden_file_is_as_documented() -> None:
    """What docs/disk-format.md says is enough to read a file without the program."""
    data = GOLDEN.read_bytes()
    magic, version, header_bytes, file_bytes, header_crc, head_crc = struct.unpack(
        "<8sIIQII", data[:32]
    )
    assert (magic, version, file_bytes) == (b"VMLXRUN\n", 1, len(data))
    assert head_crc == zlib.crc32(data[:28])
    assert header_crc == zlib.crc32(data[32 : 32 + header_bytes])
    header = json.loads(data[32 : 32 + header_bytes])
    fields = {**header["namespace"], "label": ""}
    digest = hashlib.sha256(json.dumps(fields, separators=(",", ":")).encode()).digest()
    assert b64decode(header["digest"]) == digest
    parent, tokens = b64decode(header["parent"]), b64decode(header["tokens"])
    for number, name in enumerate(header["hashes"]):
        extra = b64decode(header["extra_keys"][number])
        block = tokens[16 * number : 16 * number + 16]
        length = len(extra).to_bytes(4, "little")
        parent = hashlib.sha256(parent + length + extra + block).digest()
        assert b64decode(name) == parent
    for tensor, expected in zip(header["tensors"], golden_run().tensors, strict=True):
        start = 32 + header_bytes + tensor["offset"]
        stored = data[start : start + tensor["num_bytes"]]
        assert (stored, zlib.crc32(stored)) == (expected.data, tensor["crc32"])
        assert (tensor["name"], tensor["dtype"]) == (expected.name, expected.dtype)
        assert tuple(tensor["shape"]) == expected.shape


def test_a_run_comes_back_as_it_was(tmp_path: Path) -> None:
    """Every tensor, hash and token of a run of eight blocks comes back, 16-bit floats bit-exact."""
    run = run_of(range(8), size=40_000, with_state=[3, 7])
    write_run(tmp_path / "some.run", run)
    assert read_run(tmp_path / "some.run") == run


def test_a_header_tells_what_is_there(stored: Path) -> None:
    """The header alone says what a run is and what each block has."""
    header = read_header(stored)
    run = run_of([1, 2], with_state=[1])
    assert (header.namespace, header.parent, header.hashes) == (NAMESPACE, None, run.hashes)
    assert header.kinds == (frozenset({"kv"}), frozenset({"kv", "state"})) == run.kinds
    assert header.num_tokens == 2 * BLOCK_SIZE
    assert header.file_name == encode_run(run).file_name


def test_only_what_is_wanted_is_read(stored: Path) -> None:
    """Tensors that nobody wants are not read."""
    run = read_run(stored, wanted=lambda block, kind: block == 1 and kind == "state")
    assert [tensor.name for tensor in run.tensors] == ["1/state/1"]
    assert [len(tensors) for _, tensors in iter_blocks(run)] == [0, 1]


def test_tensors_of_a_page_begin_on_a_page(tmp_path: Path) -> None:
    """Large tensors could be mapped; small ones do not take a page each."""
    path = tmp_path / "some.run"
    write_run(path, run_of([1, 2], size=40_000, with_state=[0]))
    data = path.read_bytes()
    for tensor in read_run(path).tensors:
        alignment = 16384 if tensor.kind == "kv" else 64
        assert data.index(tensor.data) % alignment == 0


def test_memory_of_any_shape_is_written(tmp_path: Path) -> None:
    """A tensor may be a view with items and dimensions of its own."""
    run = run_of([1])
    view = memoryview(bytes(range(64))).cast("H", (4, 8))
    tensor = StoredTensor("0/kv/0", "bfloat16", (4, 8), view)
    write_run(tmp_path / "some.run", replace(run, tensors=(tensor,)))
    assert read_run(tmp_path / "some.run").tensors[0].data == bytes(range(64))
    assert replace(run, tensors=(tensor,)).num_bytes == 64


def test_the_name_says_what_a_run_holds() -> None:
    """Two runs share a name only if they hold the same blocks and kinds of tensors."""
    names = {
        encode_run(run).file_name
        for run in (
            run_of([1, 2]),
            run_of([1, 2], with_state=[1]),
            run_of([1, 2], with_state=[0]),
            run_of([1, 2], 1),
            run_of([1, 3]),
            run_of([1, 2], namespace=msgspec.structs.replace(NAMESPACE, adapter="x")),
        )
    }
    assert len(names) == 6


@pytest.mark.parametrize("sixteenths", range(16))
def test_a_cut_off_file_is_damaged(stored: Path, sixteenths: int) -> None:
    """A file that ends early is refused, header and all, wherever it ends."""
    data = stored.read_bytes()
    stored.write_bytes(data[: len(data) * sixteenths // 16])
    for read in (read_header, read_run):
        with pytest.raises(CacheDamagedError, match="damaged"):
            read(stored)


@pytest.mark.parametrize("sixteenths", range(16))
def test_a_torn_file_is_damaged(stored: Path, sixteenths: int) -> None:
    """A file of the right length whose end was never written is refused."""
    data = stored.read_bytes()
    kept = len(data) * sixteenths // 16
    stored.write_bytes(data[:kept] + bytes(len(data) - kept))
    with pytest.raises(CacheDamagedError):
        read_run(stored)


def test_every_flipped_bit_is_found(stored: Path) -> None:
    """No byte of a file can change without the whole file being refused."""
    data = stored.read_bytes()
    with stored.open("r+b", buffering=0) as file:
        for position, byte in enumerate(data):
            os.pwrite(file.fileno(), bytes([byte ^ 1 << position % 8]), position)
            with pytest.raises(CacheError):
                read_run(stored)
            os.pwrite(file.fileno(), bytes([byte]), position)
    assert read_run(stored) == run_of([1, 2], with_state=[1])


def test_a_longer_file_is_damaged(stored: Path) -> None:
    """Bytes after the end are not overlooked."""
    stored.write_bytes(stored.read_bytes() + b"\0")
    with pytest.raises(CacheDamagedError):
        read_header(stored)


def test_other_versions_are_not_damaged(stored: Path) -> None:
    """A whole file of another version is told from a damaged one by its first bytes alone."""
    head = bytearray(stored.read_bytes()[:28])
    head[8:12] = (2).to_bytes(4, "little")
    checked = bytes(head) + zlib.crc32(head).to_bytes(4, "little")
    stored.write_bytes(checked + b"whatever version 2 may be")
    with pytest.raises(CacheVersionError, match="version 2; this program reads 1"):
        read_header(stored)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hashes": ()}, "1 to 8 blocks"),
        ({"parent": b"p" * 32}, "hash of block 0"),
        ({"tokens": pack_tokens(tokens_of(1, 3))}, "hash of block 1"),
        ({"tokens": pack_tokens([1])}, "bytes of tokens"),
        ({"extra_keys": (b"image", b"")}, "hash of block 0"),
        ({"extra_keys": (b"",)}, "1 extra keys for 2 blocks"),
        ({"tensors": (StoredTensor("2/kv/0", "int8", (1,), b"x"),)}, "does not name"),
        ({"tensors": (StoredTensor("0/kv", "int8", (1,), b"x"),)}, "does not name"),
        ({"tensors": (StoredTensor("0/kv/0", "int3", (1,), b"x"),)}, "int3"),
        ({"tensors": (StoredTensor("0/kv/0", "int8", (2,), b"x"),)}, "has 1 bytes"),
        ({"tensors": (StoredTensor("0/kv/0", "int8", (1,), b"x"),) * 2}, "same name"),
    ],
)
def test_a_run_that_contradicts_itself_is_not_written(
    changes: dict[str, object], message: str
) -> None:
    """KV is never stored under the name of other tokens, or in a shape that it does not have."""
    with pytest.raises(ValueError, match=message):
        encode_run(replace(run_of([1, 2]), **changes))  # type: ignore[arg-type]
