"""The server's configuration, its listening socket and its ready file."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from vllm_mlx.engine.errors import UsageError
from vllm_mlx.server.config import ServerConfig
from vllm_mlx.server.listener import bind, url_of
from vllm_mlx.server.ready_file import ReadyFile


@pytest.mark.parametrize(
    "fields",
    [
        {"port": 70000},
        {"api_keys": ("",)},
        {"api_keys": ("line\nbreak",)},
        {"timeout_s": 0},
        {"timeout_s": float("nan")},
        {"default_max_tokens": 0},
        {"default_max_tokens": 10, "max_request_tokens": 9},
        {"default_temperature": 2.5},
        {"default_temperature": float("nan")},
        {"default_top_p": 0.0},
        {"max_queue": -1},
        {"drain_timeout_s": -1},
        {"stream_interval": 0},
        {"tokenizer_threads": 0},
    ],
)
def test_values_that_cannot_work_are_usage_errors(fields: dict[str, Any]) -> None:
    """Each is refused before anything starts."""
    with pytest.raises(UsageError):
        ServerConfig(**fields)


def test_port_zero_picks_one_and_the_url_says_which() -> None:
    """The URL is one that this machine can open."""
    with bind("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        assert port > 0
        assert url_of(listener) == f"http://127.0.0.1:{port}"
    with bind("0.0.0.0", 0) as listener:
        assert url_of(listener).startswith("http://127.0.0.1:")


def test_a_port_in_use_is_a_usage_error_that_says_what_to_do() -> None:
    """One line, with the flag."""
    with bind("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(UsageError, match=f"port {port} .* in use.*--port"):
            bind("127.0.0.1", port)


def test_an_address_of_another_machine_is_a_usage_error() -> None:
    """So is a name that does not exist."""
    with pytest.raises(UsageError, match="--host"):
        bind("192.0.2.1", 0)
    with pytest.raises(UsageError, match="--host"):
        bind("no such name", 0)


def test_localhost_prefers_the_family_that_every_client_knows() -> None:
    """`localhost` binds IPv4."""
    with bind("localhost", 0) as listener:
        assert listener.family == socket.AF_INET


def test_the_ready_file_is_written_whole_and_removed(tmp_path: Path) -> None:
    """A file left by another run is gone before the server is ready."""
    path = tmp_path / "ready.json"
    path.write_text("stale")
    ready = ReadyFile(str(path))
    ready.prepare()
    assert not path.exists()
    ready.write(url="http://127.0.0.1:5", host="127.0.0.1", port=5, model="demo")
    assert json.loads(path.read_text()) == {
        "url": "http://127.0.0.1:5",
        "host": "127.0.0.1",
        "port": 5,
        "pid": os.getpid(),
        "model": "demo",
    }
    assert list(tmp_path.iterdir()) == [path]
    ready.remove()
    ready.remove()
    assert list(tmp_path.iterdir()) == []


def test_a_ready_file_in_no_folder_is_a_usage_error(tmp_path: Path) -> None:
    """It is found out before a model is loaded."""
    with pytest.raises(UsageError, match="ready file"):
        ReadyFile(str(tmp_path / "nowhere" / "ready.json")).prepare()


def test_the_http_process_never_loads_mlx(demo_model_path: Path) -> None:
    """Serving, templates and tokenizing are imported and used without MLX."""
    script = (
        "import sys; import vllm_mlx.server.serving as serving; from pathlib import Path\n"
        "tokenizer = serving._load_tokenizer(serving.ChatConfig(), Path(sys.argv[1]), False)\n"
        "ids = tokenizer.encode_chat([{'role': 'user', 'content': 'hi'}])\n"
        "assert tokenizer.decode(ids)\n"
        "print([name for name in sys.modules if name.partition('.')[0].startswith('mlx')])\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", script, str(demo_model_path)],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert result.stdout.strip() == "[]"
