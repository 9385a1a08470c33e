"""Recorded requests: what is written, what is not, and that it can be warmed."""

from __future__ import annotations

import json
import logging
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from vllm_mlx.engine.errors import UsageError
from vllm_mlx.server.recording import RequestRecorder, open_recorder
from vllm_mlx.server.warm_prompts import read_prompts

if TYPE_CHECKING:
    from tests.server.conftest import ServerFactory

DAY_S = 86_400.0


def lines(folder: Path) -> list[dict[str, object]]:
    """Return every recorded line."""
    return [
        json.loads(line)
        for file in sorted(folder.iterdir())
        for line in file.read_text().splitlines()
    ]


async def test_accepted_requests_are_written_without_who_asked(
    make_server: ServerFactory, tmp_path: Path
) -> None:
    """Both routes' bodies, streamed or not, in the form that warming reads; no key, no user."""
    folder = tmp_path / "recorded"
    server = await make_server(recorder=open_recorder(folder), api_keys=("secret",))
    headers = {"authorization": "Bearer secret"}
    chat = {"messages": [{"role": "user", "content": "Hi"}], "user": "me", "metadata": {"a": 1}}
    for path, body in {
        "/v1/chat/completions": {**chat, "temperature": 0.5},
        "/v1/completions": {"prompt": "Once", "stream": True},
        "/v1/responses": {"input": "Hi", "user": "me", "safety_identifier": "me"},
        "/tokenize": {"prompt": "counted only"},
        "/v1/chat/completions?refused": {"messages": []},
    }.items():
        await server.client.post(path, json=body, headers=headers)
    await server.post("/v1/chat/completions", **chat)
    server.runtime.close()
    found = lines(folder)
    assert [line["path"] for line in found] == [
        *("/v1/chat/completions", "/v1/completions", "/v1/responses"),
    ]
    assert found[0]["body"] == {"messages": chat["messages"], "temperature": 0.5}
    assert found[2]["body"] == {"input": "Hi"}
    (file,) = folder.iterdir()
    assert "secret" not in file.read_text()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert len(read_prompts(folder).prompts) == 3


def test_days_have_files_of_their_own_and_old_ones_go(tmp_path: Path) -> None:
    """The newest files are kept, and what else is in the folder is left alone."""
    (tmp_path / "mine.jsonl").write_text("")
    for day in range(4):
        recorder = RequestRecorder(tmp_path, max_days=2, clock=lambda day=day: day * DAY_S)  # type: ignore[misc]
        recorder.record("/v1/completions", b'{"prompt": "x"}')
        recorder.close()
    names = sorted(os.listdir(tmp_path))
    assert names == ["mine.jsonl", "requests-1970-01-03.jsonl", "requests-1970-01-04.jsonl"]


def test_a_day_ends_at_its_limit(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What would go over it is not written, not in part either, and that is said once."""
    recorder = RequestRecorder(tmp_path, max_day_bytes=300, clock=lambda: 0.0)
    with caplog.at_level(logging.WARNING):
        for _ in range(9):
            recorder.record("/v1/completions", b'{"prompt": "some words"}')
        recorder.close()
    assert 1 <= len(lines(tmp_path)) <= 3
    assert len(caplog.records) == 1


def test_a_folder_that_disappears_costs_no_request(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The fault is said once and nothing is raised."""
    folder = tmp_path / "gone"
    recorder = open_recorder(folder)
    folder.rmdir()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            recorder.record("/v1/completions", b"{}")
        recorder.close()
    assert len(caplog.records) == 1


def test_a_folder_that_cannot_be_made_is_a_usage_error(tmp_path: Path) -> None:
    """A server told to record to a file does not start."""
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError):
        open_recorder(tmp_path / "file" / "folder")
