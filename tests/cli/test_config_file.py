"""Options from a TOML file: what wins, what is refused, and what is printed."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vllm_mlx.cli.configuration_page import page
from vllm_mlx.cli.main import main
from vllm_mlx.server.config import ServerConfig

ROOT = Path(__file__).resolve().parents[2]

Write = Callable[[str], str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Return a function that writes a file of options and returns its path."""

    def write_file(text: str) -> str:
        path = tmp_path / "server.toml"
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write_file


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Catch the configurations that servers would be run with."""
    caught: list[tuple[Any, ...]] = []

    def run_server(*configs: Any, **options: Any) -> int:
        caught.append(configs)
        return 0

    monkeypatch.setattr("vllm_mlx.server.serving.run_server", run_server)
    monkeypatch.setattr("vllm_mlx.cli.announce.announce_if_local", lambda model, engine: None)
    monkeypatch.setattr("vllm_mlx.cli.logs.configure_logging", lambda level, log_format: None)
    return caught


def test_every_kind_of_value_arrives(served: list[tuple[Any, ...]], write: Write) -> None:
    """Strings, numbers, switches with and without a negative, and lists."""
    path = write(
        """
        model = "my/model"
        port = 8081
        default-temperature = 0.5
        max_body_mb = 2
        api-key = ["one", "two words"]
        allowed-hosts = "mine.example"
        strict-fields = true
        continuous-batching = false
        prefix-cache = false
        dtype = "float16"
        """
    )
    assert main(["serve", "--config", path]) == 0
    server, model, engine = served[0]
    assert (model.model, model.dtype) == ("my/model", "float16")
    assert server.port == 8081
    assert server.default_temperature == 0.5
    assert server.max_body_bytes == 2 * 2**20
    assert server.api_keys == ("one", "two words")
    assert server.allowed_hosts == ("mine.example",)
    assert server.strict_fields
    assert (engine.max_num_seqs, engine.prefix_cache) == (1, False)


def test_the_command_line_wins_then_the_environment_then_the_file(
    served: list[tuple[Any, ...]], write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each place gives way to the ones before it."""
    path = write('port = 1\nmax-queue = 1\nserved-model-name = "file"\nmodel = "file"')
    monkeypatch.setenv("VLLM_MLX_PORT", "2")
    monkeypatch.setenv("VLLM_MLX_MAX_QUEUE", "2")
    monkeypatch.setenv("VLLM_MLX_CONFIG", path)
    assert main(["serve", "argument", "--port", "3"]) == 0
    server: ServerConfig = served[0][0]
    assert (server.port, server.max_queue, server.served_model_name) == (3, 2, "file")
    assert served[0][1].model == "argument"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("prt = 1\nother = 2", "no options: prt (did you mean port?), other"),
        ('config = "x"', "no options: config"),
        ("print-config = true", "no options: print-config"),
        ("[server]\nport = 1", "no options: server"),
        ("port = ", "is not TOML"),
        ("port = 80.5", "'80.5' is not a valid integer"),
        ("port = 99999", "99999 is not in the range"),
        ("port = true", "port must be a string or a number"),
        ("port = [1]", "port must be a string or a number"),
        ("port = 2020-01-01", "port must be a string or a number"),
        ('strict-fields = "yes"', "strict-fields must be true or false"),
        ("api-key = [1]", "api-key must be a string or a list of strings"),
        ('dtype = "int3"', "'int3' is not one of"),
        ('mcp-config = "x"', "--mcp-config is not in this build yet"),
        ("gpu-memory-utilization = 0.9", "use --kv-memory-mb"),
        ("continuous-batching = false\nmax-num-seqs = 2", "which contradicts --max-num-seqs 2"),
    ],
)
def test_what_cannot_be_is_refused_by_name(
    served: list[tuple[Any, ...]],
    write: Write,
    text: str,
    expected: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Exit code 2, one line, and no server."""
    assert main(["serve", "--config", write(text)]) == 2
    err = capsys.readouterr().err
    assert expected in err
    assert err.count("\n") == 1
    assert served == []


def test_what_is_printed_can_be_read_again_and_holds_no_key(
    served: list[tuple[Any, ...]], write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file that is printed means the same, but for the keys; nothing is served meanwhile."""
    first = ["serve", "my/model", "--default-top-p", "0.5", "--served-model-name", 'a "b"\\ü']
    first += ["--no-prefix-cache", "--allowed-origins", "*", "--max-tokens", "40000"]
    assert main([*first, "--api-key", "secret-key", "--print-config"]) == 0
    assert served == []
    printed = capsys.readouterr().out
    assert "secret-key" not in printed
    assert "# api-key: 1 from command line, not shown" in printed
    assert 'model = "my/model"  # command line' in printed
    assert tomllib.loads(printed)["max-request-tokens"] == 40000
    assert main(["serve", "--config", write(printed)]) == 0
    assert main(first) == 0
    assert served[0] == served[1]


def test_a_wrong_command_line_prints_no_configuration(
    served: list[tuple[Any, ...]], capsys: pytest.CaptureFixture[str]
) -> None:
    """What is printed has been checked as for serving."""
    args = ["--max-tokens", "9", "--max-request-tokens", "5", "--print-config"]
    assert main(["serve", *args]) == 2
    assert capsys.readouterr().out == ""


def test_the_page_is_up_to_date() -> None:
    """docs/configuration.md is what the options generate, and names what is documented by hand."""
    written = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert written == page(), "run python -m vllm_mlx.cli.configuration_page --write"
    assert "| `rate-limit` | `VLLM_MLX_RATE_LIMIT` | integer, x>=0 | `0` |" in written
