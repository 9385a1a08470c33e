"""Send the requests of a run: encode them beforehand, record what comes back."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping
from typing import Any

import msgspec

from vllm_mlx.bench.endpoints import Ask, Endpoint
from vllm_mlx.bench.http_client import Exchanged, HttpClient, HttpRequest
from vllm_mlx.bench.http_connection import ExchangeError, Sink
from vllm_mlx.bench.timeline import RequestRecord, RequestRecorder


@dataclasses.dataclass(frozen=True, slots=True)
class Reply:
    """Hold a small response that is not measured."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        """Return the body's JSON, None if it is none."""
        try:
            return msgspec.json.decode(self.body)
        except msgspec.DecodeError:
            return None


class _ReplySink:
    """Gather a small response."""

    def __init__(self) -> None:
        self.status = 0
        self.blocks: list[bytes] = []

    def started(self, at: float) -> None:
        del at
        self.blocks.clear()

    def head(self, status: int, content_type: str, at: float) -> None:
        del content_type, at
        self.status = status

    def body(self, block: bytes, at: float) -> None:
        del at
        self.blocks.append(block)


class Requester:
    """Ask one server; owns nothing, shares the client with the rest of the run."""

    def __init__(
        self, client: HttpClient, endpoint: Endpoint, *, api_key: str | None, timeout_s: float
    ) -> None:
        self.endpoint = endpoint
        self._client = client
        self._api_key = api_key
        self._timeout_s = timeout_s
        self._headers = (
            *endpoint.headers(api_key).items(),
            ("content-type", "application/json"),
            ("accept", "text/event-stream, application/json"),
        )

    @property
    def client(self) -> HttpClient:
        """Return the client that sends."""
        return self._client

    def encode(self, ask: Ask) -> HttpRequest:
        """Return the request that asks for `ask`."""
        body = msgspec.json.encode(self.endpoint.body(ask))
        return HttpRequest("POST", self.endpoint.path, self._headers, body)

    async def send(self, request: HttpRequest, recorder: RequestRecorder) -> RequestRecord:
        """Send a request and return its record; the server's faults are the record's failure."""
        loop = asyncio.get_running_loop()
        try:
            done = await self._client.exchange(request, recorder, self._timeout_s)
        except ExchangeError as error:
            recorder.failed(error.kind, error.message)
            return recorder.ended(loop.time())
        recorder.connect_s = done.connect_s
        return recorder.ended(done.ended_at)

    async def get(self, path: str) -> Reply:
        """Return the response to a GET; raises `ExchangeError` when there is none."""
        return await self._ask(HttpRequest("GET", path, self._key_headers()))

    async def post(self, path: str, body: Mapping[str, Any]) -> Reply:
        """Return the response to a POST of JSON; raises `ExchangeError` when there is none."""
        headers = (*self._key_headers(), ("content-type", "application/json"))
        return await self._ask(HttpRequest("POST", path, headers, msgspec.json.encode(body)))

    async def delete(self, path: str) -> Reply:
        """Return the response to a DELETE; raises `ExchangeError` when there is none."""
        return await self._ask(HttpRequest("DELETE", path, self._key_headers()))

    async def _ask(self, request: HttpRequest) -> Reply:
        sink = _ReplySink()
        checked: Sink = sink
        done: Exchanged = await self._client.exchange(request, checked, self._timeout_s)
        return Reply(sink.status, done.headers, b"".join(sink.blocks))

    def _key_headers(self) -> tuple[tuple[str, str], ...]:
        if self._api_key is None:
            return ()
        # Routes of either API may take part; each looks at its own header.
        return (
            ("authorization", f"Bearer {self._api_key}"),
            ("x-api-key", self._api_key),
        )
