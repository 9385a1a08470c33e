"""Keep derived folders in the user's cache: made once, atomically, and re-made when damaged."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import platformdirs

from vllm_mlx.engine.errors import ModelLoadError

CACHE_DIR_VARIABLE = "VLLM_MLX_CACHE_DIR"

_MANIFEST_NAME = "manifest.json"
_HASH_CHUNK_BYTES = 1 << 20


class ManifestFile(msgspec.Struct, frozen=True):
    """Describe one file of a finished folder."""

    size: int
    sha256: str
    #: Spares hashing again while neither size nor time has changed.
    mtime_ns: int


class Manifest(msgspec.Struct, frozen=True):
    """List what a finished folder holds, and what it was made from."""

    format_version: int
    source: str
    files: dict[str, ManifestFile]


def user_cache_dir() -> Path:
    """Return the project's cache folder: `VLLM_MLX_CACHE_DIR`, or the platform's own place."""
    override = os.environ.get(CACHE_DIR_VARIABLE)
    if override:
        return Path(override).expanduser().absolute()
    return Path(platformdirs.user_cache_dir("vllm-mlx", appauthor=False))


def ensure_folder(
    path: Path,
    *,
    format_version: int,
    source: str,
    build: Callable[[Path], None],
    on_wait: Callable[[], None],
) -> Path:
    """Return `path`, built first by `build(empty_folder)` unless it is there and whole.

    The folder appears by one rename when all its files are on disk, so it is never seen half made.
    Several processes may call at once: one builds, the others wait (`on_wait` is called once) and
    use its work. Raises ModelLoadError if the cache folder cannot be written.
    """
    if is_whole(path, format_version=format_version, source=source):
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path.with_name(f"{path.name}.lock"), on_wait):
            if not is_whole(path, format_version=format_version, source=source):
                _remove_leftovers(path)
                _build_aside(path, format_version, source, build)
    except OSError as error:
        raise ModelLoadError(
            f"cannot write the model cache {path.parent}: {error.strerror or error}; "
            f"free space there, or set {CACHE_DIR_VARIABLE} to another folder"
        ) from error
    return path


def is_whole(path: Path, *, format_version: int, source: str) -> bool:
    """Tell whether `path` is a finished folder of this format and source, undamaged.

    Sizes are always compared; a file is hashed again only if its modification time differs.
    """
    try:
        manifest = msgspec.json.decode((path / _MANIFEST_NAME).read_bytes(), type=Manifest)
        if manifest.format_version != format_version or manifest.source != source:
            return False
        return all(_is_intact(path / name, entry) for name, entry in manifest.files.items())
    except (OSError, msgspec.DecodeError):
        return False


def sha256_of(path: Path) -> str:
    """Return the hex SHA-256 of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_HASH_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _is_intact(path: Path, entry: ManifestFile) -> bool:
    status = path.stat()
    if status.st_size != entry.size:
        return False
    return status.st_mtime_ns == entry.mtime_ns or sha256_of(path) == entry.sha256


def _build_aside(
    path: Path, format_version: int, source: str, build: Callable[[Path], None]
) -> None:
    temporary = Path(tempfile.mkdtemp(prefix=_temporary_prefix(path), dir=path.parent))
    try:
        build(temporary)
        files = {file.name: _durable(file) for file in sorted(temporary.iterdir())}
        manifest = Manifest(format_version, source, files)
        (temporary / _MANIFEST_NAME).write_bytes(msgspec.json.encode(manifest))
        _durable(temporary / _MANIFEST_NAME)
        _sync_folder(temporary)
        if path.exists():
            # A rename does not replace a full folder; whoever has the old files mapped keeps them.
            path.rename(f"{temporary}-replaced")
        temporary.rename(path)
        _sync_folder(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(f"{temporary}-replaced", ignore_errors=True)


def _durable(path: Path) -> ManifestFile:
    """Bring one file to disk and describe it."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
    status = path.stat()
    return ManifestFile(status.st_size, sha256_of(path), status.st_mtime_ns)


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _temporary_prefix(path: Path) -> str:
    return f".{path.name}.tmp-"


def _remove_leftovers(path: Path) -> None:
    """Remove what builders that were killed left; the caller holds the lock."""
    for leftover in path.parent.glob(f"{_temporary_prefix(path)}*"):
        shutil.rmtree(leftover, ignore_errors=True)


@contextmanager
def _locked(path: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Hold the lock file; the system lets go of it when its process ends, however it ends."""
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
