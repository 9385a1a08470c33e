"""Write a run's rows to a file of any format, and read them back."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from vllm_mlx.bench.columns import SCHEMA_VERSION
from vllm_mlx.bench.output.tables import (
    CASE_TABLE,
    REQUEST_TABLE,
    ROW_TABLE,
    TABLE_COLUMNS,
    data_frame,
    records,
)
from vllm_mlx.bench.results import Results
from vllm_mlx.engine.errors import UsageError

KIND = "vllm-mlx bench-serve"

FORMATS = ("table", "csv", "json", "jsonl", "sqlite", "markdown")
_FORMAT_OF_SUFFIX = {
    ".csv": "csv",
    ".json": "json",
    ".jsonl": "jsonl",
    ".db": "sqlite",
    ".sqlite": "sqlite",
    ".sqlite3": "sqlite",
    ".md": "markdown",
    ".txt": "table",
}
#: Put before the suffix of the file that holds a table of its own.
_PARTS = {ROW_TABLE: "", CASE_TABLE: ".cases", REQUEST_TABLE: ".requests"}

Tables = Mapping[str, Sequence[dict[str, Any]]]


def format_of(path: Path, wanted: str) -> str:
    """Return the format of a file: `wanted`, or by its suffix for `auto`; raises `UsageError`."""
    if wanted != "auto":
        return wanted
    found = _FORMAT_OF_SUFFIX.get(path.suffix.lower())
    if found is None:
        known = ", ".join(_FORMAT_OF_SUFFIX)
        raise UsageError(f"{path}: name the format with --format, or use a suffix of {known}")
    return found


def tables_of(results: Results, *, with_requests: bool) -> Tables:
    """Return the tables that a run has."""
    tables: dict[str, Sequence[dict[str, Any]]] = {ROW_TABLE: results.rows}
    if results.cases:
        tables[CASE_TABLE] = results.cases
    if with_requests:
        tables[REQUEST_TABLE] = results.requests
    return tables


def json_text(tables: Tables, notes: Sequence[str]) -> str:
    """Return the JSON file's text: one object with a list for each table."""
    content: dict[str, Any] = {
        "kind": KIND,
        "schema_version": SCHEMA_VERSION,
        "notes": list(notes),
        "rows": tables[ROW_TABLE],
    }
    for name, table in ((CASE_TABLE, "cases"), (REQUEST_TABLE, "requests")):
        if name in tables:
            content[table] = tables[name]
    return json.dumps(content, indent=2, allow_nan=False) + "\n"


def json_lines(rows: Sequence[dict[str, Any]]) -> str:
    """Return one line of JSON for each row."""
    return "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows)


def csv_text(rows: Sequence[dict[str, Any]], table: str) -> str:
    """Return CSV with a head line; an empty cell is a missing value."""
    return str(data_frame(rows, TABLE_COLUMNS[table]).to_csv(index=False))


def write_results(path: Path, file_format: str, tables: Tables, notes: Sequence[str]) -> list[Path]:
    """Write `csv`, `json`, `jsonl` or `sqlite` and return the files.

    A database gets the rows appended; any other file is replaced as a whole, at once. CSV and
    JSON Lines hold one table a file: `results.requests.csv` beside `results.csv`.
    """
    if file_format == "sqlite":
        _append_to_database(path, tables)
        return [path]
    if file_format == "json":
        write_text(path, json_text(tables, notes))
        return [path]
    written = []
    for name, rows in tables.items():
        target = path.with_name(f"{path.stem}{_PARTS[name]}{path.suffix}")
        text = csv_text(rows, name) if file_format == "csv" else json_lines(rows)
        write_text(target, text)
        written.append(target)
    return written


def check_writable(path: Path) -> None:
    """Raise `UsageError` now rather than after minutes of measuring."""
    folder = path.parent if str(path.parent) else Path()
    if not folder.is_dir():
        raise UsageError(f"{path}: there is no folder {folder}")
    if path.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        raise UsageError(f"{path} cannot be written")


def write_text(path: Path, text: str) -> None:
    """Replace a file's content in one step, so that a reader never sees half of it."""
    with _replacing(path) as file:
        file.write(text)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a result file of any format but Markdown; raises `UsageError`."""
    return _read(path, ROW_TABLE)


def read_requests(path: Path) -> list[dict[str, Any]]:
    """Return the per-request rows that a result file holds, none if it was written without."""
    return _read(path, REQUEST_TABLE)


def _read(path: Path, table: str) -> list[dict[str, Any]]:
    if not path.is_file():
        raise UsageError(f"there is no result file {path}")
    readers: Mapping[str, Callable[[Path, str], list[dict[str, Any]]]] = {
        "csv": _read_csv,
        "json": _read_json,
        "jsonl": _read_json_lines,
        "sqlite": _read_database,
    }
    reader = readers.get(format_of(path, "auto"))
    if reader is None:
        raise UsageError(f"{path}: results are read from csv, json, jsonl and sqlite")
    try:
        rows = reader(path, table)
    except (ValueError, KeyError, TypeError, OSError, sqlite3.Error) as error:
        raise UsageError(f"{path} is not a result file of bench-serve: {error}") from error
    versions = {row.get("schema_version") for row in rows}
    if table == ROW_TABLE and versions != {SCHEMA_VERSION}:
        shown = ", ".join(sorted(str(version) for version in versions)) or "nothing"
        raise UsageError(f"{path} has schema version {shown}, this build reads {SCHEMA_VERSION}")
    return rows


def _read_json(path: Path, table: str) -> list[dict[str, Any]]:
    content = json.loads(path.read_text(encoding="utf-8"))
    if content.get("kind") != KIND:
        raise ValueError(f"its kind is not '{KIND}'")
    name = {ROW_TABLE: "rows", CASE_TABLE: "cases", REQUEST_TABLE: "requests"}[table]
    return list(content.get(name, []))


def _read_json_lines(path: Path, table: str) -> list[dict[str, Any]]:
    part = _part(path, table)
    if part is None:
        return []
    return [json.loads(line) for line in part.read_text(encoding="utf-8").splitlines() if line]


def _read_csv(path: Path, table: str) -> list[dict[str, Any]]:
    import pandas as pd

    part = _part(path, table)
    if part is None:
        return []
    # As text: a model named 1e3 must not become a number.
    frame = pd.read_csv(part, dtype="object", keep_default_na=False, na_values=[""])
    return records(frame, TABLE_COLUMNS[table])


def _read_database(path: Path, table: str) -> list[dict[str, Any]]:
    import pandas as pd

    with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection:
        query = "SELECT name FROM sqlite_master WHERE type = 'table' AND name = ?"
        if connection.execute(query, (table,)).fetchone() is None:
            if table == ROW_TABLE:
                raise ValueError(f"it has no table {table}")
            return []
        # `table` is one of this module's own names.
        frame = pd.read_sql_query(f"SELECT * FROM {table}", connection, dtype="object")
    return records(frame, TABLE_COLUMNS[table])


def _part(path: Path, table: str) -> Path | None:
    """Return the file that holds `table`; None if there is none beside the rows."""
    part = path.with_name(f"{path.stem}{_PARTS[table]}{path.suffix}")
    return part if part.is_file() else None


def _append_to_database(path: Path, tables: Tables) -> None:
    with contextlib.closing(sqlite3.connect(path)) as connection:
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        if version not in (0, SCHEMA_VERSION):
            raise UsageError(
                f"{path} has schema version {version}, this build writes {SCHEMA_VERSION}"
            )
        with connection:
            for name, rows in tables.items():
                frame = data_frame(rows, TABLE_COLUMNS[name])
                frame.to_sql(name, connection, if_exists="append", index=False)
            connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[IO[str]]:
    if path.exists() and not path.is_file():
        # A pipe or a device: there is nothing to replace.
        with path.open("w", encoding="utf-8", newline="") as file:
            yield file
        return
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="") as file:
            yield file
        os.chmod(name, 0o644)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
