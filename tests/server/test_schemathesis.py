"""Requests made up from the served OpenAPI document: no answer is a 5xx or other than described."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.server_process import ServerProcess
from support.tiny_folder import write_tiny_folder

pytestmark = pytest.mark.faults

CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
)

#: Requests of each kind for each route.
NUM_EXAMPLES = 40


@pytest.fixture
def server(tmp_path: Path, demo_model_path: Path) -> Iterator[ServerProcess]:
    """Return a ready server of a tiny model that answers shortly."""
    (tmp_path / "tiny").mkdir()
    folder = write_tiny_folder(tmp_path / "tiny", demo_model_path)
    limits = ("--max-tokens", "4", "--max-request-tokens", "16")
    with ServerProcess(str(folder), tmp_path, "--kv-memory-mb", "64", *limits) as process:
        yield process.wait_ready()


@pytest.mark.timeout(400)
def test_requests_made_up_from_the_document_find_no_fault(
    server: ServerProcess, tmp_path: Path
) -> None:
    """Valid and invalid ones, for every route; the server goes on, with nothing left open."""
    done = subprocess.run(
        [
            *(str(Path(sys.executable).with_name("st")), "run", f"{server.url}/openapi.json"),
            *("--checks", ",".join(CHECKS), "--max-examples", str(NUM_EXAMPLES)),
            *("--phases", "examples,coverage,fuzzing", "--mode", "all", "--seed", "7"),
            *("--generation-database", "none", "--no-color"),
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=380,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    status = server.status()
    assert (status["requests"], status["engine"]["restarts"]) == ([], 0)
    assert "failed" not in server.log
