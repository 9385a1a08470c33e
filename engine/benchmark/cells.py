"""Name what is measured of an engine, and keep each result in a file of its own.

A cell is one measurement of one model, such as `decode:16x512`. A run that is cut short goes on
where it stopped: cells whose file is there are not measured again.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import msgspec

from vllm_mlx.engine.errors import UsageError

CellKind = Literal["decode", "prefill", "join", "contended"]

_TEXT = re.compile(r"(?P<kind>[a-z]+):(?:(?P<rows>\d+)x)?(?P<tokens>\d+)")

#: What a GPU is asked, the largest promises first.
GPU_CELLS = (
    *("decode:128x512", "decode:64x512", "decode:16x4096", "decode:8x512", "decode:1x512"),
    *("decode:16x512", "contended:16x16384", "prefill:4096", "join:16x512", "join:16x2048"),
)
#: What two cores can do in a few minutes.
CPU_CELLS = (
    *("decode:16x64", "decode:16x512", "decode:1x64", "decode:4x64"),
    *("prefill:512", "join:16x512", "contended:4x1024"),
)


@dataclass(frozen=True, slots=True)
class Cell:
    """Name one measurement: its kind, how many rows decode, and how many tokens a prompt has."""

    kind: CellKind
    num_rows: int
    num_tokens: int

    def __str__(self) -> str:
        rows = "" if self.kind == "prefill" else f"{self.num_rows}x"
        return f"{self.kind}:{rows}{self.num_tokens}"

    @classmethod
    def parse(cls, text: str) -> Cell:
        """Read a cell as it is written on the command line; raises UsageError."""
        match = _TEXT.fullmatch(text)
        kinds: tuple[CellKind, ...] = get_args(CellKind)
        kind = next((k for k in kinds if match is not None and k == match["kind"]), None)
        if match is None or kind is None or (kind == "prefill") == bool(match["rows"]):
            raise UsageError(
                f"{text!r} is no cell: they are written decode:16x512, join:16x512, "
                "contended:16x4096 (rows x prompt tokens) and prefill:4096"
            )
        cell = cls(kind, int(match["rows"] or 1), int(match["tokens"]))
        if cell.num_rows < 1 or cell.num_tokens < 2:
            raise UsageError(f"{text!r} is no cell: it needs a row, and prompts of two tokens")
        return cell


class CellResult(msgspec.Struct, frozen=True, kw_only=True):
    """Hold what one cell gave, and where."""

    cell: str
    model: str
    dtype: str
    device: str
    #: Names and versions of the libraries.
    libraries: tuple[str, ...]
    #: By contender, then by measure; the units are in the measures' names.
    found: dict[str, dict[str, float]]


class Results:
    """Own the folder of result files of one model."""

    def __init__(self, folder: Path, model: str) -> None:
        self._folder = folder
        self._prefix = re.sub(r"[^A-Za-z0-9.-]+", "-", model).strip("-")

    def load(self, cell: Cell) -> CellResult | None:
        """Return what is stored of a cell; None if it is still to be measured."""
        try:
            return msgspec.json.decode(self._file(cell).read_bytes(), type=CellResult)
        except (FileNotFoundError, msgspec.MsgspecError):
            return None

    def save(self, cell: Cell, result: CellResult) -> None:
        """Store a cell's result, whole or not at all."""
        self._folder.mkdir(parents=True, exist_ok=True)
        file = self._file(cell)
        temporary = file.with_suffix(".tmp")
        temporary.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1))
        temporary.replace(file)

    def _file(self, cell: Cell) -> Path:
        name = str(cell).replace(":", "-")
        return self._folder / f"{self._prefix}-{name}.json"


def table(results: Iterable[CellResult], contenders: Sequence[str]) -> list[str]:
    """Return results as lines of Markdown: a row for each measure, a column for each contender.

    The last column says how many times the second contender's value the first one's is.
    """
    lines = [
        f"| cell | measure | {' | '.join(contenders)} | {contenders[0]} / {contenders[1]} |",
        f"|---|---|{'---:|' * (len(contenders) + 1)}",
    ]
    for result in results:
        for measure in next(iter(result.found.values())):
            values = [result.found.get(name, {}).get(measure) for name in contenders]
            shown = ["" if value is None else _number(value) for value in values]
            ratio = "" if not values[0] or not values[1] else f"{values[0] / values[1]:.2f}"
            lines.append(f"| {result.cell} | {measure} | {' | '.join(shown)} | {ratio} |")
    return lines


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.2f}"
