"""The options of `serve` that say who may use the server, and how much of it."""

from __future__ import annotations

import dataclasses
import os
import stat
from pathlib import Path
from typing import Any

import click

from vllm_mlx.cli.options import Decorator, FiniteRange, option, stacked
from vllm_mlx.cli.pending import env_name

# Written out because the server's configuration is not imported for `--help`; a test holds them
# equal.
MAX_BODY_MB = 32.0
MAX_HEADER_KB = 32

_MIB = 2**20
_KIB = 2**10

access_options: Decorator[Any] = stacked(
    option(
        "--api-key",
        "api_keys",
        multiple=True,
        metavar="KEY",
        show_default=False,
        help="Ask clients for this key; may be given several times. The variable holds keys "
        "divided by spaces, and unlike the flag it does not show in the list of processes.",
    ),
    option(
        "--api-key-file",
        type=click.Path(dir_okay=False, exists=True),
        metavar="FILE",
        help="File with one such key a line, which only you should be able to read.",
    ),
    option(
        "--rate-limit",
        type=click.IntRange(min=0),
        default=0,
        metavar="REQUESTS",
        help="Most requests a minute of one client (its key, or else its address); one more is "
        "refused with 429. 0 does not limit.",
    ),
    option(
        "--allowed-hosts",
        multiple=True,
        metavar="NAME",
        show_default=False,
        help="Name in the URL that requests may be sent to; may be given several times. A server "
        "on a loopback address takes its own only, against DNS rebinding; * takes all.",
    ),
    option(
        "--allowed-origins",
        multiple=True,
        metavar="ORIGIN",
        show_default=False,
        help="Origin, like https://app.example.org, whose web pages may use the server (CORS); "
        "may be given several times; * is all.",
    ),
    option(
        "--max-body-mb",
        type=FiniteRange(min=0, min_open=True),
        default=MAX_BODY_MB,
        metavar="MIB",
        help="Largest request body; a larger one is refused with 413.",
    ),
    option(
        "--max-header-kb",
        type=click.IntRange(min=1),
        default=MAX_HEADER_KB,
        metavar="KIB",
        help="Most headers of a request; more are refused with 431.",
    ),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AccessOptions:
    """Hold the parsed options of `access_options`, by the names of their flags."""

    api_keys: tuple[str, ...]
    api_key_file: str | None
    rate_limit: int
    allowed_hosts: tuple[str, ...]
    allowed_origins: tuple[str, ...]
    max_body_mb: float
    max_header_kb: int

    def all_keys(self) -> tuple[str, ...]:
        """Return the keys of the flags and of the file.

        Raises `UsageError` for an unusable file, and for variables that are set to nothing.
        """
        keys = self.api_keys
        if self.api_key_file is not None:
            keys = (*keys, *read_keys(Path(self.api_key_file)))
        if not keys:
            refuse_blank_variables()
        return keys

    def access_fields(self) -> dict[str, Any]:
        """Return the fields of `ServerConfig` that they become."""
        return {
            "api_keys": self.all_keys(),
            "rate_limit": self.rate_limit,
            "allowed_hosts": self.allowed_hosts,
            "allowed_origins": self.allowed_origins,
            "max_body_bytes": max(1, int(self.max_body_mb * _MIB)),
            "max_header_bytes": self.max_header_kb * _KIB,
        }


def refuse_blank_variables() -> None:
    """Raise `UsageError` if a variable for keys is set and blank, which is a key that was lost."""
    for flag in ("--api-key", "--api-key-file"):
        value = os.environ.get(env_name(flag))
        if value is not None and not value.strip():
            raise click.UsageError(
                f"{env_name(flag)} is set, but holds nothing: give it a value, or unset it for a "
                "server without keys"
            )


def read_keys(path: Path) -> tuple[str, ...]:
    """Return the keys in a file, one a line; warn when others can read it.

    Raises `UsageError` when it cannot be read or holds none: a server must not stand open because
    its keys were lost.
    """
    try:
        text = path.read_text(encoding="utf-8")
        mode = path.stat().st_mode
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise click.UsageError(f"--api-key-file {path} cannot be read: {reason}") from error
    keys = tuple(line.strip() for line in text.splitlines() if line.strip())
    if not keys:
        raise click.UsageError(f"--api-key-file {path} holds no key")
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        click.echo(f"Warning: others may read {path}: chmod 600 {path}", err=True)
    return keys
