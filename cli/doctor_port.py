"""Look whether a server could listen on a port of this machine, and who does if not."""

from __future__ import annotations

import socket

import httpx
import msgspec

_HOST = "127.0.0.1"
_TIMEOUT_S = 1.0


class PortState(msgspec.Struct, frozen=True, kw_only=True):
    """Say whether a port is free; `used_by` is who answers there otherwise."""

    port: int
    is_free: bool
    used_by: str | None = None


def look_at_port(port: int) -> PortState:
    """Try to bind the port, and ask who answers if that fails."""
    with socket.socket() as listener:
        # As the server itself does: connections that are still closing do not count.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((_HOST, port))
        except OSError as error:
            reason = error.strerror or str(error)
        else:
            return PortState(port=port, is_free=True)
    return PortState(port=port, is_free=False, used_by=_who_answers(port) or reason)


def _who_answers(port: int) -> str | None:
    """Return what a server calls itself; None for one that does not answer."""
    try:
        # A proxy from the environment cannot reach this very machine.
        with httpx.Client(timeout=_TIMEOUT_S, trust_env=False) as client:
            response = client.get(f"http://{_HOST}:{port}/health")
    except httpx.HTTPError:
        return None
    try:
        fields = response.json()
    except ValueError:
        fields = None
    if isinstance(fields, dict) and "model_loaded" in fields:
        return "a vllm-mlx server"
    return f"another server ({response.headers.get('server', 'without a name')})"
