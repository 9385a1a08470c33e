"""Hold that the README, the justfile and the CI script call the same commands."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.repository.conftest import Source

#: What the README tells a developer to run; CI runs each of these as it stands there.
COMMANDS = {
    "uv run ruff format --check",
    "uv run ruff check",
    "uv run mypy",
    "uv run pytest",
}

#: Markers whose tests are too long for the default run but run in CI.
CI_TIERS = {"packaging", "faults", "thorough"}


def test_the_readme_names_the_developers_commands(repository: Path) -> None:
    """The README's section on development holds exactly these commands."""
    section = (repository / "README.md").read_text().partition("## Develop")[2]
    (block,) = re.findall(r"```sh\n(.*?)```", section, re.DOTALL)
    assert {line.partition("#")[0].strip() for line in block.splitlines()} == COMMANDS


def test_ci_runs_the_developers_commands(repository: Path) -> None:
    """The CI script runs each of these commands as a stage."""
    script = (repository / ".ci" / "run").read_text()
    stages = set(re.findall(r"^stage [\w-]+ \d+ (.*)$", script, re.MULTILINE))
    assert stages >= COMMANDS


@pytest.mark.parametrize("name", [".ci/run", "justfile"])
def test_every_tier_that_has_tests_is_run(
    repository: Path, test_sources: list[Source], name: str
) -> None:
    """CI and `just test-all` run each tier that has tests, and none that has not."""
    used = {m for s in test_sources for m in re.findall(r"pytest\.mark\.(\w+)", s.text)}
    text = (repository / name).read_text()
    tiers = set(re.findall(r"uv run pytest -m (\w+)$", text, re.MULTILINE))
    assert tiers == used & CI_TIERS


def test_the_default_tests_run_last_in_ci(repository: Path) -> None:
    """A good CI run ends with the count of the default tests."""
    script = (repository / ".ci" / "run").read_text()
    stages = re.findall(r"^ *stage .*$", script, re.MULTILINE)
    assert stages[-1].endswith(" uv run pytest")


def test_just_runs_the_developers_commands(repository: Path) -> None:
    """Some recipe of the justfile runs each of these commands."""
    text = (repository / "justfile").read_text()
    bodies = {line.strip() for line in text.splitlines() if line.startswith("    ")}
    assert {line.removesuffix(" {{ options }}") for line in bodies} >= COMMANDS


def test_the_ci_script_is_valid_bash(repository: Path) -> None:
    """Bash can parse the CI script."""
    script = str(repository / ".ci" / "run")
    answer = subprocess.run(["bash", "-n", script], check=False, capture_output=True, text=True)
    assert (answer.returncode, answer.stderr) == (0, "")
