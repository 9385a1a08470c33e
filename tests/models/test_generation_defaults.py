"""Sampling defaults that a model brings are taken as far as they make sense."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vllm_mlx.engine.models.loader import generation_defaults


def defaults_of(folder: Path, document: Any) -> dict[str, float]:
    """Write the document as a folder's generation_config.json and read its defaults."""
    (folder / "generation_config.json").write_text(json.dumps(document))
    return generation_defaults(folder)


def test_every_setting_is_read(tmp_path: Path) -> None:
    """Fields of other use are left, and a null says nothing."""
    document = {
        "temperature": 0,
        "top_p": 0.8,
        "top_k": 20,
        "min_p": None,
        "repetition_penalty": 1.05,
        "eos_token_id": [1, 2],
        "do_sample": True,
    }
    expected = {"temperature": 0.0, "top_p": 0.8, "top_k": 20.0, "repetition_penalty": 1.05}
    assert defaults_of(tmp_path, document) == expected


@pytest.mark.parametrize(
    "document",
    [
        {"repetition_penalty": 0},
        {"temperature": -1},
        {"top_p": 1.5},
        {"top_k": -1},
        {"min_p": True},
        {"temperature": "hot"},
        [],
    ],
)
def test_what_no_request_could_say_is_no_default(
    tmp_path: Path, document: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A broken file does not make every request fail; the log names the field."""
    assert defaults_of(tmp_path, document) == {}
    assert len(caplog.records) == len(document)


def test_a_folder_without_the_file_has_no_defaults(tmp_path: Path) -> None:
    """Most base models bring none; a damaged file brings none either."""
    assert generation_defaults(tmp_path) == {}
    (tmp_path / "generation_config.json").write_text("{")
    assert generation_defaults(tmp_path) == {}
