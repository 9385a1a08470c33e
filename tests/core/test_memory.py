"""Byte budgets are plain arithmetic; control groups bound what is available."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_mlx.engine import memory
from vllm_mlx.engine.errors import InsufficientMemoryError
from vllm_mlx.engine.memory import (
    GIB,
    MIB,
    AttentionShape,
    MemoryLimits,
    cache_limit_bytes,
    default_kv_budget,
    device_limits,
    device_memory,
    format_bytes,
    host_limits,
    prefill_transient_bytes,
    require_fit,
    set_limits,
    usable_bytes,
)


def limits(total: int, available: int) -> MemoryLimits:
    """Return limits in bytes."""
    return MemoryLimits(total_bytes=total, available_bytes=available)


def shape(*, is_fused: bool) -> AttentionShape:
    """Return a small model's widths."""
    return AttentionShape(
        num_heads=8,
        hidden_size=100,
        intermediate_size=200,
        vocab_size=1000,
        itemsize=4,
        is_fused=is_fused,
    )


def test_a_tenth_of_the_machine_stays_free() -> None:
    """What is planned with is what is available less a tenth of the whole, never below 0."""
    assert usable_bytes(limits(100 * GIB, 60 * GIB)) == 50 * GIB
    assert usable_bytes(limits(1 * GIB, 1 * GIB)) == 768 * MIB
    assert usable_bytes(limits(10 * GIB, 100 * MIB)) == 0


def test_budget_is_what_is_left_and_no_more_than_is_useful() -> None:
    """Weights and the prefill's temporary arrays come first, and rows cannot use more than full."""
    kept = {"weights_bytes": 20 * GIB, "transient_bytes": 5 * GIB}
    machine = limits(100 * GIB, 60 * GIB)
    assert default_kv_budget(machine, **kept, useful_bytes=1000 * GIB) == 25 * GIB
    assert default_kv_budget(machine, **kept, useful_bytes=3 * GIB) == 3 * GIB
    assert default_kv_budget(limits(30 * GIB, 20 * GIB), **kept, useful_bytes=GIB) == 0


def test_weights_that_do_not_fit_are_refused() -> None:
    """The error says what is needed and what there is."""
    machine = limits(10 * GIB, 10 * GIB)
    require_fit(machine, load_bytes=8 * GIB, kv_bytes_per_token=1024)
    with pytest.raises(InsufficientMemoryError, match=r"9\.5 GiB .* 9 GiB are usable"):
        require_fit(machine, load_bytes=9 * GIB + 512 * MIB, kv_bytes_per_token=1024)
    with pytest.raises(InsufficientMemoryError):
        require_fit(machine, load_bytes=8 * GIB, kv_bytes_per_token=3 * MIB)


def test_unfused_attention_stores_scores_and_probabilities() -> None:
    """Only where scores are stored does the transient grow with the context."""
    fused = prefill_transient_bytes(shape(is_fused=True), chunk_tokens=10, context=5000)
    stored = prefill_transient_bytes(shape(is_fused=False), chunk_tokens=10, context=5000)
    assert stored - fused == 2 * 8 * 10 * 5000 * 4
    assert fused == prefill_transient_bytes(shape(is_fused=True), chunk_tokens=10, context=10)


def test_the_buffer_cache_is_a_small_part_within_bounds() -> None:
    """A twentieth, and never more than 4 GiB."""
    assert cache_limit_bytes(20 * GIB) == GIB
    assert cache_limit_bytes(500 * GIB) == 4 * GIB


@pytest.mark.parametrize(
    ("num_bytes", "expected"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "0.977 KiB"),
        (46_080, "45 KiB"),
        (MIB, "1 MiB"),
        (538_000_000, "513 MiB"),
        (23 * GIB, "23 GiB"),
        (2000 * GIB, "1.95 TiB"),
    ],
)
def test_sizes_for_people(num_bytes: int, expected: str) -> None:
    """Three digits and the unit that keeps them below a thousand."""
    assert format_bytes(num_bytes) == expected


def write_group(folder: Path, files: dict[str, str]) -> None:
    """Write one control group's files."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)


def test_limits_of_version_2_groups_and_their_parents(tmp_path: Path) -> None:
    """Every group above the process counts, and droppable file pages do not."""
    (tmp_path / "cgroup.controllers").write_text("memory\n")
    statistics = {"memory.stat": "anon 5\ninactive_file 300\n"}
    parent = {"memory.max": "9000\n", "memory.current": "1300\n", **statistics}
    child = {"memory.max": "max\n", "memory.current": "800\n", **statistics}
    write_group(tmp_path / "a", parent)
    write_group(tmp_path / "a/b", child)
    groups = tmp_path / "groups"
    groups.write_text("0::/a/b\n")
    assert memory._control_group_memory(groups, tmp_path) == [(9000, 1000)]


def test_limits_of_version_1_groups_seen_from_a_container(tmp_path: Path) -> None:
    """A path of the host that is not there leads to the mount itself."""
    mounted = {
        "memory.limit_in_bytes": "5000\n",
        "memory.usage_in_bytes": "700\n",
        "memory.stat": "total_inactive_file 200\n",
    }
    write_group(tmp_path / "memory", mounted)
    groups = tmp_path / "groups"
    groups.write_text("3:cpu,cpuacct:/x\n2:memory:/docker/0123\n0::/x\n")
    assert memory._control_group_memory(groups, tmp_path) == [(5000, 500)]


def test_a_control_group_lowers_the_machines_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lower of machine and group holds, for the whole and for what is available."""
    monkeypatch.setattr(memory, "_control_group_memory", lambda: [(1000, 400), (1 << 60, 0)])
    assert host_limits() == limits(1000, 600)


def test_device_limits_and_memory_are_read_from_mlx() -> None:
    """The real device has memory, takes its limits once, and counts what MLX holds."""
    real = device_limits()
    assert 0 < real.available_bytes <= real.total_bytes
    set_limits(real)
    import mlx.core as mx

    held = mx.zeros((256, 1024))
    mx.eval(held)
    snapshot = device_memory()
    assert snapshot is not None
    assert snapshot.active_bytes >= held.nbytes
    assert snapshot.peak_bytes >= snapshot.active_bytes
