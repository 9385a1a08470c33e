"""Hold the formats that are found in seventy real chat templates to a table.

The templates belong to the models' publishers and are not kept here. The table has, for each, its
hash and which of the signs it holds, and detection depends on nothing else of it; a slow test
fetches the templates and compares both.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from vllm_mlx.engine.parsing import REASONING_PARSERS, TOOL_PARSERS, detect_parsers
from vllm_mlx.engine.parsing.detect import all_signs

TABLE: list[dict[str, Any]] = json.loads(
    (Path(__file__).parent / "templates.json").read_text(encoding="utf-8")
)

#: The source package that carries the templates, as llama.cpp collects them.
PACKAGE = "llama-cpp-python==0.3.36"


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row["template"])
def test_a_template_gives_its_formats(row: dict[str, Any]) -> None:
    """The signs that a template holds, and the vocabulary where they say nothing, decide."""
    template = "\n".join(row["signs"])
    tools, reasoning, reason = detect_parsers(template, row.get("vocabulary", ()))
    assert (tools, reasoning) == (row["tools"], row["reasoning"])
    assert tools is None or tools in TOOL_PARSERS
    assert reasoning is None or reasoning in REASONING_PARSERS
    assert row.get("reason", "") in reason
    assert reason.startswith(f"tools: {tools or 'none'}, ")
    assert f"reasoning: {reasoning or 'none'}, " in reason


def test_the_table_is_whole() -> None:
    """All seventy templates are there once, with the signs of today, and a reason for each none."""
    assert len({row["template"] for row in TABLE}) == 70
    assert {sign for row in TABLE for sign in row["signs"]} <= set(all_signs())
    assert all(row.get("reason") for row in TABLE if row["tools"] is None)
    assert sum(row["tools"] is None for row in TABLE) == 5


def test_every_sign_and_token_belongs_to_one_format_first() -> None:
    """Each tool format that declares signs is found by each of its groups of them."""
    for kind in dict.fromkeys(TOOL_PARSERS.values()):
        for group in kind.signs:
            found, _, reason = detect_parsers(" ".join(group))
            assert found is not None
            first = TOOL_PARSERS[found]
            assert first is kind or set(group) & {s for g in first.signs for s in g}, reason
        for token in kind.tokens:
            found, _, _ = detect_parsers("", {token, "a"})
            assert found is not None
            assert token in TOOL_PARSERS[found].tokens


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_table_is_that_of_the_real_templates(tmp_path: Path) -> None:
    """Hashes and signs of the table are those of the templates as published."""
    folder = os.environ.get("CHAT_TEMPLATES")
    paths = sorted(Path(folder).glob("*.jinja")) if folder else fetch_templates(tmp_path)
    found = [_row(path) for path in paths]
    known = {row["template"]: row for row in TABLE}
    assert sorted(known) == sorted(row["template"] for row in found)
    for row in found:
        expected = known[row["template"]]
        assert {key: expected[key] for key in ("template", "sha256", "signs")} == row


def fetch_templates(folder: Path) -> list[Path]:
    """Fetch the source package with pip and unpack its templates."""
    subprocess.run([sys.executable, "-m", "venv", str(folder / "env")], check=True)
    pip = str(folder / "env" / "bin" / "pip")
    command = [pip, "download", "--quiet", "--no-deps", "--no-binary", ":all:", PACKAGE]
    subprocess.run(command, cwd=folder, check=True)
    (archive,) = folder.glob("llama_cpp_python-*.tar.gz")
    with tarfile.open(archive) as package:
        wanted = [m for m in package.getmembers() if m.name.endswith(".jinja")]
        package.extractall(folder, [m for m in wanted if "/templates/" in m.name], filter="data")
    return sorted(folder.glob("*/vendor/llama.cpp/models/templates/*.jinja"))


def _row(path: Path) -> dict[str, Any]:
    """Return what the table says of a template's text."""
    text = path.read_bytes().decode("utf-8")
    return {
        "template": path.stem,
        "sha256": hashlib.sha256(text.encode()).hexdigest(),
        "signs": [sign for sign in all_signs() if sign in text],
    }
