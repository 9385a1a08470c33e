"""Name the way in which slow loading reports how far it is."""

from __future__ import annotations

from collections.abc import Callable

#: Hears a stage (`resolving`, `downloading`, `converting`, `loading weights`, `warming up`) and its
#: fraction from 0 to 1, None where it is not known. Called often; it must be quick.
ProgressCallback = Callable[[str, float | None], None]


def ignore_progress(stage: str, fraction: float | None) -> None:
    """Report to nobody."""
