"""Hand the repository's own files, read and parsed once, to the tests that guard them."""

from __future__ import annotations

import ast
import subprocess
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]

PACKAGES = ("bench", "cache_tools", "cli", "engine", "server")

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Source:
    """Hold one Python file of the repository; `path` is relative to its root."""

    path: Path
    text: str

    @property
    def module(self) -> str:
        """Return the dotted name that the file is imported by."""
        parts = self.path.with_suffix("").parts
        if parts[-1] == "__init__":
            parts = parts[:-1]
        return ".".join(("vllm_mlx", *parts) if parts[0] in PACKAGES else parts)

    @cached_property
    def tree(self) -> ast.Module:
        """Return the parsed file."""
        return ast.parse(self.text, filename=str(self.path))

    def imports(self) -> Iterator[tuple[int, str]]:
        """Yield line and dotted name of every import, those inside functions included.

        `from a import b` yields `a.b`: whether b is a module or a name in it is not known here.
        """
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield node.lineno, alias.name
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    yield node.lineno, f"{'.' * node.level}{node.module or ''}.{alias.name}"

    def functions(self) -> Iterator[FunctionNode]:
        """Yield every function and method, nested ones included."""
        for node in ast.walk(self.tree):
            if isinstance(node, FunctionNode):
                yield node


def tracked_files(root: Path) -> list[Path]:
    """List what a commit of everything would hold, relative to `root`."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=root,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    paths = (Path(name) for name in sorted(set(listed.split("\0"))) if name)
    return [path for path in paths if (root / path).is_file() or (root / path).is_symlink()]


@pytest.fixture(scope="session")
def repository() -> Path:
    """Give the repository's root folder."""
    return ROOT


@pytest.fixture(scope="session")
def package_names() -> tuple[str, ...]:
    """Give the top-level folders that are imported as `vllm_mlx.*`."""
    return PACKAGES


@pytest.fixture(scope="session")
def files(repository: Path) -> list[Path]:
    """Give every file that is, or is about to be, in version control."""
    return tracked_files(repository)


@pytest.fixture(scope="session")
def pyproject(repository: Path) -> dict[str, Any]:
    """Give the parsed pyproject.toml."""
    return tomllib.loads((repository / "pyproject.toml").read_text())


@pytest.fixture(scope="session")
def sources(repository: Path, files: list[Path]) -> list[Source]:
    """Give every Python file of the packages."""
    return [
        Source(path, (repository / path).read_text())
        for path in files
        if path.suffix == ".py" and path.parts[0] in PACKAGES
    ]


@pytest.fixture(scope="session")
def test_sources(repository: Path, files: list[Path]) -> list[Source]:
    """Give every Python file outside the packages: tests and their fixtures."""
    return [
        Source(path, (repository / path).read_text())
        for path in files
        if path.suffix == ".py" and path.parts[0] not in (*PACKAGES, ".typing")
    ]
