"""The listening socket, bound before anything slow begins."""

from __future__ import annotations

import errno
import socket

from vllm_mlx.engine.errors import UsageError


def bind(host: str, port: int) -> socket.socket:
    """Bind a listening socket; port 0 lets the system choose.

    Raises `UsageError`, with what to do, when the address cannot be had.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise UsageError(f"cannot listen on {host}: {error.strerror}; check --host") from error
    # `localhost` means both families: the older one is what clients try that know only one.
    family, _, _, _, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # Accepted connections inherit it: a client that vanished is noticed in the end.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        listener.bind(address)
        # Binding alone lets two servers have one port: only listening finds it taken.
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise UsageError(_advice(host, port, error)) from error
    listener.setblocking(False)
    return listener


def url_of(listener: socket.socket) -> str:
    """Return the URL under which this machine reaches `listener`."""
    host, port = listener.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1" if host == "0.0.0.0" else "::1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _advice(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} on {host} is in use; choose another with --port (0 picks a free one)"
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"not allowed to listen on {host} port {port}; choose a --port above 1023"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"this machine has no address {host}; check --host"
    return f"cannot listen on {host} port {port}: {error.strerror}"
