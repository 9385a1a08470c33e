"""One log line a request: what it says to people and to programs, and what it never says."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import TYPE_CHECKING, Any

import pytest

from vllm_mlx.engine.core.outputs import RowTimings
from vllm_mlx.engine.errors import RowFailedError
from vllm_mlx.engine.logs import JsonFormatter

if TYPE_CHECKING:
    from tests.server.conftest import Served, ServerFactory

SECRETS = ("sk-verysecret", "my diary says", "and my answer")


def lines(caplog: pytest.LogCaptureFixture, name: str = "vllm_mlx.access") -> list[Any]:
    """Return what a logger has written, as a program reads it."""
    made = [JsonFormatter().format(record) for record in caplog.records if record.name == name]
    return [json.loads(line) for line in made]


async def answered(server: Served, **timings: float) -> None:
    """Ask once and play the engine."""
    server.engine.is_held = True
    answering = asyncio.create_task(server.chat("abc", n=2))
    while len(server.engine.requests) < 2:
        await server.engine.sleep()
    for request in server.engine.requests:
        end = {"finish_reason": "stop", "timings": RowTimings(**timings)}
        server.engine.put(request.request_id, "xyz", 3, num_cached_tokens=1, **end)
    assert (await answering).status_code == 200


async def test_a_line_has_ids_counts_times_and_outcome(
    make_server: ServerFactory, caplog: pytest.LogCaptureFixture
) -> None:
    """For programs by name, for people in a line; of several rows the sums and the longest."""
    caplog.set_level(logging.INFO)
    server = await make_server()
    await answered(server, queue_s=0.25, prefill_s=0.5, decode_s=0.02)
    (line,) = lines(caplog)
    assert line["request_id"].startswith("chatcmpl-")
    expected = {
        "level": "info",
        "method": "POST",
        "path": "/v1/chat/completions",
        "status": 200,
        "outcome": "success",
        "rows": 2,
        "prompt_tokens": 6,
        "cached_tokens": 2,
        "completion_tokens": 6,
        "finish_reason": "stop",
        "queue_s": 0.25,
        "prefill_s": 0.5,
        "tpot_s": 0.01,
    }
    assert {name: line[name] for name in expected} == expected
    assert 0 <= line["ttft_s"] <= line["duration_s"]
    assert line["request_id"] in line["message"]
    assert " stop prompt=6 cached=2 completion=6 queue=0.250s prefill=0.500s" in line["message"]


async def test_a_refused_request_has_its_code_and_no_counts(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    """What asked nothing of the engine says nothing of rows."""
    caplog.set_level(logging.INFO)
    await served.chat("bad")
    (line,) = lines(caplog)
    assert (line["status"], line["outcome"], line["error"]) == (400, "refused", "invalid_value")
    assert "rows" not in line


async def test_logs_hold_neither_keys_nor_prompts(
    make_server: ServerFactory, caplog: pytest.LogCaptureFixture
) -> None:
    """At debug level, over answers, streams, refusals, faults of ours and wrong keys."""
    caplog.set_level(logging.DEBUG)
    key, prompt, answer = SECRETS
    server = await make_server(api_keys=(key,))
    server.engine.texts = [answer]
    chat = {"messages": [{"role": "user", "content": prompt}], "user": prompt}
    bodies: list[Any] = [
        chat,
        {**chat, "stream": True},
        {**chat, "stop": [prompt], "temperature": prompt},
        {**chat, "tools": prompt},
        {"messages": prompt},
        {"messages": [{"role": prompt, "content": prompt}]},
        [prompt],
    ]
    for body in bodies:
        for headers in (
            {"authorization": f"Bearer {key}"},
            {"x-api-key": f"{key}x"},
            {"authorization": f"Basic {key}"},
        ):
            path = f"/v1/chat/completions?api_key={key}"
            await server.client.post(path, json=body, headers=headers)
    broken = RowFailedError("the row failed")
    server.engine.generate = _raise(broken)  # type: ignore[method-assign]
    headers = {"x-api-key": key}
    assert (await server.client.post(path, json=chat, headers=headers)).status_code == 500
    server.engine.generate = _raise(ZeroDivisionError())  # type: ignore[method-assign]
    assert (await server.client.post(path, json=chat, headers=headers)).status_code == 500
    written = [JsonFormatter().format(record) for record in caplog.records]
    assert len(written) > len(bodies) * 3
    assert [line for line in written for secret in SECRETS if secret in line] == []


def _raise(error: Exception) -> Any:
    def generate(request: Any) -> Any:
        raise error

    return generate


async def test_prompts_are_logged_where_they_are_asked_for(
    make_server: ServerFactory, caplog: pytest.LogCaptureFixture
) -> None:
    """With `--log-prompts` each accepted body is one line under the request's id; keys are not."""
    caplog.set_level(logging.INFO)
    server = await make_server(log_prompts=True, api_keys=("sk-verysecret",))
    content = "my diary\nsays"
    response = await server.client.post(
        "/v1/chat/completions",
        data=json.dumps({"messages": [{"role": "user", "content": content}]}, indent=2),
        headers={"x-api-key": "sk-verysecret"},
    )
    assert response.status_code == 200
    (line,) = lines(caplog, "vllm_mlx.prompts")
    assert line["request_id"] == response.headers["x-request-id"]
    assert json.loads(line["body"])["messages"][0]["content"] == content
    assert len(line["message"].splitlines()) == 1
    assert "sk-verysecret" not in caplog.text
