"""Request fields that no schema knows: counted, logged the first time, named to the client."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Mapping, Sequence

from vllm_mlx.engine.errors import InvalidRequestError

logger = logging.getLogger(__name__)

#: Names come from clients: neither the table nor a header may grow without bound.
_MAX_NAMES_KEPT = 1000
_MAX_NAMES_IN_HEADER = 20
_MAX_NAME_LENGTH = 64
_OTHERS = "(others)"

_UNSAFE_IN_HEADER = re.compile(r"[^A-Za-z0-9_.\[\]\-]")


class UnknownFields:
    """Count unknown fields by name; or refuse them, when strict. Event loop only."""

    def __init__(self, *, strict: bool = False) -> None:
        self._strict = strict
        self._counts: Counter[str] = Counter()

    @property
    def counts(self) -> Mapping[str, int]:
        """Return how often each name has come."""
        return self._counts

    def record(self, names: Sequence[str]) -> tuple[str, ...]:
        """Take note of one request's unknown fields and return them as a header may carry them.

        Raises `InvalidRequestError` for the first of them when strict.
        """
        if names and self._strict:
            raise InvalidRequestError(
                f"unknown field: {_safe(names[0])} (--strict-fields refuses what is not known)",
                param=_safe(names[0]),
            )
        safe = [_safe(name) for name in names]
        for name in safe:
            self._count(name)
        if len(safe) > _MAX_NAMES_IN_HEADER:
            safe = [*safe[:_MAX_NAMES_IN_HEADER], _OTHERS]
        return tuple(safe)

    def _count(self, name: str) -> None:
        if name not in self._counts:
            if len(self._counts) >= _MAX_NAMES_KEPT:
                name = _OTHERS
            else:
                logger.info("unknown request field ignored: %s (logged once)", name)
        self._counts[name] += 1


def _safe(name: str) -> str:
    return _UNSAFE_IN_HEADER.sub("?", name[:_MAX_NAME_LENGTH])
