"""Watch the peer of an inherited socket while the main thread does something else for ever."""

from __future__ import annotations

import socket
import sys
import threading
import time

from vllm_mlx.engine.host import parent_watch

sock = socket.socket(fileno=int(sys.argv[1]))
sock.setblocking(False)
# Without the kernel's help, which other systems do not give.
parent_watch._ask_kernel = lambda: None
parent_watch.watch_parent(sock)
print(threading.active_count(), flush=True)  # noqa: T201
if sys.argv[2] == "spin":
    while True:
        pass
time.sleep(600)
