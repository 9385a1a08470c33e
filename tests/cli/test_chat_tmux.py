"""Use the chat in a real terminal: keys in, screen out."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
from support.tiny_folder import write_tiny_folder

if TYPE_CHECKING:
    from tests.cli.conftest import ScriptedServer

pytestmark = pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")


class Terminal:
    """Own one tmux server with one window of 100 x 40, and the program in it."""

    def __init__(self, folder: Path, env: dict[str, str]) -> None:
        self._base = ["tmux", "-f", "/dev/null", "-L", f"chat-{uuid.uuid4().hex}"]
        self._folder = folder
        # tmux takes its environment, TMUX_TMPDIR for the socket included, from here.
        self._env = {**env, "TMUX_TMPDIR": str(folder), "TERM": "xterm-256color"}

    def start(self, *args: str) -> None:
        """Run `vllm-mlx` with `args`; its exit code is shown at the end."""
        program = shlex.join([sys.executable, "-m", "vllm_mlx.cli", *args])
        # Ctrl-C reaches the shell, too, which must live to show the exit code.
        shown = "echo EXIT=$?; stty -a | grep -wo -e -echo -e echo; exec sleep 600"
        shell = shlex.join(["sh", "-c", f"trap : INT; {program}; {shown}"])
        size = ["-x", "100", "-y", "40"]
        self._tmux("new-session", "-d", *size, "-c", str(self._folder), shell)

    def keys(self, *keys: str) -> None:
        """Press keys: tmux's names, or text."""
        self._tmux("send-keys", *keys)

    def screen(self) -> str:
        """Return what the screen shows, scrolled-off lines included, without blank lines."""
        lines = self._tmux("capture-pane", "-p", "-S", "-200").splitlines()
        return "\n".join(line.rstrip() for line in lines if line.strip())

    def wait_for(self, text: str, *, count: int = 1, timeout_s: float = 20.0) -> str:
        """Wait until `text` is on the screen `count` times and return the screen."""
        return self.wait_until(lambda screen: screen.count(text) >= count, timeout_s)

    def wait_until(self, holds: Callable[[str], bool], timeout_s: float = 20.0) -> str:
        """Wait until the screen `holds` and return it; fail with the screen otherwise."""
        deadline = time.monotonic() + timeout_s
        while True:
            screen = self.screen()
            if holds(screen):
                return screen
            assert time.monotonic() < deadline, screen
            time.sleep(0.05)

    def program_pid(self) -> int:
        """Return the process id of the chat."""
        shell = int(self._tmux("display-message", "-p", "#{pane_pid}"))
        return psutil.Process(shell).children()[0].pid

    def close(self) -> None:
        """End the terminal and what runs in it."""
        subprocess.run([*self._base, "kill-server"], env=self._env, check=False)

    def _tmux(self, *args: str) -> str:
        done = subprocess.run(
            [*self._base, *args], env=self._env, check=True, capture_output=True, text=True
        )
        return done.stdout


@pytest.fixture
def terminal(tmp_path: Path, cli_env: dict[str, str]) -> Iterator[Terminal]:
    """Give a terminal of its own."""
    opened = Terminal(tmp_path, cli_env)
    yield opened
    opened.close()


def start_chat(terminal: Terminal, server: ScriptedServer) -> None:
    """Start a chat with the scripted server and wait for its prompt."""
    terminal.start("chat", "--url", server.url)
    terminal.wait_until(lambda screen: "scripted-model is ready" in screen and screen[-1] == ">")


def test_a_conversation(terminal: Terminal, server: ScriptedServer, tmp_path: Path) -> None:
    """Lines, blocks, saving, loading, statistics and leaving work as typed."""
    start_chat(terminal, server)
    terminal.keys("Hi", "Enter")
    terminal.wait_until(lambda screen: screen.endswith("Hello from the server.\n>"))
    terminal.keys("one", "M-Enter", "two \\", "Enter", "three", "Enter")
    terminal.wait_for("Hello from the server.", count=2)
    terminal.keys('"""', "Enter", "a", "Enter", 'b"""', "Enter")
    terminal.wait_for("Hello from the server.", count=3)
    asked = [request["messages"][-1]["content"] for request in server.requests]
    assert asked == ["Hi", "one\ntwo \nthree", "a\nb"]
    terminal.keys("/save chat.json", "Enter", "/clear", "Enter", "/load chat.json", "Enter")
    terminal.wait_for("Loaded 6 messages from chat.json.")
    assert len(json.loads((tmp_path / "chat.json").read_text())["messages"]) == 6
    terminal.keys("/load nowhere.json", "Enter")
    terminal.wait_for("Error: cannot read nowhere.json")
    terminal.keys("/stats", "Enter")
    terminal.wait_for("Session: 3 answers, 21 prompt tokens, 15 generated")
    terminal.keys("Up", "Up", "Up")
    terminal.wait_until(lambda screen: screen.endswith("> /load chat.json"))
    terminal.keys("C-c", "C-d")
    assert "EXIT=0" in terminal.wait_for("EXIT=")


def test_ctrl_c(terminal: Terminal, server: ScriptedServer) -> None:
    """Ctrl-C ends the answer, then clears the line, and twice at an empty prompt leaves."""
    start_chat(terminal, server)
    server.words = ["word "] * 1000
    server.delay_s = 0.02
    terminal.keys("Talk", "Enter")
    terminal.wait_for("word word")
    terminal.keys("C-c")
    terminal.wait_until(lambda screen: "(stopped)" in screen and screen.endswith("\n>"))
    assert server.disconnected.wait(5)
    server.words = ["Back."]
    terminal.keys("never sent", "C-c")
    terminal.wait_for("Ctrl-C again, or Ctrl-D, leaves.")
    terminal.keys("And?", "Enter")
    # Before the prompt is there again, Ctrl-C would still stop the answer.
    terminal.wait_until(lambda screen: "Back." in screen and screen.endswith("\n>"))
    assert [message["role"] for message in server.requests[-1]["messages"]] == [
        "user",
        "assistant",
        "user",
    ]
    terminal.keys("C-c")
    terminal.wait_for("Ctrl-C again, or Ctrl-D, leaves.", count=2)
    terminal.keys("C-c")
    screen = terminal.wait_for("EXIT=")
    assert "EXIT=0" in screen
    terminal.wait_until(lambda screen: screen.endswith("\necho"))


def test_a_server_that_dies_does_not_end_the_chat(
    terminal: Terminal, server: ScriptedServer
) -> None:
    """The error is shown, the question is there again, and SIGTERM leaves the terminal sane."""
    start_chat(terminal, server)
    server.words = ["part"]
    server.error_event = {"error": {"message": "the engine died", "code": "engine_died"}}
    terminal.keys("Hi", "Enter")
    terminal.wait_for("Error: the engine died")
    server.close()
    terminal.keys("Still there?", "Enter")
    terminal.wait_for("Error: no server answers at")
    terminal.wait_until(lambda screen: screen.endswith("> Still there?"))
    os.kill(terminal.program_pid(), 15)
    screen = terminal.wait_for("EXIT=")
    assert "EXIT=143" in screen
    terminal.wait_until(lambda screen: screen.endswith("\necho"))


def test_a_model_in_this_process(terminal: Terminal, tmp_path: Path, demo_model_path: Path) -> None:
    """A real engine streams, stops in the middle of an answer, and ends cleanly at SIGTERM."""
    folder = tmp_path / "model"
    folder.mkdir()
    write_tiny_folder(folder, demo_model_path)
    terminal.start("chat", str(folder), "--max-tokens", "8000", "--seed", "1")
    screen = terminal.wait_until(
        lambda screen: "is ready" in screen and screen[-1] == ">", timeout_s=60
    )
    assert "KV" in screen
    terminal.keys("Hi", "Enter")
    time.sleep(1.5)
    terminal.keys("C-c")
    terminal.wait_until(lambda screen: "(stopped)" in screen and screen.endswith("\n>"))
    terminal.keys("/save chat.json", "Enter", "Again", "Enter")
    terminal.wait_for("Saved 2 messages")
    answer = json.loads((tmp_path / "chat.json").read_text())["messages"][1]
    assert answer["role"] == "assistant"
    assert answer["content"]
    time.sleep(0.5)
    os.kill(terminal.program_pid(), 15)
    assert "EXIT=143" in terminal.wait_for("EXIT=")
    terminal.wait_until(lambda screen: screen.endswith("\necho"))


@pytest.mark.slow
def test_the_demo_model_in_this_process(terminal: Terminal, demo_model_path: Path) -> None:
    """The demo model streams, stops at Ctrl-C, answers the next question, and leaves at Ctrl-D."""
    terminal.start("chat", str(demo_model_path), "--temperature", "0")
    terminal.wait_until(lambda screen: "is ready" in screen and screen[-1] == ">", timeout_s=100)
    terminal.keys("Write a long story about a dog.", "Enter")
    terminal.wait_for("Once upon", timeout_s=60)
    terminal.keys("C-c")
    terminal.wait_until(lambda screen: "(stopped)" in screen and screen.endswith("\n>"), 30)
    terminal.keys("/clear", "Enter", "What is the capital of France?", "Enter")
    terminal.wait_for("Paris", timeout_s=60)
    terminal.wait_until(lambda screen: screen.endswith("\n>"), 60)
    terminal.keys("C-d")
    assert "EXIT=0" in terminal.wait_for("EXIT=")
