"""What one running server is made of; the routes receive it whole."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from vllm_mlx.engine.config import EngineConfig, ModelConfig
from vllm_mlx.server.admission import not_ready_error
from vllm_mlx.server.anthropic.chat_input import ChatSettings
from vllm_mlx.server.config import ServerConfig
from vllm_mlx.server.engine_port import EnginePort
from vllm_mlx.server.generation import GenerationRegistry
from vllm_mlx.server.metrics import ServerMetrics
from vllm_mlx.server.no_chat import no_chat_error
from vllm_mlx.server.recording import RequestRecorder
from vllm_mlx.server.request_log import log_prompt
from vllm_mlx.server.request_record import RequestRecords
from vllm_mlx.server.responses_api.store import ResponseStore
from vllm_mlx.server.served_model import ModelNames, ServedModel
from vllm_mlx.server.services.hosted import HostedService
from vllm_mlx.server.services.plan import ServicePlan
from vllm_mlx.server.services.port import ServicePort
from vllm_mlx.server.services.registry import ServiceRegistry
from vllm_mlx.server.tokenizer_pool import TextCodec, TokenizerPool
from vllm_mlx.server.unknown_fields import UnknownFields
from vllm_mlx.server.warm_prompts import RECORDED_PATHS
from vllm_mlx.server.warmer import PrefixWarmer

Result = TypeVar("Result")

#: Loads the tokenizer of a model folder; (folder, trust_remote_code).
LoadTokenizer = Callable[[Path, bool], TextCodec]


class ServerRuntime:
    """Own the server's mutable state; event loop only.

    `load` completes it once the engine has the model; until then `require_ready` refuses.
    """

    def __init__(
        self,
        config: ServerConfig,
        model: ModelConfig,
        engine_config: EngineConfig,
        engine: EnginePort,
        load_tokenizer: LoadTokenizer,
        recorder: RequestRecorder | None = None,
        services: Sequence[tuple[ServicePlan, ServicePort]] = (),
    ) -> None:
        """Take over `recorder`, which is closed with this.

        `services` are the engines beside the chat model, or instead of it: then `engine` is a
        `NoChatEngine`.
        """
        self.config = config
        self.engine = engine
        self.engine_config = engine_config
        self.recorder = recorder
        self.names = _names(config, model, services)
        self.unknown_fields = UnknownFields(strict=config.strict_fields)
        self.metrics = ServerMetrics(self.names.primary)
        self.records = RequestRecords(self.metrics)
        engine.on_stats(self.metrics.take_engine)
        self.generations = GenerationRegistry(
            engine,
            max_rows=engine_config.max_num_seqs,
            max_queue=config.max_queue,
            max_queue_tokens=config.max_queue_tokens,
            keep_alive_s=config.keep_alive_s,
            timeout_s=config.timeout_s,
            records=self.records,
        )
        #: How chats are made of what comes to Anthropic's routes, and of what is warmed for them.
        self.chat_settings = ChatSettings(config.normalize_prompts, model.chat.template_kwargs)
        self.warmer = PrefixWarmer(
            engine,
            self.generations,
            block_size=engine_config.cache_block_size,
            settings=self.chat_settings,
        )
        #: What clients of the Responses API may come back to.
        self.responses = ResponseStore()
        self.services = ServiceRegistry(
            [_hosted(plan, port, self.metrics, config) for plan, port in services]
        )
        self.started = time.monotonic()
        self._model = model
        self._load_tokenizer = load_tokenizer
        self._served: ServedModel | None = None
        # One thread: however many large bodies come at once, the event loop shares with one.
        self._aside = ThreadPoolExecutor(1, thread_name_prefix="bodies")

    @property
    def is_ready(self) -> bool:
        """Say whether the chat model answers now."""
        return self._served is not None and self.engine.state.phase == "ready"

    @property
    def is_serving(self) -> bool:
        """Say whether requests of every kind would be answered, or of those without chat."""
        if not self.config.serves_chat:
            return self.services.is_ready
        return self.is_ready and self.services.is_loaded

    def is_chat_name(self, name: str) -> bool:
        """Say whether requests may call the chat model so."""
        return self.config.serves_chat and self.names.knows(name)

    @property
    def served(self) -> ServedModel | None:
        """Return the model, also while its engine restarts; None before it was first loaded."""
        return self._served

    def require_ready(self) -> ServedModel:
        """Return the model; raise `EngineUnavailableError` while it does not answer.

        Raises `ModelUnknownError` where the server has no chat model.
        """
        if not self.config.serves_chat:
            raise no_chat_error()
        if self._served is None or not self.is_ready:
            raise not_ready_error(self.engine.state)
        return self._served

    async def load(self) -> ServedModel:
        """Wait for the engine and load the tokenizer; raise `ModelLoadError` when either fails."""
        info = await self.engine.wait_ready()
        tokenizer = await asyncio.to_thread(
            self._load_tokenizer, Path(info.path), self._model.trust_remote_code
        )
        self.names.also({info.model, info.path})
        # Trying the template out takes a moment; it is shared by the copies made after it.
        formats = await asyncio.to_thread(lambda: tokenizer.formats)
        pool = TokenizerPool(tokenizer, self.config.tokenizer_threads)
        self._served = ServedModel(info, pool, int(time.time()), formats)
        return self._served

    def accepted(self, request_id: str, path: str, body: bytes) -> None:
        """Keep the JSON body of an accepted request, where and as the user wants that."""
        if self.recorder is not None and path in RECORDED_PATHS:
            # Others `warm` could not read.
            self.recorder.record(path, body)
        if self.config.log_prompts:
            log_prompt(request_id, body)

    async def run_aside(self, work: Callable[[], Result]) -> Result:
        """Do `work`, which is pure and too long for the event loop, on the thread for that."""
        return await asyncio.get_running_loop().run_in_executor(self._aside, work)

    def close(self) -> None:
        """Let go of the threads, and write what is still to be recorded."""
        self._aside.shutdown(wait=False, cancel_futures=True)
        if self._served is not None:
            self._served.tokenizers.close()
        if self.recorder is not None:
            self.recorder.close()


def _hosted(
    plan: ServicePlan, port: ServicePort, metrics: ServerMetrics, config: ServerConfig
) -> HostedService:
    return HostedService(
        plan,
        port,
        metrics,
        max_queue=config.max_queue,
        timeout_s=config.timeout_s,
        loads_on_demand=config.loads_on_demand,
    )


def _names(
    config: ServerConfig, model: ModelConfig, services: Sequence[tuple[ServicePlan, ServicePort]]
) -> ModelNames:
    """Return the names of the chat model; without one, those of the first service."""
    if config.serves_chat or not services:
        aliases = [name for name, _ in config.model_aliases]
        return ModelNames(model.model, config.served_model_name, aliases)
    return ModelNames(services[0][0].model, services[0][0].served_name)
