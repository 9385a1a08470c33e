"""End this process when the process that started it has died, whatever the main thread does."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket
import sys
import threading
import time

#: Nobody reads it: the parent is dead.
EXIT_ORPHANED = 1

#: Where `poll` wakes for data as well, the pause that keeps this thread from spinning.
_PAUSE_S = 0.02
#: How often to look for a new parent, as when another process still holds the socket's other end.
_LOOK_MS = 250
_PR_SET_PDEATHSIG = 1


def watch_parent(sock: socket.socket) -> None:
    """Start a daemon thread that ends this process when the peer of `sock` is gone.

    `sock` must be non-blocking and stay open for the life of the process. The thread only looks:
    it never takes a byte that the main thread is to read. It needs the GIL
    for an instant, so the process ends within milliseconds unless a native call keeps the lock;
    on Linux the kernel is asked as well, and kills without it.
    """
    parent = os.getppid()
    _ask_kernel()
    thread = threading.Thread(target=_watch, args=(sock, parent), name="parent-watch", daemon=True)
    thread.start()


def _watch(sock: socket.socket, parent: int) -> None:
    poller = select.poll()
    # Not for data: a hang-up behind bytes that a busy main thread has not read must be seen too.
    poller.register(sock, select.POLLHUP | getattr(select, "POLLRDHUP", 0))
    gone = select.POLLHUP | select.POLLERR | getattr(select, "POLLRDHUP", 0)
    while True:
        events = poller.poll(_LOOK_MS)
        if any(mask & gone for _, mask in events) or os.getppid() != parent or _is_ended(sock):
            os._exit(EXIT_ORPHANED)
        if events:
            time.sleep(_PAUSE_S)


def _is_ended(sock: socket.socket) -> bool:
    """Say whether the next thing to read is the end of the stream."""
    try:
        return not sock.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True


def _ask_kernel() -> None:
    """Have Linux kill this process when the thread that started it ends."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
