"""Turn a skip that nobody has accounted for into a failure when the tests run in CI.

A skipped test looks like a passed one to whoever reads the last line. With `CI=true` in the
environment a test, or a whole module, may be skipped only if it is listed here with the reason.
"""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Generator

import pytest

#: Patterns of node ids, and why CI may skip what they match.
ALLOWED_SKIPS: dict[str, str] = {}


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Fail a test that was skipped without a listed reason; expected failures are not skips."""
    report = yield
    if report.skipped and not hasattr(report, "wasxfail"):
        _fail_unless_allowed(report)
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Fail a module that was skipped as a whole without a listed reason."""
    report = yield
    if report.skipped:
        _fail_unless_allowed(report)
    return report


def _fail_unless_allowed(report: pytest.TestReport | pytest.CollectReport) -> None:
    if os.environ.get("CI") != "true":
        return
    if any(fnmatch.fnmatch(report.nodeid, pattern) for pattern in ALLOWED_SKIPS):
        return
    # A skip's longrepr is (path, line, reason).
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    report.outcome = "failed"
    report.longrepr = f"{reason}\nIn CI a skip fails unless ALLOWED_SKIPS in conftest.py lists it."
