"""Hold `chat` in scripts: stdout carries the answer and nothing else."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.cli.conftest import RunCli, ScriptedServer


def test_one_question(run_cli: RunCli, server: ScriptedServer) -> None:
    """-m prints the answer and a line break, without colour or progress."""
    server.words = ["Hello", " ☂\x1b[0m"]
    done = run_cli("chat", "--url", server.url, "-m", "Hi", "--system", "Be brief.", "--seed", "3")
    assert (done.returncode, done.stdout, done.stderr) == (0, "Hello ☂\x1b[0m\n", "")
    sent = server.requests[0]
    assert [message["content"] for message in sent["messages"]] == ["Be brief.", "Hi"]
    assert (sent["seed"], sent["max_tokens"]) == (3, 4096)


def test_a_piped_question(run_cli: RunCli, server: ScriptedServer) -> None:
    """Without -m stdin is the question; with `-m -` it follows what was given."""
    done = run_cli("chat", "--url", server.url, stdin="Line one\n\nline two\n")
    assert (done.returncode, done.stdout) == (0, "Hello from the server.\n")
    done = run_cli("chat", "--url", server.url, "-m", "Sum up:", "-m", "-", stdin="The text\n")
    assert done.returncode == 0
    asked = [request["messages"][-1]["content"] for request in server.requests]
    assert asked == ["Line one\n\nline two", "Sum up:\n\nThe text"]


def test_json(run_cli: RunCli, server: ScriptedServer) -> None:
    """--json prints one object with the answer, the usage, the times and the reason."""
    done = run_cli("chat", "--url", server.url, "-m", "Hi", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    answer = json.loads(done.stdout)
    timings = answer.pop("timings")
    assert answer == {
        "model": "scripted-model",
        "answer": "Hello from the server.",
        "finish_reason": "stop",
        "usage": {
            "prompt_tokens": 7,
            "completion_tokens": 5,
            "total_tokens": 12,
            "cached_tokens": None,
        },
    }
    assert list(timings) == ["ttft_s", "total_s", "tokens_per_s"]
    assert 0 < timings["ttft_s"] <= timings["total_s"]


def test_an_error_in_json_leaves_stdout_empty(run_cli: RunCli, server: ScriptedServer) -> None:
    """A script never reads half an object: an error is a line on stderr and an exit code."""
    server.error_event = {"error": {"message": "it died", "code": "engine_died"}}
    done = run_cli("chat", "--url", server.url, "-m", "Hi", "--json")
    assert (done.returncode, done.stdout, done.stderr) == (5, "", "Error: it died\n")


@pytest.mark.parametrize("stdin", [b"", b"\n \n", b"\xff\xfe"])
def test_questions_that_cannot_be_asked(
    cli_env: dict[str, str], server: ScriptedServer, stdin: bytes
) -> None:
    """Nothing, blanks or bytes that are no text are refused before anything is asked."""
    command = [sys.executable, "-m", "vllm_mlx.cli", "chat", "--url", server.url]
    done = subprocess.run(
        command, input=stdin, capture_output=True, env=cli_env, timeout=30, check=False
    )
    assert (done.returncode, done.stdout) == (2, b"")
    assert done.stderr.count(b"\n") == 1
    assert server.requests == []


def test_a_character_that_stdout_cannot_show(run_cli: RunCli, server: ScriptedServer) -> None:
    """An answer beyond stdout's encoding is shown with a substitute, not ended."""
    server.words = ["a☂b"]
    done = run_cli("chat", "--url", server.url, "-m", "Hi", PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stdout) == (0, "a?b\n")


def test_the_environment_names_server_and_key(run_cli: RunCli, server: ScriptedServer) -> None:
    """VLLM_MLX_URL and VLLM_MLX_API_KEY stand for the options; loading variables do not matter."""
    server.api_key = "secret"
    done = run_cli(
        "chat",
        "-m",
        "Hi",
        VLLM_MLX_URL=server.url,
        VLLM_MLX_API_KEY="secret",
        VLLM_MLX_DTYPE="float32",
        VLLM_MLX_MODEL="for/serve",
    )
    assert (done.returncode, done.stdout) == (0, "Hello from the server.\n")
    assert server.requests[0]["model"] == "scripted-model"


@pytest.mark.thorough
def test_the_demo_model_answers(run_cli: RunCli, demo_model_path: Path) -> None:
    """The real model in this process: the answer on stdout, what was loaded on stderr."""
    cache = str(demo_model_path.parents[1])
    question = ["-m", "What is the capital of France?", "--temperature", "0", "--json"]
    done = run_cli("chat", *question, VLLM_MLX_CACHE_DIR=cache)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert "Paris" in answer["answer"]
    assert (answer["model"], answer["finish_reason"]) == ("demo", "stop")
    assert answer["usage"]["prompt_tokens"] > answer["usage"]["completion_tokens"] > 0
    assert "weights" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.thorough
def test_ctrl_c_while_loading(cli_env: dict[str, str], demo_model_path: Path) -> None:
    """Ctrl-C during loading ends at once with its exit code, whatever the engine's thread does."""
    command = [sys.executable, "-m", "vllm_mlx.cli", "chat", str(demo_model_path), "-m", "Hi"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=cli_env
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        for line in process.stderr:
            if "loading weights" in line:
                break
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=10) == 130
        assert process.stderr.read().splitlines()[-1] == "Error: interrupted"
        assert process.stdout.read() == ""
