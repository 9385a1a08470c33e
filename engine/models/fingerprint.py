"""Name a checkpoint by its content, so that stored KV is never taken for another model's."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path

import msgspec

from vllm_mlx.engine.errors import ModelLoadError
from vllm_mlx.engine.kv.block_hash import Namespace
from vllm_mlx.engine.models.cached_folder import sha256_of, user_cache_dir

#: Whatever decides what a model computes; a folder need not have all of them.
_MODEL_PATTERNS = ("model*.safetensors", "config.json", "hf_quant_config.json", "*.py")
_ADAPTER_PATTERNS = ("*.safetensors", "adapter_config.json")

#: Libraries whose change may change KV.
_LIBRARIES = ("mlx", "mlx-lm")

_SHA256 = re.compile(r"[0-9a-f]{64}")
_NUM_THREADS = 4
#: A file that was changed so recently may change again without its time telling.
_SETTLING_S = 2.0


class _KnownHash(msgspec.Struct, frozen=True):
    """Remember the hash of one file as it was.

    The time of the last change of anything, unlike that of the content, cannot be set by programs
    that copy files with their times.
    """

    path: str
    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int
    sha256: str


def model_namespace(
    path: Path,
    adapter_path: Path | None,
    kv_dtype: str,
    block_size: int,
    libraries: Sequence[str],
    *,
    weights: str | None = None,
    label: str = "",
) -> Namespace:
    """Return the namespace of a model's KV: what it depends on besides the tokens.

    Reads every byte of weights that no hub has hashed and no earlier call has, which takes seconds,
    unless `weights` tells them from others already.
    Raises ModelLoadError for a folder without weights.
    """
    return Namespace(
        weights=weights or weights_fingerprint(path),
        adapter=adapter_fingerprint(adapter_path) if adapter_path is not None else "",
        kv_dtype=kv_dtype,
        block_size=block_size,
        libraries=tuple(libraries),
        label=label,
    )


def kv_libraries() -> tuple[str, ...]:
    """Return the names and versions of the installed libraries that KV depends on."""
    return tuple(f"{name} {metadata.version(name)}" for name in _LIBRARIES)


def weights_fingerprint(path: Path) -> str:
    """Return a hash of the content of a model's weights, configuration and code.

    Raises ModelLoadError if there are no weights or they cannot be read.
    """
    return _fingerprint(path, _MODEL_PATTERNS)


def adapter_fingerprint(path: Path) -> str:
    """Return a hash of the content of an adapter's weights and configuration.

    Raises ModelLoadError if there are no weights or they cannot be read.
    """
    return _fingerprint(path, _ADAPTER_PATTERNS)


def _fingerprint(folder: Path, patterns: Iterable[str]) -> str:
    files = sorted({file for pattern in patterns for file in folder.glob(pattern)})
    if not any(file.suffix == ".safetensors" for file in files):
        raise ModelLoadError(f"{folder} has no weights to tell it from other models by")
    try:
        with ThreadPoolExecutor(_NUM_THREADS) as pool:
            hashes = list(pool.map(_content_hash, files))
    except OSError as error:
        raise ModelLoadError(f"{folder} cannot be read: {error.strerror or error}") from error
    listed = [f"{file.name}\0{sha256}\n" for file, sha256 in zip(files, hashes, strict=True)]
    return hashlib.sha256("".join(listed).encode()).hexdigest()


def _content_hash(file: Path) -> str:
    """Return the SHA-256 of a file: the hub's, the one that is remembered, or computed."""
    target = file.resolve(strict=True)
    hub_hash = _hub_hash(target)
    if hub_hash is not None:
        return hub_hash
    before = target.stat()
    entry = user_cache_dir() / "fingerprints" / f"{_name_of(target)}.json"
    known = _recall(entry)
    if known is not None and known == _known(target, before, known.sha256):
        return known.sha256
    sha256 = sha256_of(target)
    after = target.stat()
    is_settled = time.time() - after.st_ctime > _SETTLING_S
    if is_settled and _known(target, before, sha256) == _known(target, after, sha256):
        _remember(entry, _known(target, after, sha256))
    return sha256


def _hub_hash(target: Path) -> str | None:
    """Return the hash that a file of the hub's cache is named by, if it is one of its content.

    Large files are named by their SHA-256; others by a hash of git's, which is not one of the
    content alone.
    """
    is_blob = target.parent.name == "blobs" and target.parent.parent.name.startswith("models--")
    return target.name if is_blob and _SHA256.fullmatch(target.name) else None


def _known(path: Path, status: os.stat_result, sha256: str) -> _KnownHash:
    return _KnownHash(
        str(path), status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino, sha256
    )


def _name_of(path: Path) -> str:
    return hashlib.sha256(os.fsencode(path)).hexdigest()


def _recall(entry: Path) -> _KnownHash | None:
    try:
        return msgspec.json.decode(entry.read_bytes(), type=_KnownHash)
    except (OSError, msgspec.MsgspecError):
        return None


def _remember(entry: Path, known: _KnownHash) -> None:
    # Not remembering only costs time later.
    with contextlib.suppress(OSError):
        entry.parent.mkdir(parents=True, exist_ok=True)
        temporary = entry.with_name(f".{entry.name}.{os.getpid()}")
        temporary.write_bytes(msgspec.json.encode(known))
        temporary.replace(entry)
