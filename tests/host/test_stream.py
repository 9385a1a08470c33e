"""A stream merges what is not read, loses nothing, and ends exactly once."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from vllm_mlx.engine.core.logprobs import Logprobs, TokenLogprob
from vllm_mlx.engine.core.outputs import ErrorInfo, RowOutput, StepOutputs, pack_tokens
from vllm_mlx.engine.core.request import GenerationRequest, SamplingParams
from vllm_mlx.engine.core.stats import EngineStats
from vllm_mlx.engine.errors import EngineUnavailableError
from vllm_mlx.engine.host.client import EngineClient
from vllm_mlx.engine.host.delta import DeltaSlot
from vllm_mlx.engine.host.messages import AbortRequest, AddRequest, GetStats, ToEngine
from vllm_mlx.engine.host.stream import RequestStream


def row(number: int, **fields: object) -> RowOutput:
    """Return the output of one token."""
    known = {"request_id": "a", "text": f"{number} ", "token_ids": pack_tokens([number])}
    return msgspec.convert({**known, "num_completion_tokens": number, **fields}, RowOutput)


def request(request_id: str = "a") -> GenerationRequest:
    """Return a request of one token."""
    return GenerationRequest(
        request_id=request_id, prompt=pack_tokens([1]), sampling=SamplingParams()
    )


def test_a_slot_concatenates_deltas_and_keeps_the_newest_of_the_rest() -> None:
    """Texts and tokens add up; counts and reasons are the last output's."""
    slot = DeltaSlot()
    assert slot.is_empty
    slot.put(row(1, num_cached_tokens=4))
    slot.put(row(2, num_cached_tokens=4))
    slot.put(row(3, num_cached_tokens=4, finish_reason="stop", stop_reason="END"))
    assert slot.take() == row(
        3,
        text="1 2 3 ",
        token_ids=pack_tokens([1, 2, 3]),
        num_cached_tokens=4,
        finish_reason="stop",
        stop_reason="END",
    )
    assert slot.is_empty


def test_a_slot_keeps_every_log_probability() -> None:
    """Those of the answer are joined in order, those of the prompt come once and are kept."""
    entries = [TokenLogprob(number, -0.5 * number, ((number, -0.5),)) for number in range(3)]
    prompt = Logprobs.pack([TokenLogprob(9, -1.0, ((8, -0.25),))])
    slot = DeltaSlot()
    for number, entry in enumerate(entries):
        # The token of the second step has no text yet, and so no entry.
        logprobs = None if number == 1 else Logprobs.pack([entry])
        given = RowOutput(
            request_id="a", logprobs=logprobs, prompt_logprobs=prompt if number == 0 else None
        )
        slot.put(given)
    merged = slot.take()
    assert merged.logprobs is not None
    assert merged.logprobs.unpack() == [entries[0], entries[2]]
    assert merged.prompt_logprobs == prompt
    slot.put(row(1))
    slot.put(row(2))
    later = slot.take()
    assert (later.logprobs, later.prompt_logprobs) == (None, None)


def test_a_slot_with_one_output_hands_it_on() -> None:
    """One output comes out as it went in."""
    slot = DeltaSlot()
    only = row(1)
    slot.put(only)
    assert slot.take() is only


def test_a_slot_knows_every_field_of_an_output() -> None:
    """A field added to `RowOutput` must be thought about here: is it a delta or a state?"""
    assert set(RowOutput.__struct_fields__) == {
        *("request_id", "text", "token_ids", "finish_reason", "stop_reason", "error"),
        *("logprobs", "prompt_logprobs"),
        *("num_prompt_tokens", "num_cached_tokens", "num_completion_tokens"),
        *("num_stored_tokens", "num_reasoning_tokens", "departs_at", "timings"),
    }


async def test_a_cancelled_read_loses_nothing() -> None:
    """A reader that times out reads the next output all the same."""
    stream = RequestStream("a", lambda _: None)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(anext(stream), 0.01)
    reading = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    stream.put(row(1))
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert await anext(stream) == row(1)


async def test_nothing_follows_the_end() -> None:
    """What is put after a final output is dropped, and iteration ends for good."""
    stream = RequestStream("a", lambda _: None)
    stream.put(row(1))
    stream.end("abort")
    stream.end("error", ErrorInfo("engine_died", "too late"))
    stream.put(row(2))
    rows = [output async for output in stream]
    assert [(output.text, output.finish_reason) for output in rows] == [("1 ", "abort")]
    assert rows[0].num_completion_tokens == 1
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


async def test_the_client_gives_each_request_one_end() -> None:
    """Outputs reach their own streams; late ones, of readers that left, reach nobody."""
    sent: list[ToEngine] = []
    client = EngineClient(sent.append)
    first, second = client.generate(request("a")), client.generate(request("b"))
    assert client.num_open == 2
    await first.aclose()
    assert sent == [AddRequest(request("a")), AddRequest(request("b")), AbortRequest("a")]
    client.deliver(
        StepOutputs(rows=(row(1), row(1, request_id="b"), row(2, finish_reason="abort")))
    )
    assert (await first.collect()).finish_reason == "abort"
    assert (await anext(second)).text == "1 "
    assert client.end_all("error", ErrorInfo("engine_died", "gone")) == 1
    assert client.end_all("error", ErrorInfo("engine_died", "gone")) == 0
    final = await second.collect()
    assert (final.finish_reason, final.error) == ("error", ErrorInfo("engine_died", "gone"))
    await asyncio.wait_for(client.wait_idle(), 1.0)
    await first.aclose()
    assert len(sent) == 3


async def test_idleness_is_waited_for() -> None:
    """`wait_idle` returns when the last request has its end, and not before."""
    client = EngineClient(lambda _: None)
    await asyncio.wait_for(client.wait_idle(), 1.0)
    client.generate(request())
    waiting = asyncio.create_task(client.wait_idle())
    await asyncio.sleep(0.01)
    assert not waiting.done()
    client.deliver(StepOutputs(rows=(row(1, finish_reason="length"),)))
    await asyncio.wait_for(waiting, 1.0)


async def test_statistics_are_asked_for_once_at_a_time() -> None:
    """Callers share one question; an old answer stands in for a late one; death refuses."""
    sent: list[ToEngine] = []
    client = EngineClient(sent.append)
    asking = [asyncio.create_task(client.stats(1.0)) for _ in range(3)]
    await asyncio.sleep(0)
    assert sent == [GetStats()]
    client.deliver(EngineStats(steps_executed=1))
    assert [answer.steps_executed for answer in await asyncio.gather(*asking)] == [1, 1, 1]
    assert (await client.stats(0.01)).steps_executed == 1
    assert (await client.stats(0.01)).steps_executed == 1
    assert sent == [GetStats(), GetStats()]
    client.deliver(EngineStats(steps_executed=2))
    last = asyncio.create_task(client.stats(1.0))
    await asyncio.sleep(0)
    client.end_all("error")
    with pytest.raises(EngineUnavailableError, match="ended before"):
        await last
