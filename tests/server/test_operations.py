"""Health, readiness, status, cancelling, the model list and the tokenizer's routes."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from vllm_mlx.engine.core.stats import (
    DeviceMemory,
    DiskPrefixStats,
    EngineStats,
    PrefixStats,
    RequestStats,
)
from vllm_mlx.engine.errors import EngineDiedError

if TYPE_CHECKING:
    from tests.server.conftest import Served, ServerFactory

#: What an engine in the middle of its work says.
BUSY = EngineStats(
    steps_executed=12,
    num_running=1,
    num_waiting=2,
    kv_bytes=3_000_000,
    memory=DeviceMemory(active_bytes=10**9, peak_bytes=2 * 10**9, cache_bytes=0),
    prefixes=PrefixStats(
        num_blocks=5,
        num_bytes=2_350_000_000,
        hit_tokens=87,
        query_tokens=100,
        num_evicted=3,
        disk=DiskPrefixStats(num_restored=7),
    ),
    requests=(
        RequestStats(
            request_id="chatcmpl-1",
            phase="generation",
            num_prompt_tokens=10,
            num_prefilled_tokens=10,
            num_cached_tokens=4,
            cache_hit_type="prefix",
            num_completion_tokens=30,
            max_tokens=60,
            age_s=3.0,
            ttft_s=1.0,
            generation_s=2.0,
        ),
    ),
)


async def test_health_is_200_whatever_the_engine_does(make_server: ServerFactory) -> None:
    """Liveness says nothing of the model."""
    server = await make_server(load=False)
    server.engine.set(phase="failed")
    response = await server.client.get("/health")
    assert response.status_code == 200
    assert (await response.get_json())["model_loaded"] is False


async def test_not_ready_tells_how_far_loading_is(make_server: ServerFactory) -> None:
    """Readiness and model routes are 503 with when to come again and the progress so far."""
    server = await make_server(load=False)
    server.engine.set(phase="loading", stage="loading weights", fraction=0.25, retry_after_s=7.2)
    ready = await server.client.get("/ready")
    assert (ready.status_code, ready.headers["retry-after"]) == (503, "8")
    body = await ready.get_json()
    assert (body["status"], body["stage"], body["progress"]) == ("loading", "loading weights", 0.25)
    for path in ("/v1/models", "/v1/models/x"):
        response = await server.client.get(path)
        assert response.status_code == 503
    response = await server.chat()
    error = (await response.get_json())["error"]
    assert (response.status_code, response.headers["retry-after"]) == (503, "8")
    assert (error["code"], error["progress"]) == ("engine_unavailable", 0.25)
    assert "loading weights 25%" in error["message"]


async def test_restarting_is_not_ready_though_the_model_was(served: Served) -> None:
    """While the engine restarts, requests get 503 and liveness goes on."""
    served.engine.set(phase="restarting", retry_after_s=2.0)
    assert (await served.client.get("/ready")).status_code == 503
    assert (await served.chat()).status_code == 503
    assert (await served.client.get("/health")).status_code == 200
    served.engine.set(phase="ready")
    assert (await served.chat()).status_code == 200


async def test_status_has_the_documented_fields(served: Served) -> None:
    """All fields of the manual are there, Metal is null elsewhere, the device stands beside it."""
    served.engine.engine_stats = BUSY
    await served.chat("abc")
    status = await (await served.client.get("/v1/status")).get_json()
    expected = {
        "status": "running",
        "model": "org/model",
        "steps_executed": 12,
        "num_running": 1,
        "num_waiting": 2,
        "total_requests_processed": 1,
        "total_prompt_tokens": 3,
        "total_completion_tokens": 2,
        "metal": None,
    }
    assert {name: status[name] for name in expected} == expected
    assert status["uptime_s"] > 0
    assert status["device"]["name"] == "cpu"
    assert status["device"]["active_memory_gb"] == 1.0
    cache = status["cache"]
    assert (cache["type"], cache["entries"], cache["hit_rate"]) == ("block_tree", 5, 0.87)
    assert (cache["memory_mb"], cache["evictions"]) == (2350.0, 3)
    assert cache["ssd"]["num_restored"] == 7
    assert status["engine"]["pid"] == served.engine.state.pid
    assert status["engine"]["blas"] == "libopenblas"
    (request,) = status["requests"]
    assert request["request_id"] == "chatcmpl-1"
    assert request["phase"] == "generation"
    assert request["tokens_per_second"] == 15.0
    assert request["ttft_s"] == 1.0
    assert request["progress"] == 0.5
    assert (request["cache_hit_type"], request["cached_tokens"]) == ("prefix", 4)
    assert (request["generated_tokens"], request["max_tokens"]) == (30, 60)


async def test_status_says_how_old_its_knowledge_is(served: Served) -> None:
    """What the engine said before a long step is not told as if it were so now."""
    served.engine.engine_stats = BUSY
    status = await (await served.client.get("/v1/status")).get_json()
    assert (status["engine"]["answers"], status["engine"]["stats_age_s"]) == (True, 0.0)
    served.engine.engine_stats = msgspec.structs.replace(BUSY, age_s=3.25)
    status = await (await served.client.get("/v1/status")).get_json()
    assert (status["engine"]["answers"], status["engine"]["stats_age_s"]) == (False, 3.25)
    served.engine.set(phase="restarting")
    status = await (await served.client.get("/v1/status")).get_json()
    assert (status["engine"]["answers"], status["engine"]["stats_age_s"]) == (False, None)


async def test_a_request_is_shown_from_the_moment_it_is_accepted(
    make_server: ServerFactory,
) -> None:
    """The engine has not told of it yet: it is queued, under the id that cancels it."""
    server = await make_server()
    server.engine.is_held = True
    server.engine.engine_stats = BUSY
    answering = asyncio.create_task(server.chat("abc", max_tokens=7))
    while not server.engine.requests:
        await server.engine.sleep()
    request_id = server.engine.requests[0].request_id
    status = await (await server.client.get("/v1/status")).get_json()
    assert status["num_waiting"] == BUSY.num_waiting + 1
    told, accepted = status["requests"]
    assert told["request_id"] == "chatcmpl-1"
    expected = {"request_id": request_id, "phase": "queued", "prompt_tokens": 3, "max_tokens": 7}
    assert {name: accepted[name] for name in expected} == expected
    assert accepted["elapsed_s"] >= 0
    row = msgspec.structs.replace(BUSY.requests[0], request_id=request_id)
    server.engine.engine_stats = msgspec.structs.replace(BUSY, requests=(row,))
    status = await (await server.client.get("/v1/status")).get_json()
    assert [request["phase"] for request in status["requests"]] == ["generation"]
    await server.client.delete(f"/v1/requests/{request_id}")
    await answering
    server.engine.engine_stats = EngineStats()
    status = await (await server.client.get("/v1/status")).get_json()
    assert status["requests"] == []


async def test_old_figures_are_told_with_what_came_and_went_since(
    make_server: ServerFactory,
) -> None:
    """A step that takes long hides neither a row that answers nor that another has ended."""
    server = await make_server()
    server.engine.is_held = True
    answering = asyncio.create_task(server.chat("abc", max_tokens=7))
    while not server.engine.requests:
        await server.engine.sleep()
    request_id = server.engine.requests[0].request_id
    # The engine told of another row, which has been read to its end since.
    server.engine.engine_stats = msgspec.structs.replace(BUSY, num_waiting=0, age_s=0.5)
    status = await (await server.client.get("/v1/status")).get_json()
    shown = [(row["request_id"], row["phase"]) for row in status["requests"]]
    assert shown == [(request_id, "queued")]
    assert (status["num_running"], status["num_waiting"]) == (0, 1)
    server.runtime.generations._admission.answered(request_id)
    status = await (await server.client.get("/v1/status")).get_json()
    assert [row["phase"] for row in status["requests"]] == ["generation"]
    assert (status["num_running"], status["num_waiting"]) == (1, 0)
    await server.client.delete(f"/v1/requests/{request_id}")
    await answering
    status = await (await server.client.get("/v1/status")).get_json()
    assert (status["num_running"], status["requests"]) == (0, [])


async def test_status_answers_before_the_model_does(make_server: ServerFactory) -> None:
    """While loading it says so, with the engine's process."""
    server = await make_server(load=False)
    server.engine.set(phase="loading")
    status = await (await server.client.get("/v1/status")).get_json()
    assert (status["status"], status["model"], status["requests"]) == ("not_loaded", None, [])
    server.engine.set(phase="failed", error=EngineDiedError("it died"))
    status = await (await server.client.get("/v1/status")).get_json()
    assert (status["status"], status["engine"]["error"]) == ("stopped", "it died")


@pytest.mark.parametrize("method", ["cancel", "delete"])
async def test_cancelling_ends_a_request_with_what_it_has(
    make_server: ServerFactory, method: str
) -> None:
    """The id that the client knows ends its request; the client gets the text so far."""
    server = await make_server()
    server.engine.is_held = True

    async def cancel() -> int:
        while not server.engine.requests:
            await server.engine.sleep()
        request_id = server.engine.requests[0].request_id
        server.engine.put(request_id, "so far")
        if method == "delete":
            response = await server.client.delete(f"/v1/requests/{request_id}")
        else:
            response = await server.client.post(f"/v1/requests/{request_id}/cancel")
        assert (await response.get_json())["cancelled"] is True
        return int(response.status_code)

    answering = asyncio.create_task(server.chat())
    assert await cancel() == 200
    response = await answering
    (choice,) = (await response.get_json())["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("so far", "abort")
    assert server.runtime.generations.num_open_rows == 0


async def test_a_row_of_a_request_cancels_all_of_it(make_server: ServerFactory) -> None:
    """Ids that the status page shows work too."""
    server = await make_server()
    server.engine.is_held = True
    answering = asyncio.create_task(server.post("/v1/completions", prompt=["a", "b"]))
    while len(server.engine.requests) < 2:
        await server.engine.sleep()
    row_id = server.engine.requests[1].request_id
    response = await server.client.delete(f"/v1/requests/{row_id}")
    assert (await response.get_json())["id"] == row_id.removesuffix("-1")
    choices = (await (await answering).get_json())["choices"]
    assert [c["finish_reason"] for c in choices] == ["abort", "abort"]


async def test_cancelling_what_is_not_open_is_a_404(served: Served) -> None:
    """Made-up ids and ended requests are unknown."""
    ended = (await served.chat()).headers["x-request-id"]
    for request_id in ("chatcmpl-none", ended):
        response = await served.client.delete(f"/v1/requests/{request_id}")
        assert response.status_code == 404
        assert (await response.get_json())["error"]["code"] == "request_not_found"


async def test_models_are_listed_with_their_context(make_server: ServerFactory) -> None:
    """The served name is the id; the context length stands where vLLM's clients look."""
    server = await make_server(served_model_name="my/name")
    listed = await (await server.client.get("/v1/models")).get_json()
    (model,) = listed["data"]
    assert (model["id"], model["max_model_len"]) == ("my/name", 100)
    for name in ("my/name", "default", "org/model", "/models/org--model"):
        response = await server.client.get(f"/v1/models/{name}")
        assert response.status_code == 200, name
        assert (await response.get_json())["id"] == "my/name"
    assert (await server.client.get("/v1/models/my%2Fname")).status_code == 200
    response = await server.client.get("/v1/models/other/one")
    assert response.status_code == 404
    assert (await response.get_json())["error"]["code"] == "model_not_found"


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        ({"prompt": "ab"}, [1, 97, 98]),
        ({"prompt": "ab", "add_special_tokens": False}, [97, 98]),
        ({"messages": [{"role": "user", "content": "ab"}]}, [97, 98]),
    ],
)
async def test_tokenize_shows_prompts_and_chats(
    served: Served, body: dict[str, Any], tokens: list[int]
) -> None:
    """Count, tokens and the context length come back."""
    response = await served.post("/tokenize", **body)
    assert await response.get_json() == {
        "count": len(tokens),
        "max_model_len": 100,
        "tokens": tokens,
        "token_strs": None,
    }


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"prompt": "a", "messages": [{"role": "user", "content": "b"}]},
        {"prompt": "a", "return_token_strs": True},
        {"prompt": "a", "add_generation_prompt": True},
        {"messages": [{"role": "user", "content": "b"}], "add_special_tokens": True},
    ],
)
async def test_tokenize_refuses_what_it_would_ignore(served: Served, body: dict[str, Any]) -> None:
    """Neither, both, and options that belong to the other form are 400s."""
    assert (await served.post("/tokenize", **body)).status_code == 400


async def test_detokenize_is_the_way_back(served: Served) -> None:
    """Tokens become text; ids outside the vocabulary are refused."""
    response = await served.post("/detokenize", tokens=[97, 98])
    assert await response.get_json() == {"prompt": "ab"}
    assert (await served.post("/detokenize", tokens=[0x110000])).status_code == 400
    assert (await served.post("/detokenize", tokens="ab")).status_code == 400
