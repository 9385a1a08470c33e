"""Large request bodies: bounded before they are checked, and checked where they delay nobody."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from vllm_mlx.engine.errors import InvalidRequestError
from vllm_mlx.server.openai import fields
from vllm_mlx.server.openai.body_limits import MAX_MESSAGES, MAX_VALUES, check_counts, check_marks
from vllm_mlx.server.openai.validation import BYTE_ORDER_MARK, decode_object
from vllm_mlx.server.runtime import ServerRuntime

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.server.conftest import Served, ServerFactory

#: What a stream may be delayed by: unbounded, each of the bodies below took seconds.
MAX_LAG_S = 0.5

MESSAGE = {"role": "user", "content": "x"}
MESSAGE_JSON = b'{"role":"user","content":"x"}'


class Lag:
    """Hold the longest time that the event loop was away."""

    def __init__(self) -> None:
        self.worst_s = 0.0

    async def watch(self) -> None:
        """Measure until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            slept_at = loop.time()
            await asyncio.sleep(0.005)
            self.worst_s = max(self.worst_s, loop.time() - slept_at - 0.005)


@asynccontextmanager
async def measured_lag() -> AsyncIterator[Lag]:
    """Watch the event loop beside what is inside."""
    lag = Lag()
    task = asyncio.create_task(lag.watch())
    await asyncio.sleep(0)
    try:
        yield lag
        await asyncio.sleep(0.01)
    finally:
        task.cancel()


def chat_with(extra: bytes) -> bytes:
    """Return the JSON of a chat with one more field."""
    return b'{"messages":[' + MESSAGE_JSON + b"]," + extra + b"}"


BODIES = {
    "messages": (
        "/v1/chat/completions",
        b'{"messages":[' + b",".join([MESSAGE_JSON] * 200_000) + b"]}",
    ),
    "parts": (
        "/v1/chat/completions",
        b'{"messages":[{"role":"user","content":['
        + b",".join([b'{"type":"text","text":"x"}'] * 200_000)
        + b"]}]}",
    ),
    "unknown fields": (
        "/v1/chat/completions",
        chat_with(b",".join(b'"u%d":1' % number for number in range(300_000))),
    ),
    "wrong values": (
        "/v1/chat/completions",
        chat_with(b'"stop_token_ids":[' + b",".join([b'"x"'] * 1_000_000) + b"]"),
    ),
    "lists": ("/v1/completions", b'{"prompt":[' + b",".join([b"[]"] * 3_000_000) + b"]}"),
    "token ids": ("/v1/completions", b'{"prompt":[' + b",".join([b"1"] * 3_000_000) + b"]}"),
    "texts": ("/v1/completions", b'{"prompt":[' + b",".join([b'"x"'] * 1_000_000) + b"]}"),
}


@pytest.mark.parametrize("name", BODIES)
async def test_a_huge_body_is_refused_and_delays_nobody(served: Served, name: str) -> None:
    """The event loop goes on while one is refused, whatever there are too many of."""
    path, raw = BODIES[name]
    # The least of a few: another process of a busy machine delays, too.
    lags = []
    while len(lags) < 3 and min(lags, default=MAX_LAG_S) >= MAX_LAG_S:
        async with measured_lag() as lag:
            response = await served.client.post(path, data=raw)
        assert response.status_code == 400
        lags.append(lag.worst_s)
    assert served.engine.requests == []
    assert min(lags) < MAX_LAG_S


async def test_the_largest_chat_delays_nobody(make_server: ServerFactory) -> None:
    """As many messages as are accepted are checked aside, and answered."""
    server: Served = await make_server()
    raw = json.dumps({"messages": [{"role": "user", "content": ""}] * MAX_MESSAGES}).encode()
    server.tokenizer.render_chat = lambda messages, **options: "x"  # type: ignore[method-assign]
    lags = []
    while len(lags) < 3 and min(lags, default=MAX_LAG_S) >= MAX_LAG_S:
        async with measured_lag() as lag:
            response = await server.client.post("/v1/chat/completions", data=raw)
        assert response.status_code == 200
        lags.append(lag.worst_s)
    assert min(lags) < MAX_LAG_S


async def test_large_bodies_are_checked_aside_and_small_ones_are_not(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What takes long to check is not checked on the event loop."""
    asides: list[Any] = []
    run_aside = ServerRuntime.run_aside

    async def counted(runtime: ServerRuntime, work: Any) -> Any:
        asides.append(work)
        return await run_aside(runtime, work)

    monkeypatch.setattr(ServerRuntime, "run_aside", counted)
    assert (await served.chat("x" * 50)).status_code == 200
    assert asides == []
    assert (await served.chat("x" * 20_000)).status_code == 400
    assert len(asides) == 1


async def test_too_many_messages_are_told_by_name(served: Served) -> None:
    """The error names the field and the limit."""
    response = await served.post("/v1/chat/completions", messages=[MESSAGE] * (MAX_MESSAGES + 1))
    error = (await response.get_json())["error"]
    assert (response.status_code, error["param"]) == (400, "messages")
    assert str(MAX_MESSAGES) in error["message"]


async def test_too_many_token_ids_are_refused_before_they_are_looked_at(served: Served) -> None:
    """A prompt over the context is told so, though its ids are wrong, too."""
    response = await served.post("/v1/completions", prompt=[1, *[-1] * 200])
    error = (await response.get_json())["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
    response = await served.post("/v1/completions", prompt=[[1], [1] * 200])
    assert (await response.get_json())["error"]["param"] == "prompt[1]"


@pytest.mark.parametrize(
    "value", [[1] * MAX_VALUES, {"a": [[1] * 9] * MAX_VALUES}, [[[{}] * 9] * 9000]]
)
def test_values_are_counted_at_every_depth(value: Any) -> None:
    """Too many anywhere are refused by the field's name; a prompt has its own limit."""
    with pytest.raises(InvalidRequestError) as caught:
        check_counts({"model": "x", "metadata": value})
    assert caught.value.param == "metadata"
    check_counts({"prompt": value})
    check_counts({"metadata": [1] * 1000})


def test_marks_within_the_limits_are_read() -> None:
    """A text of a million commas, and nested lists, are no reason to refuse."""
    check_marks(b"," * 1_000_000 + b"[{" * 100_000)
    for mark in (b",", b"[", b"{"):
        with pytest.raises(InvalidRequestError):
            check_marks(mark * 5_000_000)


async def test_of_very_many_unknown_fields_the_first_are_named(served: Served) -> None:
    """They are ignored as few are; counting them all would only take time."""
    unknown = {f"u{number}": 1 for number in range(5000)}
    response = await served.chat("x", **unknown)
    assert response.status_code == 200
    assert "u0" in response.headers["x-ignored-fields"]
    assert len(served.runtime.unknown_fields.counts) == fields.MAX_UNKNOWN_NAMES


async def test_a_byte_order_mark_before_the_json_is_passed_over(served: Served) -> None:
    """Editors of one system write it; it means nothing in UTF-8."""
    raw = BYTE_ORDER_MARK + json.dumps({"messages": [MESSAGE]}).encode()
    assert (await served.client.post("/v1/chat/completions", data=raw)).status_code == 200


@pytest.mark.parametrize("text", [b"\\ud800", b"\\udc00 tail", b"\\ud83dx"])
def test_half_a_character_is_named(text: bytes) -> None:
    """The decoder's own words for it would not tell anybody what to look for."""
    with pytest.raises(InvalidRequestError, match="half a character"):
        decode_object(b'{"a": "' + text + b'"}')
    assert decode_object(b'{"a": "\\ud83d\\ude00"}') == {"a": "\U0001f600"}
