"""The benchmark of the engine: names of cells, how results are kept, and that it measures."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from click.testing import CliRunner

from vllm_mlx.engine.benchmark.__main__ import main
from vllm_mlx.engine.benchmark.cells import (
    CPU_CELLS,
    GPU_CELLS,
    Cell,
    CellResult,
    Results,
    table,
)
from vllm_mlx.engine.benchmark.matrix import measure_cells
from vllm_mlx.engine.benchmark.measures import Effort
from vllm_mlx.engine.config import ModelConfig
from vllm_mlx.engine.errors import UsageError

TINY = ModelConfig(model="tiny", load_format="dummy", shape="tiny")


def result(cell: str, **found: dict[str, float]) -> CellResult:
    """Return the result of a cell."""
    return CellResult(
        cell=cell, model="m", dtype="float32", device="cpu", libraries=("mlx 1",), found=found
    )


@pytest.mark.parametrize("text", [*CPU_CELLS, *GPU_CELLS, "prefill:16384"])
def test_cells_are_written_as_they_are_read(text: str) -> None:
    """A cell's name is what it was read from."""
    assert str(Cell.parse(text)) == text


@pytest.mark.parametrize(
    "text", ["decode", "decode:16", "prefill:2x16", "sleep:1x2", "decode:0x16", "join:4x1", ""]
)
def test_what_is_no_cell_is_refused(text: str) -> None:
    """Names that are not understood are refused, with what could be written instead."""
    with pytest.raises(UsageError, match="is no cell"):
        Cell.parse(text)


def test_a_stored_cell_is_not_measured_again(tmp_path: Path) -> None:
    """What a file holds is taken from there without loading the model, damaged files are not."""
    results = Results(tmp_path, "my/model")
    cells = [Cell.parse("decode:2x16"), Cell.parse("prefill:16")]
    for cell in cells:
        results.save(cell, result(str(cell), a={"step, ms": 1.0}))
    nowhere = ModelConfig(model="/there/is/none")
    found, missing = measure_cells(nowhere, cells, results, Effort())
    assert [one.cell for one in found] == ["decode:2x16", "prefill:16"]
    assert missing == []
    assert len(list(tmp_path.glob("my-model-*.json"))) == 2
    (tmp_path / "my-model-prefill-16.json").write_text("{")
    assert results.load(cells[1]) is None


def test_the_table_compares_the_first_two() -> None:
    """Every measure has a row, with a ratio where both have a value."""
    results = [result("decode:1x2", a={"x": 3.0}, b={"x": 2.0}), result("prefill:2", a={"y": 1e3})]
    assert table(results, ["a", "b", "c"]) == [
        "| cell | measure | a | b | c | a / b |",
        "|---|---|---:|---:|---:|---:|",
        "| decode:1x2 | x | 3.00 | 2.00 |  | 1.50 |",
        "| prefill:2 | y | 1,000 |  |  |  |",
    ]


def test_every_kind_of_cell_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny model gives every measure for those who can have so many rows, all of them sound."""
    monkeypatch.setenv("VLLM_MLX_CACHE_DIR", str(tmp_path))
    names = ["decode:1x16", "decode:3x16", "prefill:80", "join:2x16", "contended:2x80"]
    cells = [Cell.parse(name) for name in names]
    found, missing = measure_cells(TINY, cells, None, Effort(1, 2))
    assert missing == []
    competing = {one.cell: set(one.found) for one in found}
    both = {"this engine", "BatchGenerator"}
    assert competing == {
        "decode:1x16": {*both, "generate_step"},
        "decode:3x16": both,
        "prefill:80": {*both, "generate_step"},
        "join:2x16": both,
        "contended:2x80": both,
    }
    for one in found:
        for measures in one.found.values():
            assert measures.keys() == one.found["this engine"].keys()
            assert all(math.isfinite(value) for value in measures.values())
            step = measures.get("step, ms", 1.0)
            assert step > 0
            if one.cell == "decode:3x16":
                assert measures["decode, tokens/s"] == pytest.approx(3e3 / step)


def test_no_cell_is_begun_when_time_is_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command says which cells there was no time for, and measures them the next time."""
    monkeypatch.setenv("VLLM_MLX_CACHE_DIR", str(tmp_path / "cache"))
    options = ["--shape", "tiny", "--rounds", "1", "--steps", "1", "--results", str(tmp_path)]
    cell = ["--cell", "decode:1x16"]
    late = CliRunner().invoke(main, [*options, *cell, "--time-limit", "0"])
    assert late.exit_code == 0, late.output
    assert "no time for decode:1x16" in late.output
    done = CliRunner().invoke(main, [*options, *cell])
    assert done.exit_code == 0, done.output
    assert "| decode:1x16 | decode, tokens/s |" in done.output
    refused = CliRunner().invoke(main, [*options, "--cell", "decode"])
    assert refused.exit_code == 2
    assert "'decode' is no cell" in refused.output
