"""A sweep's configurations: what is varied, how each is named, and which rows belong to it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from vllm_mlx.bench.columns import CONFIGURATION_COLUMNS

CACHE_MODES = ("cold", "warm", "prefix-hit", "preserve")

#: Columns that a label names only when they differ from these.
_USUAL: Mapping[str, Any] = {
    "endpoint": "chat",
    "stream": True,
    "cache_mode": "preserve",
    "turns": 1,
}

Key = tuple[tuple[str, Any], ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Configuration:
    """Hold one point of a sweep; fields are columns of the same name.

    Exactly one of `concurrency` (closed loop) and `request_rate_target` (open loop) is set.
    """

    endpoint: str
    stream: bool
    prompt_set: str
    prompt_tokens_target: int | None = None
    output_tokens_target: int | None = None
    shared_prefix_tokens: int | None = None
    turns: int = 1
    cache_mode: str = "preserve"
    concurrency: int | None = None
    request_rate_target: float | None = None
    arrival: str = "closed"
    burstiness: float | None = None
    max_tokens: int
    temperature: float | None = None
    extra_body: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def columns(self) -> dict[str, Any]:
        """Return the configuration's columns."""
        return {column.name: getattr(self, column.name) for column in CONFIGURATION_COLUMNS}

    @property
    def key(self) -> Key:
        """Return what rows of this configuration have in common."""
        return key_of(self.columns())

    @property
    def label(self) -> str:
        """Return a short name for people."""
        return label_of(self.columns())


def key_of(row: Mapping[str, Any]) -> Key:
    """Return the identity of the configuration that `row` belongs to."""
    return tuple((column.name, _plain(row.get(column.name))) for column in CONFIGURATION_COLUMNS)


def label_of(row: Mapping[str, Any]) -> str:
    """Return a short name of a row's configuration, for people."""
    parts = [str(row.get("prompt_set"))]
    if row.get("prompt_tokens_target"):
        parts.append(f"{int(row['prompt_tokens_target'])} in")
    if row.get("output_tokens_target"):
        parts.append(f"{int(row['output_tokens_target'])} out")
    if row.get("shared_prefix_tokens"):
        parts.append(f"{int(row['shared_prefix_tokens'])} shared")
    if row.get("concurrency"):
        parts.append(f"c={int(row['concurrency'])}")
    if row.get("request_rate_target"):
        parts.append(f"{row['request_rate_target']:g}/s {row.get('arrival')}")
    for name, usual in _USUAL.items():
        value = row.get(name)
        if value is not None and value != usual:
            parts.append("not streamed" if name == "stream" else _word(name, value))
    return " ".join(parts)


def group_by_configuration(
    rows: Sequence[Mapping[str, Any]],
) -> dict[Key, list[Mapping[str, Any]]]:
    """Return the rows of each configuration, in the order of their first row."""
    groups: dict[Key, list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(key_of(row), []).append(row)
    return groups


def loads(
    concurrencies: Sequence[int], rates: Sequence[float], arrival: str, burstiness: float
) -> Iterator[dict[str, Any]]:
    """Yield the fields of each load: the closed loops, then the open ones."""
    for concurrency in concurrencies:
        yield {"concurrency": concurrency}
    for rate in rates:
        shape = burstiness if arrival == "poisson" else None
        yield {"request_rate_target": rate, "arrival": arrival, "burstiness": shape}


def _word(name: str, value: Any) -> str:
    return f"{int(value)} turns" if name == "turns" else str(value)


def _plain(value: Any) -> Any:
    """Return a value that compares alike whether it was measured or read from a file."""
    if isinstance(value, (Mapping, list)):
        return json.dumps(value, sort_keys=True)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value
