"""Hold docs/cli.md to what the commands say of themselves."""

from __future__ import annotations

from pathlib import Path

from vllm_mlx.cli.errors import ExitCode
from vllm_mlx.cli.main import COMMANDS
from vllm_mlx.cli.pending import PENDING_SWITCHES, PENDING_VALUES, RENAMED_FLAGS
from vllm_mlx.cli.reference import page

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_is_up_to_date() -> None:
    """The committed page is what the commands generate."""
    assert (ROOT / "docs" / "cli.md").read_text(encoding="utf-8") == page(), (
        "run python -m vllm_mlx.cli.reference --write"
    )


def test_the_page_leaves_nothing_out() -> None:
    """Every command, pending flag and exit code is on it."""
    text = page()
    wanted = [f"## vllm-mlx {name}" for name in COMMANDS]
    pending = (*PENDING_SWITCHES, *PENDING_VALUES, *RENAMED_FLAGS)
    wanted += [f"`{name}`" for name in pending]
    wanted += [f"| {code.value} |" for code in ExitCode]
    assert [item for item in wanted if item not in text] == []
