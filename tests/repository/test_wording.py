"""Hold docstrings where they are owed, and words out that do not belong in the repository."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.repository.conftest import Source

#: A sentence that ends and is followed by another one.
SECOND_SENTENCE = re.compile(r"[^.\s]{3,}[.!?] [A-Z]")

#: Put together here so that this file does not hold them.
FORBIDDEN = [
    "/" + "work/",
    "/tmp/" + "brief",
    r"\." + "library/",
    "/" + "root/",
    "/" + "home/[a-z]",
    "/" + "Users/[a-z]",
    r"issue" + r" #?\d",
]
#: Hosts of package indexes; the lock file names where each file came from.
INDEX_HOSTS = [r"pypi\." + "org", "python" + "hosted", r"npmjs\." + "org", r"debian\." + "org"]


def test_every_module_says_its_purpose_in_one_sentence(
    sources: list[Source], test_sources: list[Source]
) -> None:
    """A module's first docstring line is one sentence; only an `__init__` may have none."""
    wrong = []
    for source in [*sources, *test_sources]:
        docstring = ast.get_docstring(source.tree)
        if source.path.name == "__init__.py" and docstring is None:
            continue
        first = (docstring or "").partition("\n")[0]
        if not first.endswith(".") or SECOND_SENTENCE.search(first):
            wrong.append(f"{source.path}: {first!r}")
    assert wrong == []


def test_everything_public_has_a_docstring(sources: list[Source]) -> None:
    """Every public class, function and method says what it does."""
    wrong = [
        f"{source.path}:{node.lineno} {node.name}"
        for source in sources
        for node in _public(source.tree)
        if not ast.get_docstring(node)
    ]
    assert wrong == []


def test_every_test_says_what_it_holds(test_sources: list[Source]) -> None:
    """Every test has a docstring whose first line is one sentence."""
    wrong = [
        f"{source.path}:{function.lineno} {function.name}"
        for source in test_sources
        for function in source.functions()
        if function.name.startswith("test_")
        if not (ast.get_docstring(function) or "").partition("\n")[0].endswith((".", "?"))
    ]
    assert wrong == []


def test_no_exception_is_swallowed_in_silence(
    sources: list[Source], test_sources: list[Source]
) -> None:
    """No handler's whole body is `pass`; what is ignored on purpose uses `contextlib.suppress`."""
    wrong = [
        f"{source.path}:{node.lineno}"
        for source in [*sources, *test_sources]
        for node in ast.walk(source.tree)
        if isinstance(node, ast.ExceptHandler)
        and all(ast.unparse(statement) in {"pass", "..."} for statement in node.body)
    ]
    assert wrong == []


def test_no_file_names_a_machine_or_an_index(repository: Path, files: list[Path]) -> None:
    """The repository speaks of itself alone: no machine's paths, no package index's hosts."""
    wrong = []
    for path in files:
        patterns = FORBIDDEN if path.name == "uv.lock" else FORBIDDEN + INDEX_HOSTS
        anywhere = re.compile("|".join(patterns))
        for number, line in enumerate(_lines(repository / path), start=1):
            if found := anywhere.search(line):
                wrong.append(f"{path}:{number} {found.group()}")
    assert wrong == []


def _public(tree: ast.Module) -> Iterator[ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield public classes and functions of a module, and the public members of those classes."""
    pending: list[ast.AST] = [tree]
    while pending:
        for node in ast.iter_child_nodes(pending.pop()):
            if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if node.name.startswith("_") or _is_overload(node):
                continue
            yield node
            if isinstance(node, ast.ClassDef):
                pending.append(node)


def _is_overload(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(ast.unparse(d) in {"overload", "typing.overload"} for d in node.decorator_list)


def _lines(path: Path) -> list[str]:
    """Read text lines; a link or a file that is not UTF-8 text has none."""
    if path.is_symlink():
        return []
    try:
        return path.read_text().splitlines()
    except UnicodeDecodeError:
        return []
