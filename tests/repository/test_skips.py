"""Hold that CI counts no skipped test as a passed one, by running pytest on a small project."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = {
    "test_one.py": """
import pytest

def test_passes():
    pass

@pytest.mark.skip(reason="no such device")
def test_is_skipped():
    pass

@pytest.mark.xfail(reason="known")
def test_fails_as_expected():
    assert False
""",
    "test_module.py": """
import pytest

pytest.importorskip("a_module_that_nobody_has")
""",
}


@pytest.fixture
def project(repository: Path, tmp_path: Path) -> Path:
    """Give a folder with this repository's conftest.py and tests that skip."""
    shutil.copy(repository / "conftest.py", tmp_path)
    for name, text in TESTS.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def test_ci_fails_skips_that_are_not_listed(project: Path) -> None:
    """In CI a skipped test and a skipped module fail, and say why; an expected failure does not."""
    answer = _pytest(project, "true", "--continue-on-collection-errors")
    assert answer.returncode == 1
    assert "1 passed, 1 xfailed, 2 errors" in answer.stdout
    assert "no such device" in answer.stdout
    assert "a_module_that_nobody_has" in answer.stdout


def test_ci_accepts_skips_that_are_listed(project: Path) -> None:
    """A skip that is listed with a reason stays a skip in CI."""
    conftest = project / "conftest.py"
    text = conftest.read_text()
    listed = text.replace("] = {}", '] = {"test_one.py::test_is_*": "a", "test_module.py": "b"}')
    assert listed != text
    conftest.write_text(listed)
    answer = _pytest(project, "true")
    assert answer.returncode == 0
    assert "1 passed, 2 skipped, 1 xfailed" in answer.stdout


def test_a_developer_may_skip(project: Path) -> None:
    """Outside CI a skip is a skip."""
    answer = _pytest(project, "")
    assert answer.returncode == 0
    assert "1 passed, 2 skipped, 1 xfailed" in answer.stdout


def _pytest(folder: Path, ci: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-ra", *options]
    environment = {"CI": ci, "PATH": "", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run(
        command, cwd=folder, env=environment, check=False, capture_output=True, text=True
    )
