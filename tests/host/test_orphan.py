"""An engine process never outlives the process that started it."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

HERE = Path(__file__).parent


def wait_gone(pid: int, timeout_s: float) -> bool:
    """Say whether a process has ended within the time; a zombie has."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.005)
    return False


#: Commands of the fake engine; only Linux ends a process whose native code keeps the lock.
BUSY = {"stepping": 0, "busy in Python": 3}
if sys.platform == "linux":
    BUSY["holding the lock"] = 6


@pytest.mark.parametrize("command", BUSY.values(), ids=BUSY.keys())
def test_an_engine_dies_with_its_parent(command: int) -> None:
    """After SIGKILL to the parent, which can clean up nothing, the engine is gone in a second."""
    with subprocess.Popen(
        [sys.executable, str(HERE / "lonely_parent.py"), str(command)],
        stdout=subprocess.PIPE,
        text=True,
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert psutil.pid_exists(pid)
        parent.kill()
        parent.wait()
        try:
            assert wait_gone(pid, 1.0)
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):
                psutil.Process(pid).kill()


@pytest.mark.parametrize("unread", [b"", b"not read yet"], ids=["nothing unread", "unread bytes"])
@pytest.mark.parametrize("work", ["sleep", "spin"])
def test_the_sockets_end_ends_the_process(work: str, unread: bytes) -> None:
    """The watch thread sees the end of the socket behind unread bytes and beside a busy thread."""
    ours, theirs = socket.socketpair()
    with subprocess.Popen(
        [sys.executable, str(HERE / "watched_child.py"), str(theirs.fileno()), work],
        stdout=subprocess.PIPE,
        pass_fds=(theirs.fileno(),),
    ) as child:
        theirs.close()
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == b"2\n"
            ours.sendall(unread)
            time.sleep(0.05)
            assert child.poll() is None
            started = time.monotonic()
            ours.close()
            assert child.wait(5.0) == 1
            assert time.monotonic() - started < 0.5
        finally:
            ours.close()
            child.kill()


def test_nothing_here_imports_mlx() -> None:
    """The HTTP process's side of the engine process needs neither mlx nor transformers."""
    code = (
        "import sys, vllm_mlx.engine.host.supervisor, vllm_mlx.engine.host.worker;"
        "heavy = {'mlx', 'mlx_lm', 'transformers', 'numpy', 'quart'} & set(sys.modules);"
        "sys.exit(f'imported: {heavy}' if heavy else 0)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stderr) == (0, "")
