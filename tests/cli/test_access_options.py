"""API keys from a file, and the other options that say who may use the server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from vllm_mlx.cli.access_options import MAX_BODY_MB, MAX_HEADER_KB
from vllm_mlx.cli.main import main
from vllm_mlx.server.config import ServerConfig


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[ServerConfig]:
    """Catch the configurations that servers would be run with."""
    caught: list[ServerConfig] = []

    def run_server(server: ServerConfig, *rest: Any, **options: Any) -> int:
        caught.append(server)
        return 0

    monkeypatch.setattr("vllm_mlx.server.serving.run_server", run_server)
    monkeypatch.setattr("vllm_mlx.cli.announce.announce_if_local", lambda model, engine: None)
    monkeypatch.setattr("vllm_mlx.cli.logs.configure_logging", lambda level, log_format: None)
    return caught


def key_file(folder: Path, content: bytes, mode: int = 0o600) -> str:
    """Write a file of keys and return its path."""
    path = folder / "keys"
    path.write_bytes(content)
    path.chmod(mode)
    return str(path)


def test_the_defaults_are_the_configurations_own() -> None:
    """What is written out for the help page is what the server takes."""
    config = ServerConfig()
    assert int(MAX_BODY_MB * 2**20) == config.max_body_bytes
    assert config.max_header_bytes == MAX_HEADER_KB * 2**10


def test_keys_of_flags_and_file_are_all_asked_for(
    served: list[ServerConfig], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One key a line; blanks around and between them do not count."""
    path = key_file(tmp_path, b"  two \r\n\n#three\n")
    assert main(["serve", "--api-key", "one", "--api-key-file", path, "--host", "0.0.0.0"]) == 0
    assert served[0].api_keys == ("one", "two", "#three")
    assert capsys.readouterr().err == ""


def test_a_file_that_others_can_read_is_pointed_out(
    served: list[ServerConfig], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The warning says what to do, and not what the keys are."""
    path = key_file(tmp_path, b"secret", 0o644)
    assert main(["serve", "--api-key-file", path]) == 0
    err = capsys.readouterr().err
    assert f"chmod 600 {path}" in err
    assert "secret" not in err


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "holds no key"),
        (b"\n  \n", "holds no key"),
        (b"\xff\xfe", "not text"),
        ("schlüssel".encode(), "printable ASCII"),
    ],
)
def test_an_unusable_file_does_not_leave_the_door_open(
    served: list[ServerConfig],
    tmp_path: Path,
    content: bytes,
    expected: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A server whose keys cannot be had is a usage error."""
    assert main(["serve", "--api-key-file", key_file(tmp_path, content)]) == 2
    assert expected in capsys.readouterr().err
    assert served == []


def test_a_missing_file_is_a_usage_error(
    served: list[ServerConfig], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The path is named."""
    path = str(tmp_path / "nothing")
    assert main(["serve", "--api-key-file", path]) == 2
    assert path in capsys.readouterr().err
    assert served == []


@pytest.mark.parametrize("name", ["VLLM_MLX_API_KEY", "VLLM_MLX_API_KEY_FILE"])
@pytest.mark.parametrize("value", ["", " "])
def test_a_blank_variable_does_not_leave_the_door_open(
    served: list[ServerConfig],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    value: str,
) -> None:
    """A key that was lost on the way is told; one that is given elsewhere is enough."""
    monkeypatch.setenv(name, value)
    assert main(["serve"]) == 2
    assert name in capsys.readouterr().err
    assert served == []
    if not value:
        assert main(["serve", "--api-key", "one"]) == 0
        assert served[0].api_keys == ("one",)
