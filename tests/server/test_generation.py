"""Open requests: read with limits, cancelled, counted, and never left behind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import pytest

from vllm_mlx.engine.core.outputs import ErrorInfo, pack_tokens
from vllm_mlx.engine.core.request import GenerationRequest, SamplingParams
from vllm_mlx.engine.core.stats import EngineStats, RequestStats
from vllm_mlx.engine.errors import OverloadedError, RequestTooLargeError
from vllm_mlx.server import sse
from vllm_mlx.server.admission import Admission

if TYPE_CHECKING:
    from tests.server.conftest import Served, ServerFactory


async def until(condition: Callable[[], Any]) -> None:
    """Wait until `condition` holds."""
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.002)


def prefilling(request_id: str, num_tokens: int) -> EngineStats:
    """Make the statistics of an engine that has computed so much of one prompt."""
    request = RequestStats(
        request_id=request_id,
        phase="prefill",
        num_prompt_tokens=1000,
        num_prefilled_tokens=num_tokens,
        num_cached_tokens=0,
        num_completion_tokens=0,
        max_tokens=10,
        age_s=1.0,
    )
    return EngineStats(requests=(request,))


async def test_a_request_without_progress_times_out(make_server: ServerFactory) -> None:
    """A whole answer is a 504 that is not to be retried, and its row is aborted."""
    server = await make_server(timeout_s=0.1)
    server.engine.is_held = True
    response = await server.chat()
    assert response.status_code == 504
    assert (await response.get_json())["error"]["code"] == "timeout"
    assert response.headers["x-should-retry"] == "false"
    assert server.engine.left == [server.engine.requests[0].request_id]
    assert server.runtime.generations.num_open_rows == 0


async def test_a_stream_without_progress_ends_with_an_error_event(
    make_server: ServerFactory, read_events: Callable[[bytes], list[Any]]
) -> None:
    """Keep-alives come while there is hope, then the error and the end mark."""
    server = await make_server(timeout_s=0.2)
    server.engine.is_held = True
    events = read_events(await (await server.chat(stream=True)).get_data())
    assert ": keep-alive" in events
    assert (events[-2]["error"]["code"], events[-1]) == ("timeout", "[DONE]")
    assert server.runtime.generations.num_open_rows == 0


async def test_computing_a_long_prompt_is_progress(make_server: ServerFactory) -> None:
    """As long as prompt tokens are computed, no token is waited for in vain."""
    server = await make_server(timeout_s=0.3)
    server.engine.is_held = True
    # Every question is a new one, as it is for an engine that is asked once a second.
    server.runtime.generations.progress._clock = iter(range(0, 10**6, 10)).__next__
    answering = asyncio.create_task(server.chat())
    await until(lambda: server.engine.requests)
    request_id = server.engine.requests[0].request_id
    for step in range(1, 13):
        server.engine.engine_stats = prefilling(request_id, 10 * step)
        await asyncio.sleep(0.06)
    assert not answering.done()
    server.engine.put(request_id, "at last")
    server.engine.finish(request_id)
    response = await answering
    assert (await response.get_json())["choices"][0]["message"]["content"] == "at last"


async def test_tokens_are_progress(make_server: ServerFactory) -> None:
    """A slow answer that goes on takes longer in total than the timeout."""
    server = await make_server(timeout_s=0.15)
    server.engine.is_held = True
    answering = asyncio.create_task(server.chat())
    await until(lambda: server.engine.requests)
    request_id = server.engine.requests[0].request_id
    for _ in range(6):
        await asyncio.sleep(0.06)
        server.engine.put(request_id, "x")
    server.engine.finish(request_id)
    response = await answering
    assert (await response.get_json())["choices"][0]["message"]["content"] == "x" * 6


async def test_a_full_queue_refuses_with_when_to_come_again(make_server: ServerFactory) -> None:
    """Rows and queue are both counted; one place frees one place."""
    server = await make_server(max_num_seqs=1, max_queue=1)
    server.engine.is_held = True
    answering = [asyncio.create_task(server.chat()) for _ in range(2)]
    await until(lambda: len(server.engine.requests) == 2)
    refused = await server.chat()
    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) >= 1
    assert (await refused.get_json())["error"]["code"] == "queue_full"
    server.engine.finish(server.engine.requests[0].request_id)
    await until(lambda: server.runtime.generations.num_open_rows == 1)
    answering.append(asyncio.create_task(server.chat()))
    await until(lambda: len(server.engine.requests) == 3)
    for request in server.engine.requests[1:]:
        server.engine.finish(request.request_id)
    assert [(await task).status_code for task in answering] == [200, 200, 200]
    assert server.runtime.generations.num_open_rows == 0


async def test_prompts_that_wait_are_bounded_by_their_tokens(make_server: ServerFactory) -> None:
    """One that would be too much is refused, until those before it are being answered."""
    server = await make_server(max_queue_tokens=50)
    server.engine.is_held = True
    first = asyncio.create_task(server.chat("x" * 60))
    await until(lambda: server.engine.requests)
    refused = await server.chat("x" * 10)
    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) >= 1
    error = (await refused.get_json())["error"]
    assert error["code"] == "queue_full"
    assert "prompts of 60 tokens wait, this request has 10, and at most 50" in error["message"]

    server.engine.put(server.engine.requests[0].request_id, "begun")
    await until(lambda: server.runtime.generations.num_waiting_tokens == 0)
    second = asyncio.create_task(server.chat("x" * 10))
    await until(lambda: len(server.engine.requests) == 2)
    for request in server.engine.requests:
        server.engine.finish(request.request_id)
    assert [(await task).status_code for task in (first, second)] == [200, 200]


async def test_prompts_that_are_never_answered_give_their_tokens_back(
    make_server: ServerFactory,
) -> None:
    """Cancelled and failed requests count no longer; one that can never fit is a 400."""
    server = await make_server(max_queue_tokens=50)
    server.engine.is_held = True
    cancelled = asyncio.create_task(server.chat("x" * 50))
    await until(lambda: server.engine.requests)
    server.runtime.generations.cancel(server.engine.requests[0].request_id)
    assert (await cancelled).status_code == 200
    failed = asyncio.create_task(server.chat("x" * 50))
    await until(lambda: len(server.engine.requests) == 2)
    assert server.runtime.generations.num_waiting_tokens == 50
    too_large = ErrorInfo.of(RequestTooLargeError("it has 50 tokens, and 40 fit"))
    server.engine.finish(server.engine.requests[1].request_id, "error", too_large)
    answer = await failed
    assert answer.status_code == 400
    error = (await answer.get_json())["error"]
    assert (error["code"], error["message"]) == (
        "request_too_large",
        "it has 50 tokens, and 40 fit",
    )
    assert server.runtime.generations.num_waiting_tokens == 0


def test_the_hint_grows_with_the_queue_and_with_how_long_requests_take() -> None:
    """A place frees when one of the rows that run has finished for each that waits."""
    hints = []
    for seconds, num_open in ((10.0, 4), (10.0, 8), (1000.0, 8)):
        admission = Admission(2, num_open - 2, 1000, lambda n=num_open: n)  # type: ignore[misc]
        admission.record(seconds)
        with pytest.raises(OverloadedError) as caught:
            admission.check(1)
        hints.append(caught.value.retry_after_s)
    assert hints == [15.0, 35.0, 60.0]


async def test_an_engine_that_vanishes_takes_no_request_with_it(served: Served) -> None:
    """Rows handed over before it was gone are aborted, and nothing stays open."""
    real, taken = served.engine.generate, []

    def generate(request: Any) -> Any:
        if taken:
            served.engine.set(phase="restarting")
        taken.append(request.request_id)
        return real(request)

    served.engine.generate = generate  # type: ignore[method-assign]
    response = await served.post("/v1/completions", prompt=["a", "b"])
    assert response.status_code == 503
    assert response.headers["retry-after"] == "3"
    assert served.engine.aborted == taken[:1]
    assert served.runtime.generations.num_open_rows == 0


async def test_shutdown_tells_clients_that_it_was_not_they(
    make_server: ServerFactory, read_events: Callable[[bytes], list[Any]]
) -> None:
    """What the shutdown aborts is a 503 or an error event, with the text so far."""
    server = await make_server()
    server.engine.is_held = True
    whole = asyncio.create_task(server.chat())
    streamed = asyncio.create_task(server.chat(stream=True))
    await until(lambda: len(server.engine.requests) == 2)
    for request in server.engine.requests:
        server.engine.put(request.request_id, "so far")
    await asyncio.sleep(0.05)
    await server.engine.stop(0.0)
    assert (await whole).status_code == 503
    events = read_events(await (await streamed).get_data())
    assert events[1]["choices"][0]["delta"]["content"] == "so far"
    assert (events[-2]["error"]["code"], events[-1]) == ("aborted", "[DONE]")


async def test_totals_count_every_request_once(served: Served) -> None:
    """Finished, failed and cancelled requests count with the tokens they had."""
    await served.chat("abc")
    await served.post("/v1/completions", prompt=["a", "b"])
    totals = served.runtime.generations.totals
    assert (totals.requests, totals.prompt_tokens, totals.completion_tokens) == (3, 7, 6)
    served.engine.is_held = True
    served.runtime.generations._timeout_s = 0.1
    response_task = asyncio.create_task(served.chat("abcd"))
    await until(lambda: len(served.engine.requests) == 4)
    served.engine.put(served.engine.requests[3].request_id, "x", 9)
    await response_task
    assert (totals.requests, totals.prompt_tokens, totals.completion_tokens) == (4, 11, 15)


async def test_reading_two_rows_loses_nothing(served: Served) -> None:
    """Whatever the order in which rows speak, each output arrives once."""
    served.engine.is_held = True
    rows = [
        GenerationRequest(request_id=name, prompt=pack_tokens([1]), sampling=SamplingParams())
        for name in "ab"
    ]
    generation = served.runtime.generations.start("ab", rows)
    texts = {0: "", 1: ""}

    async def speak() -> None:
        for number in range(30):
            served.engine.put("ab"[number % 2], f"{number},")
            if number % 5 == 0:
                await asyncio.sleep(0)
        for name in "ab":
            served.engine.finish(name)

    speaking = asyncio.create_task(speak())
    async with aclosing(generation.outputs()) as outputs:
        async for news in outputs:
            if news is not None:
                texts[news[0]] += news[1].text
    await speaking
    assert texts == {r: "".join(f"{n}," for n in range(30) if n % 2 == r) for r in (0, 1)}
    await generation.aclose()
    assert served.engine.left == []


def test_an_event_is_one_line_of_json() -> None:
    """Line breaks in a text cannot break the framing."""
    assert sse.event({"text": "a\n\nb"}) == b'data: {"text":"a\\n\\nb"}\n\n'
    assert sse.named_event("ping", {}) == b"event: ping\ndata: {}\n\n"
