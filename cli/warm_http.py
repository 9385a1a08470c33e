"""Have a running server warm prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

import httpx

from vllm_mlx.cli.chat_http import CONNECT_TIMEOUT_S, base_url, connection_errors, error_of
from vllm_mlx.cli.warm_report import OnDone, WarmCounts
from vllm_mlx.engine.errors import InvalidRequestError, UnreachableError
from vllm_mlx.server.warm_prompts import WarmPrompt


def warm_by_server(
    url: str,
    prompts: Sequence[WarmPrompt],
    *,
    model: str | None,
    api_key: str | None,
    timeout_s: float,
    counts: WarmCounts,
    on_done: OnDone,
) -> None:
    """Send prompts one by one, and add what the server counts, and its failures, to `counts`.

    `timeout_s` is for each prompt; `on_done` is called with how many are done. Raises
    `UnreachableError`, or the error that the server answers with where it concerns all prompts.
    """
    root = base_url(url)
    # A proxy from the environment cannot reach this very machine.
    is_local = urlsplit(root).hostname in ("localhost", "127.0.0.1", "::1")
    with httpx.Client(
        headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
        timeout=httpx.Timeout(timeout_s, connect=CONNECT_TIMEOUT_S),
        trust_env=not is_local,
    ) as client:
        for number, prompt in enumerate(prompts, start=1):
            body: dict[str, Any] = {"prompts": [dict(prompt.fields)]}
            if model is not None:
                body["model"] = model
            with connection_errors(root):
                response = client.post(f"{root}/cache/warm", json=body)
            _add(counts, response, root, prompt.where)
            on_done(number)


def _add(counts: WarmCounts, response: httpx.Response, url: str, where: str) -> None:
    """Add one answer to the counts; a prompt that is wrong is a failure of its own."""
    if response.status_code == httpx.codes.NOT_FOUND and not _is_about_model(response):
        raise UnreachableError(f"the server at {url} cannot warm prompts: it has no /cache/warm")
    if response.status_code != httpx.codes.OK:
        error = error_of(response, url)
        if not isinstance(error, InvalidRequestError):
            raise error
        counts.failures.append(f"{where}: {error.message}")
        return
    try:
        answer = response.json()
        counts.stored += int(answer["count"]) - int(answer["skipped"])
        counts.skipped += int(answer["skipped"])
        counts.too_short += int(answer["too_short"])
        counts.computed_tokens += int(answer["computed_tokens"])
        # The server knows the prompt by its place in the body.
        for failure in answer["failures"]:
            counts.failures.append(f"{where}: {str(failure).partition(': ')[2]}")
    except (ValueError, KeyError, TypeError) as error:
        raise UnreachableError(f"{url}/cache/warm does not answer as it should") from error


def _is_about_model(response: httpx.Response) -> bool:
    """Say whether a 404 is about the model rather than the route."""
    try:
        return bool(response.json()["error"]["code"] == "model_not_found")
    except (ValueError, KeyError, TypeError):
        return False
