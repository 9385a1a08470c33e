"""Hold `env` to what agents read: shells, TOML and JSON, and what it asks a server first."""

from __future__ import annotations

import json
import subprocess
import threading
import tomllib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from vllm_mlx.cli.env_agents import AGENTS, ServedChoice
from vllm_mlx.cli.main import main

URL = "http://127.0.0.1:9999"
#: What no shell, TOML or JSON may take apart.
AWKWARD = 'org/it\'s "a" $model & \\ more \N{GRINNING FACE}'


class _Handler(BaseHTTPRequestHandler):
    """Answer as a server with one model that lacks `/v1/responses`, and asks for a key."""

    def log_message(self, format: str, *args: Any) -> None:
        """Keep quiet."""

    def do_GET(self) -> None:
        model = {"id": "org/model", "max_model_len": 40960}
        if self.headers.get("authorization") != "Bearer secret":
            self.answer(401, {"error": {"message": "wrong", "code": "invalid_api_key"}})
        elif self.path == "/v1/models":
            self.answer(200, {"data": [model]})
        elif self.path == "/v1/models/org/model":
            self.answer(200, model)
        else:
            self.answer(404, {"error": {"message": "no such", "code": "model_not_found"}})

    def do_OPTIONS(self) -> None:
        self.answer(404 if self.path == "/v1/responses" else 200, {})

    def answer(self, status: int, body: Any) -> None:
        """Send JSON."""
        payload = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)


@pytest.fixture
def url() -> Iterator[str]:
    """Return the address of such a server."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def printed(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    """Run `env`, which must succeed, and return what it prints."""
    assert main(["env", *args]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("agent", ["claude-code", "qwen-code"])
def test_exports_are_read_by_a_shell_as_they_are_meant(
    agent: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever the names and keys hold; `--json` says the same."""
    args = (agent, "--no-check", "--url", URL, "--model", AWKWARD, "--api-key", "it's; secret")
    text = printed(capsys, *args)
    shell = subprocess.run(
        ["sh", "-c", f"{text}\nenv -0"], capture_output=True, check=True, env={}, timeout=20
    )
    pairs = dict(line.split("=", 1) for line in shell.stdout.decode().split("\0") if line)
    variables = json.loads(printed(capsys, *args, "--json"))["env"]
    assert variables.items() <= pairs.items()
    assert AWKWARD in variables.values()
    assert "it's; secret" in variables.values()


def test_claude_code_uses_one_model_for_all_that_it_does(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """No other host, no other model, and no other key."""
    variables = json.loads(printed(capsys, "claude-code", "--no-check", "--json"))["env"]
    assert variables["ANTHROPIC_BASE_URL"] == "http://127.0.0.1:8000"
    assert (variables["ANTHROPIC_AUTH_TOKEN"], variables["ANTHROPIC_API_KEY"]) == (
        *("not-needed", ""),
    )
    models = {value for name, value in variables.items() if name.endswith("_MODEL")}
    assert models == {"default"}
    assert sum(name.endswith("_MODEL") for name in variables) == 6


def test_the_files_of_codex_and_opencode_are_what_they_read() -> None:
    """The address, the model and the context; the key is named and not written."""
    choice = ServedChoice(URL, AWKWARD, "secret", 40960)
    setup = AGENTS["codex"].set_up(choice)
    assert setup.file is not None
    config = tomllib.loads(setup.file[1])
    provider = config["model_providers"][config["model_provider"]]
    assert (config["model"], config["model_context_window"]) == (AWKWARD, 40960)
    assert provider["base_url"] == f"{URL}/v1"
    assert provider["env_key"] in setup.variables
    setup = AGENTS["opencode"].set_up(choice)
    assert setup.file is not None
    assert "secret" not in setup.file[1]
    config = json.loads(setup.file[1])
    name, _, model = config["model"].partition("/")
    provider = config["provider"][name]
    assert provider["options"]["baseURL"] == f"{URL}/v1"
    assert provider["models"][model]["limit"]["context"] == 40960
    without_key = AGENTS["opencode"].set_up(ServedChoice(URL, "x"))
    assert without_key.file is not None
    assert (without_key.variables, "apiKey" in without_key.file[1]) == ({}, False)


@pytest.mark.parametrize("agent", AGENTS)
def test_a_running_server_is_asked_first(
    agent: str, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """It gives the model's name and its context, or the agent is told what is missing."""
    args = ["env", agent, "--url", url, "--api-key", "secret", "--json"]
    if agent == "codex":
        assert main(args) == 5
        assert "has no /v1/responses, which Codex needs" in capsys.readouterr().err
        return
    assert main(args) == 0
    text = capsys.readouterr().out
    assert "org/model" in text
    assert agent == "qwen-code" or "40960" in text


@pytest.mark.parametrize(
    ("args", "code", "reason"),
    [
        (["--url", "http://127.0.0.1:9"], 5, "no server answers at http://127.0.0.1:9"),
        (["--url", "ftp://x"], 2, "is not a server's address"),
        (["--api-key", "wrong"], 2, "give the server's key with --api-key"),
        (["--api-key", "secret", "--model", "other"], 2, "no such"),
    ],
)
def test_what_an_agent_would_stumble_over_is_said_before(
    url: str, args: list[str], code: int, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """With an exit code for scripts, and nothing on stdout that a shell would read."""
    given = args if "--url" in args else ["--url", url, *args]
    assert main(["env", "claude-code", *given]) == code
    captured = capsys.readouterr()
    assert (captured.out, reason in captured.err) == ("", True)


def test_names_of_anthropics_models_need_not_be_listed(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The Messages route knows them all."""
    args = ("claude-code", "--url", url, "--api-key", "secret", "--model", "claude-opus-9")
    assert "ANTHROPIC_MODEL=claude-opus-9" in printed(capsys, *args)
