"""API keys: who may use the routes, checked in constant time."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

from vllm_mlx.engine.errors import AuthenticationError

#: Liveness, readiness and metrics are for probes and scrapers, which carry no keys.
PUBLIC_PATHS = frozenset({"/health", "/ready", "/metrics"})


class ApiKeys:
    """Hold the keys that open the server, as digests; none at all opens it to everybody."""

    def __init__(self, keys: Iterable[str] = ()) -> None:
        self._digests = tuple(_digest(key) for key in keys)

    def check(self, path: str, authorization: str | None, api_key: str | None) -> str | None:
        """Raise `AuthenticationError` unless one of the two headers opens `path`.

        They are `Authorization: Bearer KEY` and `x-api-key: KEY`. Returns a name for the key that
        opened, from which it cannot be told; None where none was asked for.
        """
        if not self._digests or path in PUBLIC_PATHS:
            return None
        presented = _presented_keys(authorization or "", api_key or "")
        if not presented:
            raise AuthenticationError(
                "missing API key: send it as `Authorization: Bearer KEY` or as `x-api-key: KEY`"
            )
        # Every pair is compared, equal or not: the time taken tells nothing.
        matches = [
            digest
            for key in presented
            for digest in self._digests
            if hmac.compare_digest(_digest(key), digest)
        ]
        if not matches:
            raise AuthenticationError("wrong API key")
        return f"key-{matches[0].hex()[:16]}"


def _presented_keys(authorization: str, api_key: str) -> list[str]:
    scheme, _, credentials = authorization.partition(" ")
    bearer = credentials if scheme.lower() == "bearer" else ""
    return [key for key in (bearer.strip(), api_key.strip()) if key]


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
