"""A server that answers by a script: what it says is decided here, whatever carries it.

`ServerScript` decides; `VirtualConnection` carries it in virtual time, `serve` over sockets. Run
as a program it serves what its argument, a JSON object of `Script`'s fields, asks for, and prints
its port.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import random
import sys
from collections.abc import Callable
from typing import Any

from support.api_answers import answer_events, whole_answer

from vllm_mlx.bench.measuring_loop import MeasuringLoop, arrival_clock

ENDPOINTS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completions",
    "/v1/messages": "messages",
    "/v1/responses": "responses",
}
#: Tokens that the pretended template adds.
TEMPLATE_TOKENS = 7
JSON = "application/json"


@dataclasses.dataclass
class Script:
    """Say how the server behaves; times in seconds."""

    ttft_s: float = 0.0
    gap_s: float = 0.0
    prefill_s_per_token: float = 0.0
    #: Standard deviation of every delay, as a share of it.
    jitter: float = 0.0
    seed: int = 0
    #: Multiplies every delay.
    slowdown: float = 1.0
    #: Tokens of an answer; None gives as many as are asked for.
    num_tokens: int | None = None
    #: Honours ignore_eos; otherwise half of what is asked for is given.
    can_hold: bool = True
    refuses_hold: bool = False
    counts_by: str = "tokenize"
    #: Tokens that its counting leaves out.
    miscounts_by: int = 0
    models: tuple[str, ...] = ("scripted",)
    takes_any_model: bool = False
    lists_models: bool = True
    api_key: str | None = None
    has_status: bool = True
    #: Every so many requests one fails with a 500; 0 never.
    fails_every: int = 0
    #: Fails every generation after so many; 0 never.
    dies_after: int = 0
    #: Answers 503 so often before it is ready.
    num_refusals: int = 0
    answer: str | None = None


@dataclasses.dataclass
class Scripted:
    """Hold one response: its head, and pieces each sent so long after the one before."""

    status: int = 200
    content_type: str = JSON
    pieces: list[tuple[float, bytes]] = dataclasses.field(default_factory=list)


class ServerScript:
    """Decide every response; owns the pretended prefix cache and the counters."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.requests: list[tuple[str, dict[str, Any]]] = []
        #: Hashes of the beginnings of every prompt that was generated from.
        self.prefixes: set[int] = set()
        self.num_answered = 0
        self.totals = {"prompt": 0, "cached": 0, "completion": 0}
        self._rng = random.Random(script.seed)
        self._refusals = script.num_refusals

    def respond(
        self, method: str, path: str, body: dict[str, Any] | None, key: str | None
    ) -> Scripted:
        """Return the response to one request."""
        if self.script.api_key is not None and key != self.script.api_key:
            return _json(401, {"error": {"message": "wrong API key", "code": "invalid_api_key"}})
        if self._refusals:
            self._refusals -= 1
            return _json(503, {"error": {"message": "the model is loading"}})
        if method == "GET":
            return self._page(path)
        if method == "DELETE":
            self.prefixes.clear()
            return _json(200, {"status": "cleared"})
        assert body is not None
        self.requests.append((path, body))
        if path in ENDPOINTS:
            return self._generate(ENDPOINTS[path], body)
        return self._count(path, body)

    def _page(self, path: str) -> Scripted:
        if path == "/v1/models" and self.script.lists_models:
            return _json(200, {"data": [{"id": name} for name in self.script.models]})
        if path == "/v1/status" and self.script.has_status:
            totals = self.totals
            return _json(
                200,
                {
                    "steps_executed": totals["completion"],
                    "total_prompt_tokens": totals["prompt"],
                    "total_cached_tokens": totals["cached"],
                    "total_completion_tokens": totals["completion"],
                    "device": {"name": "scripted", "active_memory_gb": 1.5},
                    "engine": {"preemptions": 0},
                },
            )
        if path == "/metrics" and self.script.has_status:
            text = f"# TYPE tokens_total counter\ntokens_total {self.totals['completion']}\n"
            return Scripted(content_type="text/plain", pieces=[(0.0, text.encode())])
        return _json(404, {"error": {"message": f"no such route: {path}"}})

    def _count(self, path: str, body: dict[str, Any]) -> Scripted:
        count = len(prompt_words(body)) + TEMPLATE_TOKENS - self.script.miscounts_by
        if path == "/tokenize" and self.script.counts_by == "tokenize":
            return _json(200, {"count": count})
        if path == "/v1/messages/count_tokens" and self.script.counts_by == "count_tokens":
            return _json(200, {"input_tokens": count})
        return _json(404, {"error": {"message": f"no such route: {path}"}})

    def _generate(self, endpoint: str, body: dict[str, Any]) -> Scripted:
        script = self.script
        if not script.takes_any_model and body["model"] not in script.models:
            return _json(404, {"error": {"message": f"no model {body['model']}"}})
        if body.get("ignore_eos") and script.refuses_hold:
            return _json(400, {"error": {"message": "unknown field ignore_eos"}})
        self.num_answered += 1
        if script.fails_every and self.num_answered % script.fails_every == 0:
            return _json(500, {"error": {"message": "a scripted failure"}})
        if script.dies_after and self.num_answered > script.dies_after:
            return _json(500, {"error": {"message": "a scripted death"}})
        words = prompt_words(body)
        cached = self._cached(words)
        prompt_tokens = len(words) + TEMPLATE_TOKENS
        output = self._output(body)
        self.totals["prompt"] += prompt_tokens
        self.totals["cached"] += cached
        self.totals["completion"] += len(output)
        ttft = script.ttft_s + script.prefill_s_per_token * (prompt_tokens - cached)
        counts = {"prompt_tokens": prompt_tokens, "cached_tokens": cached}
        if not body.get("stream"):
            total = ttft + script.gap_s * (len(output) - 1)
            whole = json.dumps(whole_answer(endpoint, output, **counts)).encode()
            return Scripted(pieces=[(self._delay(total), whole)])
        start, deltas, end = answer_events(endpoint, output, **counts)
        pieces = [(0.0, block) for block in start]
        pieces += [
            (self._delay(script.gap_s if index else ttft), block)
            for index, block in enumerate(deltas)
        ]
        pieces += [(0.0, block) for block in end]
        return Scripted(content_type="text/event-stream", pieces=pieces)

    def _output(self, body: dict[str, Any]) -> list[str]:
        if self.script.answer is not None:
            return [f"{word} " for word in self.script.answer.split()]
        wanted = body.get("max_tokens") or body.get("max_output_tokens")
        num = self.script.num_tokens or int(wanted)
        if not self.script.can_hold or not body.get("ignore_eos"):
            num = min(num, self.script.num_tokens or max(1, num // 2))
        return [f" word{index}" for index in range(num)]

    def _cached(self, words: list[str]) -> int:
        """Return how many first words an earlier prompt had, too; the last is always computed."""
        num_cached, prefix = 0, 0
        for position, word in enumerate(words):
            prefix = hash((prefix, word))
            if prefix in self.prefixes and num_cached == position < len(words) - 1:
                num_cached += 1
            self.prefixes.add(prefix)
        return num_cached

    def _delay(self, mean_s: float) -> float:
        noise = self._rng.gauss(1.0, self.script.jitter) if self.script.jitter else 1.0
        return max(0.0, mean_s * self.script.slowdown * noise)


def prompt_words(body: dict[str, Any]) -> list[str]:
    """Return the words of a request's prompt, the system text first."""
    if "prompt" in body:
        return str(body["prompt"]).split()
    messages = body.get("messages") or body.get("input") or []
    texts = [str(body.get("system", "")), *(str(message["content"]) for message in messages)]
    return " ".join(texts).split()


class VirtualConnection:
    """Stand in for the HTTP client: carry a script's responses in the loop's own time.

    `cut` turns the blocks of one response into others, with the arrival of each.
    """

    def __init__(self, server: ServerScript, address: Any, cut: Callable[..., Any] | None) -> None:
        self.address = address
        self._server = server
        self._cut = cut

    async def open(self, num_connections: int) -> None:
        """Do nothing: there is no connection."""

    def close(self) -> None:
        """Do nothing: there is no connection."""

    async def exchange(self, request: Any, sink: Any, timeout_s: float) -> Any:
        """Feed the response to `sink` at its times."""
        from vllm_mlx.bench.http_client import Exchanged

        loop = asyncio.get_running_loop()
        body = json.loads(request.body) if request.body else None
        headers = dict(request.headers)
        key = headers.get("authorization", "").removeprefix("Bearer ") or headers.get("x-api-key")
        scripted = self._server.respond(request.method, request.path, body, key)
        sink.started(loop.time())
        pieces = scripted.pieces if self._cut is None else self._cut(scripted.pieces)
        sink.head(scripted.status, scripted.content_type, loop.time())
        for delay, block in pieces:
            await asyncio.sleep(delay)
            sink.body(block, loop.time())
        return Exchanged(loop.time(), 0.0, {"content-type": scripted.content_type})


def connect_to(server: ServerScript, cut: Callable[..., Any] | None = None) -> Any:
    """Return what a session calls to connect, in virtual time."""
    return lambda address: VirtualConnection(server, address, cut)


async def serve(server: ServerScript, port: int = 0) -> asyncio.Server:
    """Serve a script, on a free port for 0; `/_log` tells when requests came and words went."""
    log: list[dict[str, Any]] = []
    loop = asyncio.get_running_loop()
    return await loop.create_server(lambda: _Served(server, log), "127.0.0.1", port, backlog=1024)


class _Served(asyncio.Protocol):
    """Serve one connection; stamps as closely as it can, so that its own time is little."""

    def __init__(self, server: ServerScript, log: list[dict[str, Any]]) -> None:
        self._server = server
        self._log = log
        self._loop = asyncio.get_running_loop()
        self._arrived_at = arrival_clock(self._loop)
        self._pending = b""
        self._transport: Any = None
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def data_received(self, data: bytes) -> None:
        received = self._arrived_at()
        self._pending += data
        head, separator, rest = self._pending.partition(b"\r\n\r\n")
        if not separator:
            return
        first, *lines = head.decode("latin-1").split("\r\n")
        named = (line.partition(":") for line in lines)
        headers = {name.lower(): value.strip() for name, _, value in named}
        length = int(headers.get("content-length", 0))
        if len(rest) < length:
            return
        self._pending = rest[length:]
        method, path, _ = first.split(" ")
        self._answer(method, path, headers, rest[:length], received)

    def _answer(
        self, method: str, path: str, headers: dict[str, str], raw: bytes, received: float
    ) -> None:
        if path == "/_log":
            self._send_whole(200, JSON, json.dumps(self._log).encode())
            self._log.clear()
            return
        key = headers.get("authorization", "").removeprefix("Bearer ") or headers.get("x-api-key")
        body = json.loads(raw) if raw else None
        scripted = self._server.respond(method, path, body, key)
        if scripted.content_type != "text/event-stream":
            whole = b"".join(block for _, block in scripted.pieces)
            delay = sum(delay for delay, _ in scripted.pieces)
            arguments = (scripted.status, scripted.content_type, whole)
            self._timer = self._loop.call_later(delay, self._send_whole, *arguments)
            return
        head = f"HTTP/1.1 200 OK\r\ncontent-type: {scripted.content_type}\r\n"
        self._transport.write(head.encode() + b"transfer-encoding: chunked\r\n\r\n")
        entry = {"path": path, "received": received, "sent": []}
        self._schedule(_batches(scripted.pieces), 0, received, entry)

    def _schedule(
        self, batches: list[tuple[float, bytes]], index: int, due: float, entry: dict[str, Any]
    ) -> None:
        """Wait for the next batch, or end the response after the last."""
        if index == len(batches):
            self._transport.write(b"0\r\n\r\n")
            self._log.append(entry)
            return
        due += batches[index][0]
        self._timer = self._loop.call_at(due, self._send, batches, index, due, entry)

    def _send(
        self, batches: list[tuple[float, bytes]], index: int, due: float, entry: dict[str, Any]
    ) -> None:
        delay, block = batches[index]
        if delay:
            entry["sent"].append(self._loop.time())
        self._transport.write(b"%x\r\n%s\r\n" % (len(block), block))
        self._schedule(batches, index + 1, due, entry)

    def _send_whole(self, status: int, kind: str, body: bytes) -> None:
        head = f"HTTP/1.1 {status} Scripted\r\ncontent-type: {kind}\r\n"
        length = f"content-length: {len(body)}\r\n\r\n"
        self._transport.write(head.encode() + length.encode() + body)


def _batches(pieces: list[tuple[float, bytes]]) -> list[tuple[float, bytes]]:
    """Join what has no delay to what comes before it."""
    batches: list[tuple[float, bytes]] = []
    for delay, block in pieces:
        if batches and delay == 0:
            batches[-1] = (batches[-1][0], batches[-1][1] + block)
        else:
            batches.append((delay, block))
    return batches


def _json(status: int, body: dict[str, Any]) -> Scripted:
    return Scripted(status=status, pieces=[(0.0, json.dumps(body).encode())])


async def _main(fields: dict[str, Any]) -> None:
    fields["models"] = tuple(fields.get("models", Script.models))
    port = fields.pop("port", 0)
    server = await serve(ServerScript(Script(**fields)), port)
    print(server.sockets[0].getsockname()[1], flush=True)  # noqa: T201
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt), asyncio.Runner(loop_factory=MeasuringLoop) as it:
        it.run(_main(json.loads(sys.argv[1])))
