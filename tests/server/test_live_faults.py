"""A real server while its engine is killed and stopped, and its clients leave, again and again."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
from support.server_process import ServerProcess, is_running
from support.tiny_folder import write_tiny_folder

pytestmark = [pytest.mark.faults, pytest.mark.timeout(600)]

ENDLESS: dict[str, Any] = {
    "model": "default",
    "prompt": "x",
    "max_tokens": 8000,
    "temperature": 0,
    "stream": True,
    "extra_body": {"ignore_eos": True},
}

NUM_KILLS = 10
NUM_LEAVERS = 1000
#: Growth of the HTTP process that may be fragmentation; and when it has seen everything once.
MAX_GROWTH = 1.05
NUM_WARM_UP = 300


@pytest.fixture(scope="module")
def server(
    tmp_path_factory: pytest.TempPathFactory, demo_model_path: Path
) -> Iterator[ServerProcess]:
    """Return a ready server of a tiny model."""
    folder = write_tiny_folder(tmp_path_factory.mktemp("tiny"), demo_model_path)
    options = ("--max-num-seqs", "8", "--kv-memory-mb", "64")
    with ServerProcess(str(folder), tmp_path_factory.mktemp("faults"), *options) as process:
        yield process.wait_ready()


def client_of(server: ServerProcess, **options: Any) -> openai.AsyncOpenAI:
    """Return a client."""
    return openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", **options)


async def status_of(server: ServerProcess) -> dict[str, Any]:
    """Return the server's status without holding the event loop."""
    return await asyncio.to_thread(server.status)


async def read_until_error(client: openai.AsyncOpenAI, begun: asyncio.Semaphore) -> openai.APIError:
    """Read an endless stream until it fails, and return the one error that it brought."""
    stream = await client.completions.create(**ENDLESS)
    for _ in range(3):
        await anext(stream)
    begun.release()
    with pytest.raises(openai.APIError) as caught:
        await drained(stream)
    return caught.value


async def drained(stream: Any) -> None:
    """Read a stream to its end."""
    async for _ in stream:
        await asyncio.sleep(0)


async def test_killed_ten_times_amid_eight_streams(server: ServerProcess) -> None:
    """Each time every stream gets its error within a second, and the next request is answered."""
    async with client_of(server, max_retries=0) as client:
        for kill in range(NUM_KILLS):
            pid = (await status_of(server))["engine"]["pid"]
            begun = asyncio.Semaphore(0)
            streams = [asyncio.create_task(read_until_error(client, begun)) for _ in range(8)]
            for _ in streams:
                await asyncio.wait_for(begun.acquire(), 60)
            os.kill(pid, signal.SIGKILL)
            killed = time.monotonic()
            errors = await asyncio.wait_for(asyncio.gather(*streams), 20)
            assert time.monotonic() - killed < 2
            assert {error.code for error in errors} == {"engine_died"}
            assert (await asyncio.to_thread(server.get, "/health")).status_code == 200
            patient = client.with_options(max_retries=60)
            answer = await patient.completions.create(model="default", prompt="x", max_tokens=2)
            assert answer.choices[0].finish_reason == "length"
            status = await status_of(server)
            assert status["engine"]["restarts"] == kill + 1
            assert status["requests"] == []


async def test_an_engine_that_always_dies_ends_the_server_with_70(
    tmp_path: Path, demo_model_path: Path
) -> None:
    """Five deaths before any output: it gives up, says why, and leaves nothing behind."""
    (tmp_path / "tiny").mkdir()
    folder = write_tiny_folder(tmp_path / "tiny", demo_model_path)
    with ServerProcess(str(folder), tmp_path, "--kv-memory-mb", "64") as process:
        process.wait_ready()
        killed: set[int] = set()
        async with asyncio.timeout(100):
            while len(killed) < 5:
                engine = (await asyncio.to_thread(process.status))["engine"]
                if engine["phase"] == "ready" and engine["pid"] not in killed:
                    killed.add(engine["pid"])
                    os.kill(engine["pid"], signal.SIGKILL)
                await asyncio.sleep(0.05)
            code = await asyncio.to_thread(process.wait, 30)
        assert code == 70
        last = next(line for line in process.log.splitlines() if line.startswith("Error: "))
        assert "gave up after 5 deaths in a row before any output" in last
        assert "signal 9 (SIGKILL)" in last
        assert not process.ready_file_exists
    assert not any(is_running(pid) for pid in killed)


async def test_stopped_for_a_minute_and_continued(server: ServerProcess) -> None:
    """The stream gets keep-alives meanwhile, and goes on where it was."""
    pid = (await status_of(server))["engine"]["pid"]
    async with client_of(server, max_retries=0, timeout=30) as client:
        stream = await client.completions.create(**{**ENDLESS, "max_tokens": 300})
        texts = [(await anext(stream)).choices[0].text]
        os.kill(pid, signal.SIGSTOP)
        try:
            # Longer than the client's own timeout: only the comments keep it waiting.
            await asyncio.sleep(60)
            assert (await asyncio.to_thread(server.get, "/health")).status_code == 200
            assert (await status_of(server))["engine"]["pid"] == pid
        finally:
            os.kill(pid, signal.SIGCONT)
        last = None
        async for chunk in stream:
            texts.append(chunk.choices[0].text)
            last = chunk
        assert last is not None
        assert last.choices[0].finish_reason == "length"
    assert (await status_of(server))["requests"] == []


async def test_clients_that_leave_at_any_moment_leave_nothing_behind(
    server: ServerProcess,
) -> None:
    """While waiting, in prefill and in decode: the gauges and the KV return to zero."""
    choose = random.Random(7)
    async with client_of(server, max_retries=2) as client:

        async def leave() -> None:
            prompt = "word " * choose.choice([1, 200, 2000])
            seconds = choose.uniform(0, 0.5)
            fields = {**ENDLESS, "prompt": prompt, "max_tokens": 400}
            fields["stream"] = choose.random() < 0.5
            try:
                async with asyncio.timeout(seconds):
                    answer = await client.completions.create(**fields)
                    if fields["stream"]:
                        async for _ in answer:
                            await asyncio.sleep(0)
            except (TimeoutError, openai.APIError):
                return

        process = psutil.Process(server.pid)
        for number in range(0, NUM_LEAVERS, 40):
            await asyncio.gather(*(leave() for _ in range(40)))
            if number < NUM_WARM_UP:
                warm_bytes = process.memory_info().rss
    deadline = time.monotonic() + 30
    while True:
        status = await status_of(server)
        gauges = status["num_running"] + status["num_waiting"] + len(status["requests"])
        if gauges == 0 and status["engine"]["kv_mb"] == 0:
            break
        assert time.monotonic() < deadline, status
        await asyncio.sleep(0.05)
    assert status["engine"]["phase"] == "ready"
    assert process.memory_info().rss <= MAX_GROWTH * warm_bytes
