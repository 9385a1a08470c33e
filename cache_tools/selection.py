"""Select runs by model, namespace, age and use."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable
from dataclasses import dataclass

from vllm_mlx.cache_tools.listing import ListedRun


@dataclass(frozen=True, slots=True)
class Selection:
    """Say which runs are meant; what is None or empty does not narrow it.

    `models` are names, or patterns with `*` and `?`; `namespaces` are beginnings of hex digests.
    Times are seconds since the epoch.
    """

    models: tuple[str, ...] = ()
    namespaces: tuple[str, ...] = ()
    #: Only what was stored before.
    created_before_s: float | None = None
    #: Only what was last used before.
    used_before_s: float | None = None
    min_hits: int | None = None

    def is_in_scope(self, run: ListedRun) -> bool:
        """Tell whether a run is of one of the models and of one of the namespaces."""
        return (
            not self.models or any(fnmatch.fnmatchcase(run.model, name) for name in self.models)
        ) and (
            not self.namespaces
            or any(run.namespace.startswith(start.lower()) for start in self.namespaces)
        )

    def matches(self, run: ListedRun) -> bool:
        """Tell whether a run is meant."""
        return (
            self.is_in_scope(run)
            and (self.created_before_s is None or run.created_s < self.created_before_s)
            and (self.used_before_s is None or run.last_used_s < self.used_before_s)
            and (self.min_hits is None or run.num_hits >= self.min_hits)
        )

    def of(self, runs: Iterable[ListedRun]) -> list[ListedRun]:
        """Return the runs that are meant."""
        return [run for run in runs if self.matches(run)]
