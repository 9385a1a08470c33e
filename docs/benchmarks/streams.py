"""Measure the total token rate of concurrent streams, here and on mlx-lm's own server, in turns.

    uv run python docs/benchmarks/streams.py MODEL_FOLDER [OPENBLAS]

Both servers run at once and are asked one after the other: the same prompts, lengths and folder,
float32, greedy. OPENBLAS is preloaded for mlx-lm's server, which does not look for one.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import time

import httpx

MAX_TOKENS = 64
#: Concurrent streams, and how often each server is asked for them.
ROUNDS = ((16, 3), (2, 2), (1, 2))


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


async def stream(client: httpx.AsyncClient, url: str, model: str, number: int) -> int:
    """Run one stream to its end; return its completion tokens, as the server counts them."""
    text = f"{number}: tell me a long story about a lighthouse keeper number {number}"
    body = {
        "model": model,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    tokens = 0
    async with client.stream("POST", f"{url}/v1/chat/completions", json=body) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                usage = json.loads(line[6:]).get("usage")
                tokens = usage["completion_tokens"] if usage else tokens
    return tokens


async def total_rate(url: str, model: str, count: int, first: int) -> float:
    """Return tokens a second of `count` streams, begun 30 ms apart."""

    async def begin(index: int) -> int:
        await asyncio.sleep(0.03 * index)
        return await stream(client, url, model, first + index)

    async with httpx.AsyncClient(timeout=600) as client:
        began = time.perf_counter()
        tokens = await asyncio.gather(*(begin(index) for index in range(count)))
        return sum(tokens) / (time.perf_counter() - began)


async def wait_for(url: str) -> None:
    """Wait until a server answers 200."""
    async with httpx.AsyncClient() as client:
        for _ in range(240):
            try:
                if (await client.get(url)).status_code == 200:
                    return
            except httpx.TransportError:
                await asyncio.sleep(0.5)
            else:
                await asyncio.sleep(0.5)
    raise SystemExit(f"{url} does not answer")


async def compare(ours: str, theirs: str, model: str) -> None:
    """Ask both servers in turns and print the rates and the ratio of their medians."""
    await asyncio.gather(wait_for(f"{ours}/ready"), wait_for(f"{theirs}/health"))
    for url, name in ((ours, "default"), (theirs, model)):
        await total_rate(url, name, 1, 0)
    for count, repetitions in ROUNDS:
        rates: tuple[list[float], list[float]] = ([], [])
        for repetition in range(repetitions):
            first = 1000 * (repetition + 10 * count)
            rates[0].append(await total_rate(ours, "default", count, first))
            rates[1].append(await total_rate(theirs, model, count, first))
        ratio = statistics.median(rates[0]) / statistics.median(rates[1])
        shown = [" ".join(f"{rate:.1f}" for rate in side) for side in rates]
        print(f"{count:2} streams: here {shown[0]} | mlx-lm {shown[1]} | ratio {ratio:.2f}")


def main() -> None:
    """Start both servers, compare them, and end them."""
    model = sys.argv[1]
    environment = dict(os.environ)
    if len(sys.argv) > 2:
        environment["LD_PRELOAD"] = sys.argv[2]
    ports = free_port(), free_port()
    python = [sys.executable, "-m"]
    here = [*python, "vllm_mlx.cli", "serve", model, "--port", str(ports[0])]
    there = [*python, "mlx_lm", "server", "--model", model, "--port", str(ports[1])]
    servers = [subprocess.Popen(here), subprocess.Popen(there, env=environment)]
    try:
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        asyncio.run(compare(*urls, model))
    finally:
        for server in servers:
            server.terminate()
            server.wait()


if __name__ == "__main__":
    main()
