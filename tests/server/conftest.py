"""A server without a model: the real application over an engine and a tokenizer made of text."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from quart.typing import TestClientProtocol
from support.grammar_tokens import ByteTokens

from vllm_mlx.engine.config import EngineConfig, ModelConfig, ModelInfo
from vllm_mlx.engine.core.grammar import GrammarCompiler
from vllm_mlx.engine.core.outputs import ErrorInfo, FinishReason, RowOutput
from vllm_mlx.engine.core.request import GenerationRequest
from vllm_mlx.engine.core.stats import CacheCleared, EngineStats
from vllm_mlx.engine.errors import EngineUnavailableError, InvalidRequestError, VllmMlxError
from vllm_mlx.engine.host.stream import RequestStream
from vllm_mlx.engine.text.chat_formats import ChatFormats
from vllm_mlx.server.app import create_app
from vllm_mlx.server.config import ServerConfig
from vllm_mlx.server.engine_port import StatsListener
from vllm_mlx.server.recording import RequestRecorder
from vllm_mlx.server.runtime import ServerRuntime

#: No process has it, should anything ever signal it.
FAKE_PID = 2**30

MODEL_INFO = ModelInfo(
    model="org/model",
    path="/models/org--model",
    model_type="fake",
    max_model_len=100,
    dtype="float32",
    weights_bytes=1_000_000,
    kv_bytes_per_token=10,
    kv_budget_bytes=2_000_000,
    kv_max_tokens=200_000,
    device="cpu",
    blas="libopenblas",
    generation_defaults={"temperature": 0.6, "top_k": 20},
    pid=FAKE_PID,
)


@dataclass(frozen=True)
class FakeCondition:
    """Hold an engine's condition as a test wants it."""

    phase: str = "ready"
    stage: str = ""
    fraction: float | None = None
    error: VllmMlxError | None = None
    retry_after_s: float | None = None
    pid: int | None = FAKE_PID
    num_restarts: int = 0


@dataclass
class FakeEngine:
    """Answer every request with `texts`, or, held, with what the test puts into its stream."""

    texts: list[str] = field(default_factory=lambda: ["Hello", " world"])
    finish_reason: FinishReason = "stop"
    error: ErrorInfo | None = None
    is_held: bool = False
    info: ModelInfo | None = MODEL_INFO
    state: FakeCondition = field(default_factory=FakeCondition)
    engine_stats: EngineStats = field(default_factory=EngineStats)
    requests: list[GenerationRequest] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    streams: dict[str, RequestStream] = field(default_factory=dict)
    drain_until: float = float("inf")
    tell: StatsListener = lambda stats, pid: None

    async def start(self) -> None:
        """Do nothing: it is as `state` says."""

    async def stop(self, drain_timeout_s: float) -> None:
        """Wait for what is open, then abort it; a second call ends the waiting of the first."""
        self.set(phase="draining")
        self.drain_until = min(self.drain_until, time.monotonic() + drain_timeout_s)
        while time.monotonic() < self.drain_until:
            if all(stream.is_finished for stream in self.streams.values()):
                break
            await asyncio.sleep(0.005)
        self.set(phase="stopped", pid=None)
        for stream in self.streams.values():
            stream.end("abort")

    async def wait_ready(self) -> ModelInfo:
        """Return what is loaded."""
        assert self.info is not None
        return self.info

    async def wait_for_change(self, seen: FakeCondition) -> FakeCondition:
        """Poll."""
        while self.state is seen:
            await asyncio.sleep(0.005)
        return self.state

    async def sleep(self) -> None:
        """Let the server work a little."""
        await asyncio.sleep(0.002)

    def set(self, **changes: Any) -> None:
        """Change the condition."""
        self.state = replace(self.state, **changes)

    def generate(self, request: GenerationRequest) -> RequestStream:
        """Take one request."""
        if self.state.phase != "ready":
            raise EngineUnavailableError(f"the engine is {self.state.phase}", retry_after_s=3.0)
        stream = RequestStream(request.request_id, self._leave)
        self.requests.append(request)
        self.streams[request.request_id] = stream
        if not self.is_held:
            loop = asyncio.get_running_loop()
            for number, text in enumerate(self.texts, start=1):
                loop.call_soon(self.put, request.request_id, text, number)
            loop.call_soon(self.finish, request.request_id, self.finish_reason, self.error)
        return stream

    def put(
        self, request_id: str, text: str, num_completion_tokens: int = 1, **fields: Any
    ) -> None:
        """Emit one token's text."""
        self.streams[request_id].put(
            RowOutput(
                request_id=request_id,
                text=text,
                num_prompt_tokens=self._prompt_length(request_id),
                num_completion_tokens=num_completion_tokens,
                **fields,
            )
        )

    def finish(
        self, request_id: str, reason: FinishReason = "stop", error: ErrorInfo | None = None
    ) -> None:
        """Emit the final output."""
        self.streams[request_id].put(
            RowOutput(
                request_id=request_id,
                finish_reason=reason,
                error=error,
                num_prompt_tokens=self._prompt_length(request_id),
                num_cached_tokens=1,
                num_completion_tokens=len(self.texts),
            )
        )

    def abort(self, request_id: str) -> bool:
        """End a request as the real engine does, with a final output."""
        self.aborted.append(request_id)
        if self.streams[request_id].is_finished:
            return False
        self.finish(request_id, "abort")
        return True

    def on_stats(self, listener: StatsListener) -> None:
        """Tell nothing unasked; a test calls `tell`."""
        self.tell = listener

    async def stats(self, timeout_s: float = 1.0) -> EngineStats:
        """Return what the test prepared."""
        if self.state.phase != "ready":
            raise EngineUnavailableError("no engine")
        return self.engine_stats

    async def clear_cache(self, *, ram: bool, ssd: bool) -> CacheCleared:
        """Say that one thing of each tier is gone."""
        if self.state.phase != "ready":
            raise EngineUnavailableError("no engine")
        return CacheCleared(num_blocks=int(ram), num_runs=int(ssd))

    def _leave(self, request_id: str) -> None:
        self.left.append(request_id)
        self.streams[request_id].end("abort")

    def _prompt_length(self, request_id: str) -> int:
        return next(len(r.prompt) // 4 for r in self.requests if r.request_id == request_id)


class FakeTokenizer:
    """Make each character one token; record the chats that it renders."""

    vocab_size = 0x110000
    has_chat_template = True

    def __init__(self, formats: ChatFormats | None = None) -> None:
        self.chats: list[tuple[list[Mapping[str, Any]], dict[str, Any]]] = []
        self.formats = formats or ChatFormats()
        self.grammars = GrammarCompiler(ByteTokens())

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the code points, after a 1 for the beginning."""
        return [1] * add_special_tokens + [ord(character) for character in text]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the characters."""
        return "".join(chr(token) for token in token_ids)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the character; the ids up to 4 are the bytes of an emoji, one each."""
        emoji = "\N{GRINNING FACE}".encode()
        return emoji[token_id - 1 : token_id] if 1 <= token_id <= 4 else chr(token_id).encode()

    def token_offsets(self, token_ids: Sequence[int], text: str) -> list[int]:
        """Count one character for each token, but none for the beginning."""
        missing = len(token_ids) - len(text)
        return [max(0, index - missing) for index in range(len(token_ids))]

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **template_kwargs: Any) -> str:
        """Join the contents; refuse one that says `bad`."""
        self.chats.append((list(messages), template_kwargs))
        text = "".join(message["content"] for message in messages)
        if text == "bad":
            raise InvalidRequestError("the template refused it", param="messages")
        return text

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], **template_kwargs: Any
    ) -> list[int]:
        """Encode what is rendered."""
        return self.encode(self.render_chat(messages, **template_kwargs), add_special_tokens=False)

    def copy(self) -> FakeTokenizer:
        """Share the record."""
        return self


@dataclass
class Served:
    """Hold a server under test and the parts that a test looks at."""

    client: TestClientProtocol
    engine: FakeEngine
    tokenizer: FakeTokenizer
    runtime: ServerRuntime

    async def post(self, path: str, **body: Any) -> Any:
        """Post a JSON body and return the response."""
        return await self.client.post(path, json=body)

    async def chat(self, content: str = "hi", **fields: Any) -> Any:
        """Post a chat of one message."""
        messages = [{"role": "user", "content": content}]
        return await self.post("/v1/chat/completions", **{"messages": messages, **fields})

    async def die_after(self, text: str, error: ErrorInfo) -> None:
        """Play an engine that dies of `error` when the first row has said `text`."""
        while not self.engine.requests:
            await self.engine.sleep()
        request_id = self.engine.requests[0].request_id
        self.engine.put(request_id, text)
        await self.engine.sleep()
        self.engine.finish(request_id, "error", error)

    @asynccontextmanager
    async def driven_by(self, driver: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
        """Run `driver`, which plays the engine, beside what is inside."""
        task = asyncio.create_task(driver)
        try:
            yield
        finally:
            await task


ServerFactory = Callable[..., Any]


@pytest.fixture
async def make_server() -> AsyncIterator[ServerFactory]:
    """Return a function that makes a server from `ServerConfig` fields, and an engine if given."""
    runtimes: list[ServerRuntime] = []

    async def make(
        engine: FakeEngine | None = None,
        *,
        engine_config: EngineConfig | None = None,
        recorder: RequestRecorder | None = None,
        max_num_seqs: int = 4,
        load: bool = True,
        formats: ChatFormats | None = None,
        services: Sequence[Any] = (),
        **config: Any,
    ) -> Served:
        engine, tokenizer = engine or FakeEngine(), FakeTokenizer(formats)

        def load_tokenizer(path: Path, trust_remote_code: bool) -> FakeTokenizer:
            return tokenizer

        runtime = ServerRuntime(
            ServerConfig(**config),
            ModelConfig(model="org/model"),
            engine_config or EngineConfig(max_num_seqs=max_num_seqs),
            engine,
            load_tokenizer,
            recorder,
            services,
        )
        runtimes.append(runtime)
        if load and runtime.config.serves_chat:
            await runtime.load()
        return Served(create_app(runtime).test_client(), engine, tokenizer, runtime)

    yield make
    for runtime in runtimes:
        runtime.close()


@pytest.fixture
async def served(make_server: ServerFactory) -> Served:
    """Return a ready server with default settings."""
    server: Served = await make_server()
    return server


def events_of(body: bytes) -> list[Any]:
    """Return the payloads of a stream, `[DONE]` and comments as they are."""
    events = []
    for block in body.decode().split("\n\n"):
        if block.startswith(":"):
            events.append(block)
        elif block:
            assert block.startswith("data: "), block
            payload = block.removeprefix("data: ")
            events.append(payload if payload == "[DONE]" else json.loads(payload))
    return events


@pytest.fixture
def read_events() -> Callable[[bytes], list[Any]]:
    """Return the function that reads a stream's events."""
    return events_of
