"""Hold that what the documentation points to is there."""

from __future__ import annotations

import re
from pathlib import Path

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")

#: A file or folder of this repository named in code style, such as `engine/core/request.py`.
NAMED_PATH = re.compile(
    r"`((?:bench|cache_tools|cli|docs|engine|server|tests|\.ci)/[\w./-]*)`",
)


def test_relative_links_lead_to_files(repository: Path, files: list[Path]) -> None:
    """Every link of a page that is not to the web leads to a file of this repository."""
    wrong = [
        f"{page}: {target}"
        for page in _pages(files)
        for target in LINK.findall((repository / page).read_text())
        if not re.match(r"[a-z]+:|#", target)
        if not (repository / page.parent / target.partition("#")[0]).exists()
    ]
    assert wrong == []


def test_named_files_exist(repository: Path, files: list[Path]) -> None:
    """Every file that a page names in code style exists."""
    wrong = [
        f"{page}: {name}"
        for page in _pages(files)
        for name in NAMED_PATH.findall((repository / page).read_text())
        if not (repository / name).exists()
    ]
    assert wrong == []


def _pages(files: list[Path]) -> list[Path]:
    return [path for path in files if path.suffix == ".md"]
