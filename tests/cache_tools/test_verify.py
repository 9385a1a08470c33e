"""Verifying: every byte is checked, and nothing is changed."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from support.runs import NAMESPACE, files_in, run_of, write_run

from vllm_mlx.cache_tools.verify import verify_store

if TYPE_CHECKING:
    import pytest

    from tests.cache_tools.conftest import FilledStore


def test_a_whole_store_is_whole(store: FilledStore) -> None:
    """Progress ends at all bytes, and nothing is found."""
    seen: list[tuple[int, int]] = []
    found = verify_store(store.path, lambda done, total: seen.append((done, total)))
    total = sum(path.stat().st_size for path in files_in(store.path))
    assert found.damaged == found.orphaned == found.other_version == []
    assert seen[-1] == (total, total)
    assert len(found.listing.runs) == 5


def test_damage_that_no_header_shows_is_found(store: FilledStore) -> None:
    """One flipped bit in a tensor is damage, and what continues that run is orphaned."""
    path = store.file(1, 2, 3)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    before = store.contents()
    found = verify_store(store.path)
    assert [run.name for run in found.damaged] == [store.name(1, 2, 3)]
    assert "checksum" in found.damaged[0].fault
    assert [run.name for run in found.orphaned] == [store.name(1, 2, 3, 4)]
    assert store.contents() == before


def test_a_file_under_a_wrong_name_is_damage(store: FilledStore) -> None:
    """A whole file that is not what its name says would never be found."""
    path = store.file(1, 2, 9)
    write_run(path, run_of([7]))
    (found,) = verify_store(store.path).damaged
    assert found.name == f"{NAMESPACE.digest.hex()[:32]}/{path.name}"
    assert "name" in found.fault


def test_files_that_disappear_are_no_damage(
    store: FilledStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that evicts while the store is checked causes no alarm."""
    path = store.file(1, 2, 9)

    def remove(done: int, total: int) -> None:
        path.unlink(missing_ok=True)

    found = verify_store(store.path, remove)
    assert found.damaged == []


def test_a_file_that_cannot_be_read_is_damage(
    store: FilledStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the disk does not give back is as bad as what it gives back wrong."""

    def fail(descriptor: int, num_bytes: int, offset: int) -> bytes:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pread", fail)
        found = verify_store(store.path)
    assert {run.state for run in found.damaged} == {"unreadable"}
    assert {run.fault for run in found.damaged} == {"Input/output error"}
