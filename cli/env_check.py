"""Ask a running server whether an agent would find there what it needs."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote, urlsplit

import httpx

from vllm_mlx.cli.chat_http import CONNECT_TIMEOUT_S, base_url, connection_errors, error_of
from vllm_mlx.cli.env_agents import Agent, ServedChoice
from vllm_mlx.engine.errors import UnreachableError

#: The names that only Anthropic's route knows.
_AGENT_NAMES = "claude-"


def check_server(
    url: str, agent: Agent, *, model: str | None, api_key: str | None, timeout_s: float
) -> ServedChoice:
    """Return the server and model that `agent` can use; without `model` the one that is served.

    Raises `UnreachableError` for a server that does not answer, or not as one, or that lacks the
    agent's route, and the error that the server answers with.
    """
    root = base_url(url).removesuffix("/v1")
    # A proxy from the environment cannot reach this very machine.
    is_local = urlsplit(root).hostname in ("localhost", "127.0.0.1", "::1")
    with httpx.Client(
        headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
        timeout=httpx.Timeout(timeout_s, connect=CONNECT_TIMEOUT_S),
        trust_env=not is_local,
    ) as client:
        path = "/v1/models"
        if model is not None and not model.startswith(_AGENT_NAMES):
            path = f"/v1/models/{quote(model, safe='/')}"
        served = _served(_get(client, root, path), root)
        with connection_errors(root):
            found = client.options(f"{root}{agent.route}")
        if found.status_code == httpx.codes.NOT_FOUND:
            raise UnreachableError(
                f"the server at {root} has no {agent.route}, which {agent.name} needs"
            )
    context = served.get("max_model_len")
    return ServedChoice(
        root=root,
        model=model or str(served["id"]),
        api_key=api_key,
        context=context if isinstance(context, int) else None,
    )


def _get(client: httpx.Client, root: str, path: str) -> Any:
    with connection_errors(root):
        response = client.get(f"{root}{path}")
    if response.status_code != httpx.codes.OK:
        raise error_of(response, root)
    try:
        return response.json()
    except ValueError as error:
        raise UnreachableError(f"{root}{path} does not answer with JSON") from error


def _served(answer: Any, root: str) -> dict[str, Any]:
    """Return the description of a model from the answer about one, or about all."""
    try:
        model = answer["data"][0] if "data" in answer else answer
        return {**model, "id": model["id"]}
    except (KeyError, TypeError, IndexError) as error:
        raise UnreachableError(f"{root}/v1/models does not answer as an OpenAI server does") from (
            error
        )
