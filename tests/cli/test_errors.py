"""Hold every error to one line on stderr and the right exit code."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click
import pytest

from vllm_mlx.cli.errors import (
    EXIT_CODES,
    ExitCode,
    OutputClosedError,
    TerminatedError,
    error_line,
    exit_code,
)
from vllm_mlx.cli.main import main
from vllm_mlx.engine.errors import ModelLoadError, UnreachableError, error_classes

if TYPE_CHECKING:
    from tests.cli.conftest import RunCli, ScriptedServer


def test_every_error_of_the_tree_has_an_exit_code() -> None:
    """Each class is mapped by name, so that a new one needs a decision."""
    assert set(error_classes().values()) - set(EXIT_CODES) == set()


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (click.UsageError("x"), ExitCode.USAGE),
        (click.FileError("x"), ExitCode.USAGE),
        (KeyboardInterrupt(), ExitCode.INTERRUPTED),
        (click.Abort(), ExitCode.INTERRUPTED),
        (TerminatedError(), ExitCode.TERMINATED),
        (OutputClosedError(), ExitCode.OUTPUT_CLOSED),
        (ValueError("x"), ExitCode.INTERNAL),
    ],
)
def test_errors_that_are_not_of_the_tree(error: BaseException, expected: ExitCode) -> None:
    """Errors of click, signals and defects have exit codes, too."""
    assert exit_code(error) is expected


def test_a_subclass_takes_the_code_of_its_parent() -> None:
    """A class that a test or an extension derives is mapped like its parent."""

    class LocalError(ModelLoadError):
        code = "model_load_failed"

    assert exit_code(LocalError("x")) is ExitCode.MODEL


def test_an_error_is_one_line_without_control_characters() -> None:
    """Line breaks become spaces, and what could drive a terminal is dropped."""
    assert error_line(UnreachableError("a\n  b\x1b[31mc")) == "Error: a b[31mc"


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["serve", "--port", "70000"], "--port"),
        (["serve", "--timeout", "nan"], "nan is not a finite number"),
        (["serve", "--timeout", "0"], "--timeout"),
        (["serve", "--default-temperature", "2.5"], "--default-temperature"),
        (["serve", "--api-key", ""], "API key must not be empty"),
        (["serve", "one", "two"], "unexpected extra argument (two)"),
        (["serve", "--no-such-flag"], "--no-such-flag"),
        (["serve", "--gpu-memory-utilization", "0.9"], "--kv-memory-mb"),
        (["sevre"], "No such command 'sevre'"),
        (["chat", "-m", " "], "the question is empty"),
        (["chat", "--api-key", "k", "-m", "x"], "--api-key needs --url"),
        (["chat", "--url", "u", "--dtype", "float32"], "--dtype cannot be used with --url"),
        (["chat", "--url", "ftp://host", "-m", "x"], "'ftp://host' is not a server's address"),
    ],
)
def test_usage_errors(args: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A wrong command line exits 2 with one line that names what is wrong."""
    code = main(args)
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert err.startswith("Error: ")
    assert err.count("\n") == 1
    assert expected in err


def test_a_pending_flag_is_refused_from_the_environment_too(run_cli: RunCli) -> None:
    """A variable of a flag that is not built is not ignored."""
    done = run_cli("serve", VLLM_MLX_MODELS_CONFIG="models.toml")
    assert done.returncode == 2
    assert "--models-config is not in this build yet" in done.stderr


def test_an_unreachable_server_exits_5(run_cli: RunCli, server: ScriptedServer) -> None:
    """A server that is not there is one line that says what to do."""
    url = server.url
    server.close()
    done = run_cli("chat", "--url", url, "-m", "x")
    assert (done.returncode, done.stdout) == (5, "")
    assert done.stderr == (
        f"Error: no server answers at {url}/v1; start one with 'vllm-mlx serve', or check --url\n"
    )


def test_an_address_that_cannot_be_had_is_the_whole_answer(run_cli: RunCli, tmp_path: Path) -> None:
    """What would be loaded is not told of a server that will not be."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        in_use = run_cli("serve", "--port", str(port))
    no_folder = run_cli("serve", "--port", "0", "--ready-file", str(tmp_path / "none" / "ready"))
    for done, expected in ((in_use, f"port {port}"), (no_folder, "ready file")):
        assert (done.returncode, done.stdout) == (2, "")
        (line,) = done.stderr.splitlines()
        assert line.startswith("Error: ")
        assert expected in line


def test_a_missing_model_exits_3(run_cli: RunCli) -> None:
    """A path that does not exist is one line, for `chat` and for `serve`."""
    for command in (["chat", "./nowhere", "-m", "x"], ["serve", "./nowhere", "--port", "0"]):
        done = run_cli(*command)
        assert (done.returncode, done.stdout) == (3, "")
        assert done.stderr.splitlines()[-1] == "Error: no model folder nowhere: check the path"


def test_without_a_backend_exits_3(cli_env: dict[str, str], demo_model_path: Path) -> None:
    """Where MLX cannot be imported, the last line says what to install."""
    program = (
        "import sys; sys.modules['mlx.core'] = None; from vllm_mlx.cli.main import main;"
        "sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", program, "chat", str(demo_model_path), "-m", "x"]
    done = subprocess.run(
        command, capture_output=True, text=True, env=cli_env, check=False, timeout=60
    )
    assert (done.returncode, done.stdout) == (3, "")
    last = done.stderr.splitlines()[-1]
    assert last.startswith("Error: MLX is installed but cannot be imported")
    assert "pip install" in last


def test_a_model_that_does_not_fit_exits_3(run_cli: RunCli, demo_model_path: Path) -> None:
    """Too little memory is found before anything is loaded or listened to."""
    done = run_cli("serve", str(demo_model_path), "--port", "0", "--kv-memory-mb", "99999999")
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.splitlines()[-1].startswith("Error: a KV budget of 95.4 TiB does not fit")


def test_a_defect_exits_70_and_shows_its_traceback_only_if_asked(cli_env: dict[str, str]) -> None:
    """An exception that nobody expected is one line, and with -v a traceback before it."""
    program = (
        "import sys; from vllm_mlx.cli import main, chat_once;"
        "chat_once.read_question = lambda parts: 1 / 0;"
        "sys.exit(main.main(sys.argv[1:]))"
    )
    for flags, num_tracebacks in (([], 0), (["-v"], 1)):
        command = [sys.executable, "-c", program, *flags, "chat", "-m", "x"]
        done = subprocess.run(
            command, capture_output=True, text=True, env=cli_env, check=False, timeout=30
        )
        assert done.returncode == 70
        assert done.stderr.count("Traceback") == num_tracebacks
        last = done.stderr.splitlines()[-1]
        assert last.startswith("Error: internal error: ZeroDivisionError: division by zero")


@pytest.mark.parametrize(
    ("number", "code", "line"),
    [
        (signal.SIGINT, 130, "Error: interrupted"),
        (signal.SIGTERM, 143, "Error: terminated"),
    ],
)
def test_signals_end_a_running_answer(
    cli_env: dict[str, str], server: ScriptedServer, number: int, code: int, line: str
) -> None:
    """Ctrl-C and SIGTERM during an answer exit with their codes and close the stream."""
    server.words = ["word "] * 200
    server.delay_s = 0.05
    command = [sys.executable, "-m", "vllm_mlx.cli", "chat", "--url", server.url, "-m", "x"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=cli_env
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(5) == "word "
        process.send_signal(number)
        errors = process.stderr.read()
        assert process.wait(timeout=10) == code
    assert errors.strip() == line


def test_a_closed_stdout_ends_quietly(cli_env: dict[str, str], server: ScriptedServer) -> None:
    """`vllm-mlx chat | head` ends without a message or a failed gate's exit code."""
    server.words = ["word "] * 200
    server.delay_s = 0.02
    command = [sys.executable, "-m", "vllm_mlx.cli", "chat", "--url", server.url, "-m", "x"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=cli_env
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(5)
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(timeout=10) == 141
