"""Turn rows into pandas tables whose columns have the documented types, and back."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vllm_mlx.bench.columns import CASE_COLUMNS, REQUEST_COLUMNS, ROW_COLUMNS, Column

if TYPE_CHECKING:
    import pandas as pd

#: The tables of a database, and what the parts of other files are called.
ROW_TABLE = "bench_serve"
CASE_TABLE = "bench_serve_workload"
REQUEST_TABLE = "bench_serve_requests"

TABLE_COLUMNS = {
    ROW_TABLE: ROW_COLUMNS,
    CASE_TABLE: CASE_COLUMNS,
    REQUEST_TABLE: REQUEST_COLUMNS,
}

_DTYPES = {
    "text": "object",
    "json": "object",
    "int": "Int64",
    "float": "Float64",
    "bool": "boolean",
}


def data_frame(rows: Sequence[dict[str, Any]], columns: Sequence[Column]) -> pd.DataFrame:
    """Return rows as a table; objects and lists become JSON text, what is missing stays so."""
    import pandas as pd

    names = [column.name for column in columns]
    cells = [[_cell(row.get(column.name), column) for column in columns] for row in rows]
    frame = pd.DataFrame(cells, columns=names, dtype="object")
    return frame.astype({column.name: _DTYPES[column.kind] for column in columns})


def records(frame: pd.DataFrame, columns: Sequence[Column]) -> list[dict[str, Any]]:
    """Return a table's rows as plain values; columns that it lacks are None."""
    import pandas as pd

    found = []
    for values in frame.to_dict(orient="records"):
        row = {}
        for column in columns:
            value = values.get(column.name)
            is_missing = (
                value is None
                or value is pd.NA
                or (not isinstance(value, (list, dict)) and pd.isna(value))
            )
            row[column.name] = None if is_missing else _value(value, column)
        found.append(row)
    return found


def _cell(value: Any, column: Column) -> Any:
    if value is not None and column.kind == "json":
        return json.dumps(value, sort_keys=True)
    return value


def _value(value: Any, column: Column) -> Any:
    if column.kind == "json":
        return json.loads(value) if isinstance(value, str) else value
    if column.kind == "int":
        return int(value)
    if column.kind == "float":
        return float(value)
    if column.kind == "bool":
        return value if isinstance(value, bool) else str(value).lower() in ("true", "1", "1.0")
    return str(value)
