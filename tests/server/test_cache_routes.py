"""The routes of the stored prefixes, and warming in the background."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

import pytest

from vllm_mlx.engine.config import EngineConfig
from vllm_mlx.engine.core.outputs import ErrorInfo, unpack_tokens
from vllm_mlx.engine.core.stats import DiskPrefixStats, EngineStats, PrefixStats
from vllm_mlx.engine.errors import ContextLengthExceededError, EngineDiedError
from vllm_mlx.server.departures import message_at
from vllm_mlx.server.startup_warming import warm_whenever_ready
from vllm_mlx.server.warm_prompts import warm_prompt

if TYPE_CHECKING:
    from tests.server.conftest import Served, ServerFactory

SMALL_BLOCKS = EngineConfig(cache_block_size=4, ssd_cache_dir="never-opened")
SYSTEM = [{"role": "system", "content": "Be brief."}]


@pytest.fixture
async def served(make_server: ServerFactory) -> Served:
    """Return a ready server with small blocks and the word that there is an SSD tier."""
    server: Served = await make_server(engine_config=SMALL_BLOCKS)
    return server


async def test_the_cache_is_shown_with_its_limits_and_its_namespace(served: Served) -> None:
    """What the status page says, how much is allowed, and whose prefixes they are."""
    served.engine.engine_stats = EngineStats(
        prefixes=PrefixStats(
            num_blocks=5,
            max_bytes=8_000_000,
            block_size=64,
            namespace="ab12",
            label="org/model",
            disk=DiskPrefixStats(max_bytes=10**9, faults={"full": 1}),
        )
    )
    shown = await (await served.client.get("/v1/cache")).get_json()
    status = await (await served.client.get("/v1/status")).get_json()
    assert shown.items() >= status["cache"].items()
    assert (shown["entries"], shown["max_memory_mb"], shown["block_size"]) == (5, 8.0, 64)
    assert (shown["namespace"], shown["namespace_label"]) == ("ab12", "org/model")
    assert shown["ssd"]["max_bytes"] == 10**9
    assert shown["ssd"]["faults"] == {"full": 1}


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("?tier=ram", {"tiers": ["ram"], "blocks": 1, "files": 0}),
        ("?tier=ssd", {"tiers": ["ssd"], "blocks": 0, "files": 1}),
        ("?tier=ssd&tier=ram", {"tiers": ["ram", "ssd"], "blocks": 1, "files": 1}),
        ("", {"tiers": ["ram", "ssd"], "blocks": 1, "files": 1}),
    ],
)
async def test_tiers_are_cleared_by_name(
    served: Served, query: str, expected: dict[str, Any]
) -> None:
    """One, the other, or both."""
    response = await served.client.delete(f"/v1/cache{query}")
    assert await response.get_json() == {"object": "cache.cleared", **expected}


@pytest.mark.parametrize("query", ["?tier=disk", "?tier=", "?teir=ram"])
async def test_a_tier_that_is_none_is_a_400(served: Served, query: str) -> None:
    """Nothing is removed for a misspelt word."""
    assert (await served.client.delete(f"/v1/cache{query}")).status_code == 400


async def test_without_an_ssd_tier_there_is_none_to_clear(make_server: ServerFactory) -> None:
    """Asked for by name it is a 400; as part of everything it is nothing."""
    server = await make_server()
    assert (await server.client.delete("/v1/cache?tier=ssd")).status_code == 400
    assert (await server.client.delete("/v1/cache")).status_code == 200


async def test_warming_answers_when_it_is_done(served: Served) -> None:
    """What the engine had to compute is counted, and what was stored is skipped."""
    response = await served.post(
        "/v1/cache/warm", prompts=[SYSTEM, [{"role": "user", "content": "x"}]]
    )
    assert response.status_code == 200
    summary = await response.get_json()
    assert summary.pop("elapsed_ms") > 0
    # Of "Be brief." two whole blocks are common to all, and the engine said that it had 1 token.
    assert summary == {
        "object": "cache.warm",
        "count": 1,
        "skipped": 0,
        "too_short": 1,
        "computed_tokens": 7,
        "failures": [],
    }
    (request,) = served.engine.requests
    assert request.is_warm
    assert len(request.prompt) == 4 * 9


async def test_a_prompt_that_fails_leaves_the_others(served: Served) -> None:
    """A template's refusal and the engine's are told by place; the rest is warmed."""
    served.engine.error = ErrorInfo.of(ContextLengthExceededError("too long"))
    served.engine.finish_reason = "error"
    bad = [{"role": "user", "content": "bad"}]
    summary = await (await served.post("/v1/cache/warm", prompts=[bad, SYSTEM])).get_json()
    assert summary["count"] == 0
    assert summary["failures"] == [
        "prompts[0]: the template refused it",
        "prompts[1]: too long",
    ]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompts"),
        ({"prompts": []}, "prompts"),
        ({"prompts": "x"}, "prompts"),
        ({"prompts": [SYSTEM, "x"]}, "prompts[1]"),
        ({"prompts": [SYSTEM], "model": 1}, "model"),
        ({"prompts": [SYSTEM], "model": "other"}, "model"),
    ],
)
async def test_wrong_bodies_name_what_is_wrong(
    served: Served, body: dict[str, Any], param: str
) -> None:
    """Nothing is computed of a body that is wrong in part."""
    response = await served.post("/v1/cache/warm", **body)
    assert response.status_code in (400, 404)
    assert (await response.get_json())["error"]["param"] == param
    assert served.engine.requests == []


async def test_unknown_fields_are_named(served: Served) -> None:
    """As everywhere, they are ignored and said."""
    response = await served.post("/v1/cache/warm", prompts=[SYSTEM], speed=2)
    assert response.headers["x-ignored-fields"] == "speed"


async def test_a_switched_off_cache_cannot_be_warmed(make_server: ServerFactory) -> None:
    """It is a 400, not a computation for nothing."""
    server = await make_server(engine_config=EngineConfig(prefix_cache=False))
    response = await server.post("/v1/cache/warm", prompts=[SYSTEM])
    assert response.status_code == 400
    assert "--no-prefix-cache" in (await response.get_json())["error"]["message"]


async def test_in_the_background_clients_go_first(served: Served) -> None:
    """A prompt is begun only while no request is open, and again after the engine was lost."""
    prompt = warm_prompt(SYSTEM, "file, prompt 1")
    assert prompt is not None
    served.engine.is_held = True
    chat = asyncio.create_task(served.chat())
    while not served.engine.requests:
        await served.engine.sleep()
    warming = asyncio.create_task(warm_whenever_ready(served.runtime, [prompt]))
    await asyncio.sleep(0.05)
    assert len(served.engine.requests) == 1
    served.engine.finish(served.engine.requests[0].request_id)
    await chat
    served.engine.is_held = False
    while len(served.engine.requests) < 2:
        await served.engine.sleep()
    assert served.engine.requests[1].is_warm
    served.engine.set(phase="restarting", pid=None)
    await asyncio.sleep(0.02)
    served.engine.set(phase="ready", pid=7)
    while len(served.engine.requests) < 3:
        await served.engine.sleep()
    await asyncio.sleep(0.02)
    assert not warming.done()
    warming.cancel()
    assert len(served.engine.requests) == 3


async def test_a_prompt_that_kills_the_engine_is_not_tried_again(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    """After the restart the others are warmed, and the one that failed is left out."""
    prompts = [warm_prompt([{"role": "system", "content": c * 20}], f"file, {c}") for c in "ab"]
    served.engine.is_held = True
    warming = asyncio.create_task(warm_whenever_ready(served.runtime, [p for p in prompts if p]))
    while not served.engine.requests:
        await served.engine.sleep()
    served.engine.set(phase="restarting", pid=None)
    died = ErrorInfo.of(EngineDiedError("killed while it held this request"))
    served.engine.finish(served.engine.requests[0].request_id, "error", died)
    served.engine.is_held = False
    await asyncio.sleep(0.05)
    served.engine.set(phase="ready", pid=7)
    while len(served.engine.requests) < 2:
        await served.engine.sleep()
    await asyncio.sleep(0.05)
    warming.cancel()
    assert [unpack_tokens(r.prompt)[0] for r in served.engine.requests] == [ord("a"), ord("b")]
    assert "not warmed: file, a: killed while it held this request" in caplog.text


async def test_warming_that_is_stopped_aborts_its_row(served: Served) -> None:
    """Nothing goes on in the engine for a warmer that has left."""
    served.engine.is_held = True
    prompt = warm_prompt(SYSTEM, "file, prompt 1")
    assert prompt is not None
    warming = asyncio.create_task(warm_whenever_ready(served.runtime, [prompt]))
    while not served.engine.requests:
        await served.engine.sleep()
    warming.cancel()
    await asyncio.wait([warming])
    assert served.engine.left == [served.engine.requests[0].request_id]


MESSAGES = [
    {"role": role, "content": content}
    for role, content in [("system", "abc"), ("user", "de"), ("assistant", "fgh"), ("user", "i")]
]


@pytest.mark.parametrize(
    ("token", "expected"), [(0, 0), (2, 0), (3, 1), (4, 1), (7, 2), (8, 3), (9, None)]
)
def test_a_token_is_found_in_its_message(token: int, expected: int | None) -> None:
    """Each token of the prompt belongs to one message, or to what follows them all."""

    def encode_chat(messages: list[dict[str, str]], **options: Any) -> list[int]:
        text = "".join(message["content"] for message in messages)
        return [ord(character) for character in text + "!" * options["add_generation_prompt"]]

    options = {"add_generation_prompt": True}
    assert message_at(token, MESSAGES, options, encode_chat) == expected


async def test_a_miss_is_explained_while_debugging(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    """The log names the request, the token and the message."""
    served.engine.is_held = True

    async def ask() -> str:
        chat = asyncio.create_task(served.post("/v1/chat/completions", messages=MESSAGES[:2]))
        number = len(served.engine.requests)
        while len(served.engine.requests) == number:
            await served.engine.sleep()
        request_id = served.engine.requests[-1].request_id
        served.engine.put(request_id, "x", departs_at=4, finish_reason="stop")
        await chat
        return request_id

    with caplog.at_level(logging.INFO, logger="vllm_mlx.server"):
        await ask()
    assert "departs" not in caplog.text
    with caplog.at_level(logging.DEBUG, logger="vllm_mlx.server"):
        request_id = await ask()
    assert (
        f"request {request_id}: the prompt departs from the nearest stored one at token 4, in "
        "messages[1] (user)"
    ) in caplog.text
