"""`/metrics`: its figures against what requests did, over failures, cancellations and restarts."""

from __future__ import annotations

import asyncio
import math
import shutil
import subprocess
import time
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from vllm_mlx.engine.core.histogram import HistogramCounts
from vllm_mlx.engine.core.outputs import ErrorInfo, RowTimings
from vllm_mlx.engine.core.stats import DiskPrefixStats, EngineStats, PrefixStats, RequestStats
from vllm_mlx.engine.errors import RowFailedError

if TYPE_CHECKING:
    from tests.server.conftest import Served, ServerFactory

#: Samples by name and labels, `model` left out.
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


class Scraped:
    """Read the samples of one page."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._samples: Samples = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                labels = dict(sample.labels)
                assert labels.pop("model") == "org/model"
                self._samples[sample.name, frozenset(labels.items())] = sample.value

    def value(self, name: str, **labels: str) -> float:
        """Return one sample's value, 0 if it is not there."""
        return self._samples.get((f"vllm_mlx_{name}", frozenset(labels.items())), 0.0)

    def total(self, name: str, **labels: str) -> float:
        """Return the sum of all samples of a name that have these labels."""
        wanted = frozenset(labels.items())
        return sum(
            value
            for (sample, given), value in self._samples.items()
            if sample == f"vllm_mlx_{name}" and wanted <= given
        )

    def counters(self) -> Samples:
        """Return every sample that may only rise."""
        rising = ("_total", "_count", "_bucket", "_sum")
        return {key: value for key, value in self._samples.items() if key[0].endswith(rising)}


async def scrape(server: Served) -> Scraped:
    """Get the page."""
    response = await server.client.get("/metrics")
    assert response.status_code == 200
    assert response.content_type == "text/plain; version=0.0.4; charset=utf-8"
    return Scraped((await response.get_data()).decode())


async def finished(server: Served, request_id: str, *, num_tokens: int, **timings: float) -> None:
    """Play the engine for one request: so many tokens, then the end."""
    for number in range(1, num_tokens + 1):
        server.engine.put(request_id, "x", number, num_cached_tokens=1)
        await server.engine.sleep()
    server.engine.put(
        request_id,
        "",
        num_tokens,
        num_cached_tokens=1,
        finish_reason="stop",
        timings=RowTimings(**timings),
    )


async def asked(server: Served, count: int) -> str:
    """Wait for so many requests at the engine and return the newest one's id."""
    async with asyncio.timeout(30):
        while len(server.engine.requests) < count:
            await server.engine.sleep()
    return server.engine.requests[count - 1].request_id


async def test_metrics_must_be_asked_for(served: Served) -> None:
    """Without the flag the route says which one it is."""
    response = await served.client.get("/metrics")
    assert response.status_code == 404
    error = (await response.get_json())["error"]
    assert "--metrics" in error["message"]


async def test_the_page_is_one_that_prometheus_takes(make_server: ServerFactory) -> None:
    """Prometheus' own checker finds no fault in format, names, help or types."""
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is missing: apt-get install prometheus")
    server = await make_server(metrics=True)
    server.engine.tell(EngineStats(prefixes=PrefixStats(disk=DiskPrefixStats(faults={"a": 1}))), 1)
    await server.chat()
    await server.chat("bad")
    page = (await scrape(server)).text
    done = await asyncio.to_thread(
        subprocess.run,
        [promtool, "check", "metrics"],
        input=page,
        text=True,
        capture_output=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


async def test_open_metrics_is_given_to_those_who_ask(make_server: ServerFactory) -> None:
    """As Prometheus does by default; nonsense in the header is no fault of the server's."""
    server = await make_server(metrics=True)
    for accept, kind in {
        "application/openmetrics-text;version=1.0.0,text/plain;q=0.5": "application/openmetrics",
        "text/plain;version=x.y": "text/plain",
        "*/*": "text/plain",
    }.items():
        response = await server.client.get("/metrics", headers={"accept": accept})
        assert response.status_code == 200
        assert response.content_type.startswith(kind)


async def everything(server: Served) -> dict[str, Any]:
    """Have requests end in every way there is; return the usage of the first, of two rows."""
    answering = asyncio.create_task(server.chat("abc", n=2))
    for count in (1, 2):
        row = await asked(server, count)
        await finished(server, row, num_tokens=3, queue_s=0.25, prefill_s=0.5, decode_s=1.0)
    usage: dict[str, Any] = (await (await answering).get_json())["usage"]
    answering = asyncio.create_task(server.chat("abc", stream=True))
    row = await asked(server, 3)
    await finished(server, row, num_tokens=3, queue_s=0.25, prefill_s=0.5, decode_s=1.0)
    await (await answering).get_data()
    # A client that leaves after one token, one row cancelled, one that fails, one refused.
    async with server.client.request("/v1/chat/completions", method="POST") as connection:
        await connection.send(b'{"messages": [{"role": "user", "content": "abc"}], "stream": true}')
        await connection.send_complete()
        server.engine.put(await asked(server, 4), "x", 1)
        await connection.receive()
        await connection.disconnect()
    answering = asyncio.create_task(server.chat("abcd"))
    server.engine.put(await asked(server, 5), "x", 1)
    await server.client.delete(f"/v1/requests/{await asked(server, 5)}")
    await answering
    answering = asyncio.create_task(server.chat("abcde", stream=True))
    row = await asked(server, 6)
    server.engine.put(row, "x", 1)
    await server.engine.sleep()
    server.engine.finish(row, "error", ErrorInfo.of(RowFailedError("broken")))
    assert (await answering).status_code == 200
    answering = asyncio.create_task(server.chat("abcdef"))
    row = await asked(server, 7)
    refusal = ErrorInfo.of(RowFailedError("never begun"))
    server.engine.put(row, "", 0, finish_reason="error", error=refusal)
    assert (await answering).status_code == 500
    assert (await server.chat("bad")).status_code == 400
    assert (await server.client.get("/nowhere")).status_code == 404
    return usage


async def test_counts_are_those_of_the_answers(make_server: ServerFactory) -> None:
    """Answers, streams, refusals, failures, cancellations and clients that leave, all together."""
    server = await make_server(metrics=True, max_num_seqs=8)
    server.engine.is_held = True
    usage = await everything(server)
    page = await scrape(server)
    chats = {"route": "/v1/chat/completions", "method": "POST"}
    outcomes = {
        (status, outcome): page.value(
            "http_requests_total", **chats, status=status, outcome=outcome
        )
        for status, outcome in (
            *(("200", "success"), ("499", "client_closed"), ("200", "aborted")),
            *(("200", "error"), ("500", "error"), ("400", "refused")),
        )
    }
    assert outcomes == {
        ("200", "success"): 2,
        ("499", "client_closed"): 1,
        ("200", "aborted"): 1,
        ("200", "error"): 1,
        ("500", "error"): 1,
        ("400", "refused"): 1,
    }
    assert page.total("http_requests_total", route="/v1/chat/completions") == 7
    assert page.total("http_requests_total", route="unmatched", status="404") == 1
    assert page.total("http_requests_total", route="/v1/requests/{request_id}") == 1
    reasons = ("stop", "length", "abort", "error")
    rows_ended = [page.value("request_success_total", finished_reason=name) for name in reasons]
    assert rows_ended == [3, 0, 2, 2]
    assert page.value("request_errors_total", code="row_failed") == 2
    # Prompts of 3 characters: two rows of the first, the stream's, the one left; then 4 and 5. The
    # one that was never begun has cost nothing.
    assert page.value("prompt_tokens_total") == 3 * 4 + 4 + 5
    assert page.value("prompt_tokens_cached_total") == 3 + 1 + 1
    assert page.value("generation_tokens_total") == 3 * 3 + 1 + len(server.engine.texts) * 2
    assert usage["completion_tokens"] == 2 * 3
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds"):
        assert page.value(f"{name}_count") == (6 if "first" in name else 3), name
    assert page.value("request_queue_time_seconds_sum") == 3 * 0.25
    assert page.value("request_prefill_time_seconds_sum") == 3 * 0.5
    assert page.value("request_time_per_output_token_seconds_sum") == 3 * 0.5
    assert page.value("request_generation_tokens_sum") == 3 * 3


def working(num_steps: int, gaps: tuple[int, ...], **faults: int) -> EngineStats:
    """Return what an engine says after so many steps."""
    return EngineStats(
        steps_executed=num_steps,
        num_running=2,
        num_waiting=1,
        kv_bytes=30,
        kv_budget_bytes=120,
        token_gaps=HistogramCounts(counts=gaps + (0,) * (19 - len(gaps)), total=float(sum(gaps))),
        prefixes=PrefixStats(hit_tokens=num_steps * 2, disk=DiskPrefixStats(faults=faults)),
    )


async def test_counters_go_on_over_an_engine_that_died(make_server: ServerFactory) -> None:
    """Each process begins at zero; what all have done is added up and never falls."""
    server = await make_server(metrics=True)
    told = [
        (working(5, (1, 2), torn=1), 100),
        (working(9, (1, 4), torn=1), 100),
        (working(3, (2,)), 200),
        # More than the first ever said: no fall tells that it is another process.
        (working(30, (2, 9), torn=2, full=1), 300),
    ]
    before: Samples = {}
    for restarts, (stats, pid) in enumerate(told):
        server.engine.tell(stats, pid)
        server.engine.set(num_restarts=max(0, restarts - 1))
        counters = (await scrape(server)).counters()
        assert [key for key, value in before.items() if counters[key] < value] == []
        before = counters
    page = await scrape(server)
    assert page.value("engine_steps_total") == 9 + 3 + 30
    assert page.value("prefix_cache_hits_total") == 2 * (9 + 3 + 30)
    assert page.value("engine_restarts_total") == 2
    assert page.value("inter_token_latency_seconds_count") == 5 + 2 + 11
    assert page.value("inter_token_latency_seconds_bucket", le="0.001") == 1 + 2 + 2
    assert page.value("ssd_cache_faults_total", kind="torn") == 1 + 2
    assert page.value("ssd_cache_faults_total", kind="full") == 1


async def test_what_holds_now_is_shown_with_its_age(make_server: ServerFactory) -> None:
    """Old figures say so, and without an engine there are none."""
    server = await make_server(metrics=True)
    server.engine.engine_stats = msgspec.structs.replace(working(1, ()), age_s=2.5)
    page = await scrape(server)
    assert page.value("engine_stats_age_seconds") == 2.5
    # The rows that it told of are nobody's any more.
    assert (page.value("num_requests_running"), page.value("num_requests_waiting")) == (0, 0)
    server.engine.engine_stats = working(1, ())
    page = await scrape(server)
    assert (page.value("num_requests_running"), page.value("num_requests_waiting")) == (2, 1)
    assert (page.value("kv_cache_usage_perc"), page.value("engine_up")) == (0.25, 1)
    server.engine.set(phase="restarting")
    page = await scrape(server)
    assert math.isnan(page.value("engine_stats_age_seconds"))
    assert (page.value("num_requests_running"), page.value("engine_up")) == (0, 0)


async def test_labels_are_no_place_for_what_clients_make_up(make_server: ServerFactory) -> None:
    """Any path and method that is no route's counts under one label each."""
    server = await make_server(metrics=True)
    for number in range(5):
        await server.client.open(f"/nowhere/{number}", method=f"MADEUP{number}")
    page = await scrape(server)
    assert (
        page.value(
            "http_requests_total",
            route="unmatched",
            method="OTHER",
            status="404",
            outcome="refused",
        )
        + page.total("http_requests_total", route="unmatched", method="OTHER", status="405")
        == 5
    )


async def test_pages_do_not_wait_for_the_end_of_a_step(make_server: ServerFactory) -> None:
    """With 16 rows at work and 100 that wait, both pages answer in time though the engine cannot.

    The fake engine answers like the real one: at the end of the time that it is given.
    """
    server = await make_server(metrics=True, max_num_seqs=16)
    server.engine.is_held = True
    clients = [
        asyncio.create_task(server.chat("abc", stream=bool(number % 2))) for number in range(116)
    ]
    await asked(server, 116)
    rows = [
        RequestStats(
            request_id=request.request_id,
            phase="generation",
            num_prompt_tokens=3,
            num_prefilled_tokens=3,
            num_cached_tokens=0,
            num_completion_tokens=9,
            max_tokens=90,
            age_s=1.0,
        )
        for request in server.engine.requests[:16]
    ]
    busy = EngineStats(num_running=16, num_waiting=90, requests=tuple(rows), age_s=0.7)
    waits: list[float] = []

    async def slow_stats(timeout_s: float = 1.0) -> EngineStats:
        waits.append(timeout_s)
        await asyncio.sleep(timeout_s)
        return busy

    server.engine.stats = slow_stats  # type: ignore[method-assign]
    times: dict[str, list[float]] = {}
    for path in ("/metrics", "/v1/status") * 5:
        began = time.perf_counter()
        assert (await server.client.get(path)).status_code == 200
        times.setdefault(path, []).append(time.perf_counter() - began)
    # What is deterministic: how long they wait at most. What is not: the best of five.
    assert max(waits) <= 0.01
    assert {path: min(taken) < 0.05 for path, taken in times.items()} == {
        "/metrics": True,
        "/v1/status": True,
    }
    page = await scrape(server)
    assert page.value("num_requests_running") == 16
    for request in server.engine.requests:
        server.engine.finish(request.request_id)
    answers: list[Any] = await asyncio.gather(*clients)
    assert {answer.status_code for answer in answers} == {200}
