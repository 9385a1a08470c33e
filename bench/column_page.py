"""Write the list of columns into docs/benchmarking.md, from the columns themselves.

`python -m vllm_mlx.bench.column_page` in the root of a checkout.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from vllm_mlx.bench.columns import CASE_COLUMNS, REQUEST_COLUMNS, ROW_COLUMNS, Column
from vllm_mlx.bench.distribution import PARTS
from vllm_mlx.bench.metrics import LATENCIES

PAGE = Path("docs/benchmarking.md")
BEGIN = "<!-- columns: written by `python -m vllm_mlx.bench.column_page` -->"
END = "<!-- end of columns -->"

_TABLES = (
    ("A row for each configuration and repetition:", ROW_COLUMNS),
    ("With `--raw`, a row for each request:", REQUEST_COLUMNS),
    ("With `--workload`, a row for each case and repetition:", CASE_COLUMNS),
)


def section() -> str:
    """Return the section between the marks, these included."""
    parts = [BEGIN]
    for title, columns in _TABLES:
        parts += [title, "\n".join(_table(columns))]
    return "\n\n".join([*parts, END])


def replaced(text: str) -> str:
    """Return a page's text with the section in it brought up to date."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + section() + after


def _table(columns: Sequence[Column]) -> Iterator[str]:
    yield "| column | type | meaning |"
    yield "|---|---|---|"
    for column in columns:
        latency, _, part = column.name.partition("_")
        if latency in LATENCIES and part:
            if part == PARTS[0]:
                names = ", ".join(f"`{latency}_{name}`" for name in PARTS)
                meaning = column.meaning.rpartition(":")[0]
                yield f"| {names} | {_type(column)} | {meaning} |"
            continue
        yield f"| `{column.name}` | {_type(column)} | {column.meaning} |"


def _type(column: Column) -> str:
    return f"{column.kind}, {column.unit}" if column.unit else column.kind


if __name__ == "__main__":
    PAGE.write_text(replaced(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
