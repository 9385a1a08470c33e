"""Fetch a hub repository into the hub's own cache, quickly clear when that cannot be done."""

from __future__ import annotations

import errno
import io
import socket
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from vllm_mlx.engine.config import DEMO_MODEL
from vllm_mlx.engine.errors import HubUnreachableError, ModelLoadError, ModelNotFoundError
from vllm_mlx.engine.models.progress import ProgressCallback

_PATTERNS = (
    "*.json",
    "model*.safetensors",
    # The dense layers that some embedding models have behind their pooling.
    "*_Dense/model.safetensors",
    "*.jinja",
    "tokenizer.model",
    "*.tiktoken",
    "tiktoken.model",
    "*.txt",
)
#: The hub's client has no connect timeout of its own.
_CONNECT_TIMEOUT_S = 1.5
#: How long a hub that took the connection may keep us waiting for the first size of a file.
_ANSWER_TIMEOUT_S = 20.0
_POLL_S = 0.2


def fetch_repository(
    name: str, on_progress: ProgressCallback, *, offline: bool, with_code: bool
) -> Path:
    """Return the snapshot folder of repository `name`, downloaded as far as it is not there.

    Offline (by `offline` or the hub's own HF_HUB_OFFLINE), or when the hub does not answer within
    two seconds, only a complete cached snapshot will do. `with_code` fetches its Python files too.
    Raises HubUnreachableError, ModelNotFoundError (unknown, private or gated) or ModelLoadError.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE or offline:
        return _cached_snapshot(name, with_code, "offline mode is on: run once without it")
    if not _endpoint_answers(constants.ENDPOINT):
        return _cached_snapshot(
            name,
            with_code,
            f"{constants.ENDPOINT} does not answer: check the network, or give a local folder",
        )
    return _download(name, on_progress, with_code)


def _cached_snapshot(name: str, with_code: bool, remedy: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(
            snapshot_download(name, local_files_only=True, allow_patterns=_patterns(with_code))
        )
    except HFValidationError as error:
        raise _bad_name(name) from error
    except LocalEntryNotFoundError as error:
        raise HubUnreachableError(
            f"{name} is not on this machine, and {remedy}{_naming(name)}"
        ) from error


def _download(name: str, on_progress: ProgressCallback, with_code: bool) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    bars = _ByteBars()

    def download() -> str:
        return snapshot_download(
            name, allow_patterns=_patterns(with_code), tqdm_class=bars.bar_class()
        )

    try:
        return Path(
            _run_watched(
                download,
                lambda: on_progress("downloading", bars.fraction()),
                lambda: bars.fraction() is not None,
            )
        )
    except HFValidationError as error:
        raise _bad_name(name) from error
    except GatedRepoError as error:
        raise ModelNotFoundError(
            f"{name} is gated: accept its terms on its hub page, then log in (`hf auth login`) "
            "or set HF_TOKEN"
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelNotFoundError(
            f"no local folder and no hub repository {name}; a private one needs `hf auth login` "
            f"or HF_TOKEN{_naming(name)}"
        ) from error
    except LocalEntryNotFoundError as error:
        raise HubUnreachableError(
            f"{name} is not on this machine, and the hub failed: {_first_line(error)}; try again"
        ) from error
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise ModelLoadError(f"the disk is full: free space for {name}") from error
        raise HubUnreachableError(
            f"downloading {name} failed: {_first_line(error)}; run again to go on where it stopped"
        ) from error
    except Exception as error:
        # Network faults come as classes of whichever HTTP library the hub's client uses.
        if type(error).__module__.split(".")[0] not in ("httpx", "httpx2", "httpcore", "hf_xet"):
            raise
        raise HubUnreachableError(
            f"downloading {name} failed: {_first_line(error)}; run again to go on where it stopped"
        ) from error


def _patterns(with_code: bool) -> list[str]:
    return [*_PATTERNS, "*.py"] if with_code else list(_PATTERNS)


def _naming(name: str) -> str:
    """Return a reminder for a name that is probably mistyped; nearly every repository has a `/`."""
    if "/" in name:
        return ""
    return f". Repositories are named owner/name; {DEMO_MODEL!r} is the one model that needs none"


def _bad_name(name: str) -> ModelNotFoundError:
    return ModelNotFoundError(
        f"{name!r} is neither a local folder nor a repository's name (`owner/name`)"
    )


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _endpoint_answers(endpoint: str) -> bool:
    """Tell within `_CONNECT_TIMEOUT_S` whether the hub, or the proxy to it, takes connections."""
    parts = urlsplit(endpoint)
    proxies = urllib.request.getproxies()
    proxy = proxies.get(parts.scheme) or proxies.get("all")
    if proxy and not urllib.request.proxy_bypass(parts.hostname or ""):
        parts = urlsplit(proxy if "//" in proxy else f"//{proxy}")
    address = (parts.hostname or "", parts.port or (80 if parts.scheme == "http" else 443))
    answered = threading.Event()

    def connect() -> None:
        try:
            socket.create_connection(address, timeout=_CONNECT_TIMEOUT_S).close()
        except OSError:
            return
        answered.set()

    # A thread, because looking up a name has no timeout.
    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(_CONNECT_TIMEOUT_S)
    return answered.is_set()


def _run_watched(
    work: Callable[[], str], watch: Callable[[], None], has_answered: Callable[[], bool]
) -> str:
    """Run `work` in a thread and `watch` in this one until it ends; hand on what it raised.

    Raises HubUnreachableError if `has_answered` stays false for `_ANSWER_TIMEOUT_S`; the thread,
    which then hangs in the client, is left behind and does not keep the process alive.
    """
    results: list[str] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:  # noqa: BLE001 - raised again below, in the calling thread
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    deadline = time.monotonic() + _ANSWER_TIMEOUT_S
    while thread.is_alive():
        watch()
        thread.join(_POLL_S)
        if thread.is_alive() and not has_answered() and time.monotonic() > deadline:
            raise HubUnreachableError("the hub does not answer: try again, or give a local folder")
    if errors:
        raise errors[0]
    return results[0]


class _ByteBars:
    """Follow the hub client's progress bars, which it draws in several threads."""

    def __init__(self) -> None:
        self._bars: list[Any] = []

    def bar_class(self) -> Any:
        """Return a bar class that draws nothing and is known here."""
        from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]

        bars = self._bars

        class SilentBar(tqdm):
            def __init__(self, *args: Any, **options: Any) -> None:
                # A disabled bar counts nothing, so it draws to nowhere instead.
                super().__init__(  # type: ignore[no-untyped-call]
                    *args, **{**options, "file": _Nowhere(), "disable": False}
                )
                if options.get("unit") == "B":
                    bars.append(self)

        return SilentBar

    def fraction(self) -> float | None:
        """Return the downloaded part, None before any size is known."""
        parts = [bar.n / bar.total for bar in self._bars if bar.total]
        return min(1.0, max(parts)) if parts else None


class _Nowhere(io.TextIOBase):
    """Swallow what is written."""

    def write(self, text: str) -> int:
        return len(text)
