"""Which host names a request may be sent to, so that no web page reaches a server by rebinding.

A page of evil.example may have its name resolve to 127.0.0.1 and then counts, for the browser, as
of one origin with this server. The name in the Host header gives it away; an address never does,
because the attack needs a name.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable

from vllm_mlx.engine.errors import HostNotAllowedError

#: Accepts every name.
ANY_HOST = "*"

_LOCAL_NAME = "localhost"


class HostCheck:
    """Know the names that this server goes by.

    Those in `allowed`, the name that it is bound to, localhost and every address. Without `allowed`
    a server that other machines can reach goes by every name.
    """

    def __init__(self, bound: str, allowed: Iterable[str] = ()) -> None:
        names = {name.lower().rstrip(".") for name in allowed}
        self._allows_any = ANY_HOST in names or (not names and not is_loopback(bound))
        self._names = names | {bound.lower()}

    def check(self, header: str | None) -> None:
        """Raise `HostNotAllowedError` unless the Host header names this server."""
        if self._allows_any or header is None:
            return
        name = _name_in(header)
        if name in self._names or _is_local(name) or _is_address(name):
            return
        raise HostNotAllowedError(
            f"this server does not go by the name {name[:100]!r}; "
            "--allowed-hosts says which names it has"
        )


def is_loopback(host: str) -> bool:
    """Say whether `host` can be reached from this machine only."""
    if _is_local(host.lower()):
        return True
    return _is_address(host) and ipaddress.ip_address(host).is_loopback


def _name_in(header: str) -> str:
    """Return the lower-case name of a Host header, without its port and brackets."""
    header = header.strip().lower()
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.partition(":")[0].rstrip(".")


def _is_local(name: str) -> bool:
    return name == _LOCAL_NAME or name.endswith("." + _LOCAL_NAME)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
