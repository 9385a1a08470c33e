"""What is known of a server: is it there, which models, what it counts before and after."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from vllm_mlx.bench.answer import count, error_text, mapping
from vllm_mlx.bench.http_connection import ExchangeError
from vllm_mlx.bench.requester import Reply, Requester
from vllm_mlx.engine.errors import UnreachableError, UsageError

#: Stands for whichever model a server has loaded, where it does not list any.
ANY_MODEL = "default"

_POLL_S = 0.5
#: Names that are listed in an error before it says how many more there are.
_MAX_LISTED = 10


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerInfo:
    """Hold what a server tells about itself; None for what it does not."""

    models: tuple[str, ...]
    server: str | None = None
    version: str | None = None
    device: str | None = None


@dataclasses.dataclass(frozen=True)
class ServerSnapshot:
    """Hold a server's counters at one moment; both are empty where it has none."""

    status: Mapping[str, Any]
    #: Counters of `/metrics`, by name and labels.
    counters: Mapping[str, float]


async def wait_for_server(
    requester: Requester, wait_s: float, on_wait: Callable[[str], None]
) -> ServerInfo:
    """Return what the server says, waiting up to `wait_s` while it cannot be asked yet.

    Raises `UnreachableError`: nobody answers, the key is refused, or it still loads.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + wait_s
    while True:
        problem = "it is not ready"
        try:
            reply = await requester.get("/v1/models")
        except ExchangeError as error:
            if error.kind in ("cut", "invalid"):
                # Somebody is there, whose list of models is broken.
                return await _info(requester, None)
            problem = error.message
        else:
            if reply.status in (401, 403):
                raise UnreachableError(f"the server refuses the key: {_said(reply)}")
            if reply.status != 503:
                return await _info(requester, reply)
            problem = _said(reply)
        if loop.time() >= deadline:
            waited = f" after {wait_s:g} s" if wait_s else "; --wait SECONDS waits for it"
            raise UnreachableError(
                f"cannot measure {requester.client.address.url}: {problem}{waited}"
            )
        on_wait(problem)
        await asyncio.sleep(min(_POLL_S, max(0.0, deadline - loop.time())))


def choose_model(info: ServerInfo, wanted: str | None) -> str:
    """Return the model to ask for; raises `UsageError` when only the user can tell."""
    if wanted is not None:
        return wanted
    if len(info.models) > 1:
        listed = ", ".join(info.models[:_MAX_LISTED])
        more = len(info.models) - _MAX_LISTED
        rest = f" and {more} more" if more > 0 else ""
        raise UsageError(f"the server has several models; choose with --model: {listed}{rest}")
    return info.models[0] if info.models else ANY_MODEL


async def take_snapshot(requester: Requester) -> ServerSnapshot:
    """Ask `/v1/status` and `/metrics`; a server without them gives an empty snapshot."""
    status: Mapping[str, Any] = {}
    counters: dict[str, float] = {}
    try:
        reply = await requester.get("/v1/status")
        if reply.status == 200:
            status = mapping(reply.json())
        reply = await requester.get("/metrics")
        if reply.status == 200:
            counters = parse_counters(reply.body.decode("utf-8", "replace"))
    except ExchangeError:
        # The measurement stands without it; requests that failed are counted where they are.
        return ServerSnapshot(status, counters)
    return ServerSnapshot(status, counters)


def parse_counters(text: str) -> dict[str, float]:
    """Return the counters (and sums and counts of histograms) of a Prometheus page, by name."""
    from prometheus_client.parser import text_string_to_metric_families

    found: dict[str, float] = {}
    try:
        for family in text_string_to_metric_families(text):
            if family.type not in ("counter", "histogram", "summary"):
                continue
            for sample in family.samples:
                if sample.name.endswith(("_bucket", "_created")) or "quantile" in sample.labels:
                    continue
                labels = ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items()))
                found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    except ValueError:
        # Not in that format: such a page says nothing to us.
        return {}
    return found


def server_columns(before: ServerSnapshot, after: ServerSnapshot) -> dict[str, Any]:
    """Return the server's columns: what its counters grew by, and its memory afterwards."""
    memory = mapping(after.status.get("device")) or mapping(after.status.get("metal"))
    growth = {
        name: value - before.counters.get(name, 0.0)
        for name, value in after.counters.items()
        if value != before.counters.get(name, 0.0)
    }
    return {
        "server_steps": _growth(before, after, "steps_executed"),
        "server_prompt_tokens": _growth(before, after, "total_prompt_tokens"),
        "server_cached_tokens": _growth(before, after, "total_cached_tokens"),
        "server_completion_tokens": _growth(before, after, "total_completion_tokens"),
        "server_preemptions": _growth(before, after, "engine", "preemptions"),
        "server_active_memory_gb": _number(memory.get("active_memory_gb")),
        "server_peak_memory_gb": _number(memory.get("peak_memory_gb")),
        "server_metrics": growth or None,
    }


async def _info(requester: Requester, reply: Reply | None) -> ServerInfo:
    """Read a list of models; one that cannot be read is an empty one, and a request will tell."""
    listed: Any = None
    if reply is not None and reply.status == 200:
        listed = mapping(reply.json()).get("data")
    entries = [mapping(entry) for entry in listed] if isinstance(listed, list) else []
    models = [str(entry["id"]) for entry in entries if entry.get("id")]
    owner = entries[0].get("owned_by") if entries else None
    header = reply.headers.get("server") if reply is not None else None
    status = (await take_snapshot(requester)).status
    return ServerInfo(
        models=tuple(models),
        server=_word(owner) or _word(header),
        version=await _version(requester),
        device=_word(mapping(status.get("device")).get("name")),
    )


async def _version(requester: Requester) -> str | None:
    """Return the server's version as vLLM and Ollama tell it."""
    for path in ("/version", "/api/version"):
        try:
            answer = await requester.get(path)
        except ExchangeError:
            break
        if answer.status == 200 and (found := _word(mapping(answer.json()).get("version"))):
            return found
    return None


def _growth(before: ServerSnapshot, after: ServerSnapshot, *path: str) -> int | None:
    values = []
    for snapshot in (before, after):
        found: Any = snapshot.status
        for name in path:
            found = mapping(found).get(name)
        values.append(count(found))
    if values[0] is None or values[1] is None:
        return None
    return values[1] - values[0]


def _said(reply: Reply) -> str:
    found = reply.json()
    return error_text(found) if found is not None else f"status {reply.status}"


def _word(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


def _number(value: object) -> float | None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if is_number else None  # type: ignore[arg-type]
