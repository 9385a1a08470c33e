"""The chat backend that runs the model in this process."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Protocol

from vllm_mlx.cli.chat_backends import AnswerDelta, ChatSampling, Usage
from vllm_mlx.cli.chat_session import Message
from vllm_mlx.cli.engine_thread import EngineThread, ProgressCallback, StepEngine
from vllm_mlx.engine.config import EngineConfig, ModelConfig, ModelInfo
from vllm_mlx.engine.core.outputs import RowOutput, pack_tokens
from vllm_mlx.engine.core.request import GenerationRequest, SamplingParams
from vllm_mlx.engine.errors import UnsupportedModelError
from vllm_mlx.engine.platform import require_backend
from vllm_mlx.server.config import FALLBACK_TEMPERATURE, FALLBACK_TOP_P

CLOSE_TIMEOUT_S = 10.0


class ChatTokenizer(Protocol):
    """Name the part of `Tokenizer` that a chat needs."""

    @property
    def has_chat_template(self) -> bool:
        """Say whether the model knows how to chat."""
        ...

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Return the prompt's token ids."""
        ...


class EngineBackend:
    """Ask the engine of this process; owns its thread. Made by `open_engine_backend`."""

    def __init__(self, thread: EngineThread, info: ModelInfo, tokenizer: ChatTokenizer) -> None:
        self._thread = thread
        self._info = info
        self._tokenizer = tokenizer

    @property
    def model_name(self) -> str:
        """Return the model as the user named it."""
        return self._info.model

    def answer(
        self, messages: Sequence[Message], sampling: ChatSampling
    ) -> Generator[AnswerDelta, None, None]:
        """Yield the answer step by step; closing the generator aborts the row."""
        prompt = self._tokenizer.encode_chat(
            [{"role": message.role, "content": message.content} for message in messages]
        )
        request = GenerationRequest(
            request_id=uuid.uuid4().hex,
            prompt=pack_tokens(prompt),
            sampling=resolved_sampling(sampling, self._info.generation_defaults),
        )
        is_over = False
        try:
            self._thread.add(request)
            while not is_over:
                output = self._thread.next_output(request.request_id)
                is_over = output.finish_reason is not None
                if output.error is not None:
                    raise output.error.to_error()
                yield delta_of(output)
        finally:
            if not is_over:
                self._thread.abort(request.request_id)

    def close(self) -> None:
        """Close the engine, waiting for the step that it is in."""
        self._thread.close(CLOSE_TIMEOUT_S)


def open_engine_backend(
    thread: EngineThread,
    load_chat_tokenizer: Callable[[Path], ChatTokenizer],
    on_progress: ProgressCallback,
) -> EngineBackend:
    """Load the model on `thread`, and the tokenizer that belongs to it.

    Raises `ModelLoadError`.
    """
    info = thread.start(on_progress)
    with contextlib.ExitStack() as undo:
        undo.callback(thread.close, CLOSE_TIMEOUT_S)
        tokenizer = load_chat_tokenizer(Path(info.path))
        if not tokenizer.has_chat_template:
            raise UnsupportedModelError(
                f"{info.model} has no chat template, so it cannot chat; take an instruct model"
            )
        undo.pop_all()
    return EngineBackend(thread, info, tokenizer)


def engine_thread(model: ModelConfig, engine: EngineConfig) -> EngineThread:
    """Return a thread that will load `model`; MLX is imported on that thread."""

    def load(on_progress: ProgressCallback) -> StepEngine:
        # Before anything imports MLX, which binds its BLAS then.
        require_backend()
        from vllm_mlx.engine.models.loader import load_engine

        return load_engine(model, engine, on_progress)

    return EngineThread(load)


def delta_of(output: RowOutput) -> AnswerDelta:
    """Return what an engine's output says of the answer."""
    return AnswerDelta(
        text=output.text,
        finish_reason=output.finish_reason,
        usage=Usage(
            prompt_tokens=output.num_prompt_tokens,
            completion_tokens=output.num_completion_tokens,
            cached_tokens=output.num_cached_tokens,
        ),
    )


def resolved_sampling(sampling: ChatSampling, defaults: dict[str, float]) -> SamplingParams:
    """Return the sampling with the model's `defaults` in place of what was left open.

    Falls back as the server does, so that `--url` answers alike.
    """

    def pick(name: str, given: float | None, fallback: float) -> float:
        return defaults.get(name, fallback) if given is None else given

    return SamplingParams(
        temperature=pick("temperature", sampling.temperature, FALLBACK_TEMPERATURE),
        top_p=pick("top_p", sampling.top_p, FALLBACK_TOP_P),
        top_k=int(pick("top_k", sampling.top_k, 0)),
        min_p=pick("min_p", sampling.min_p, 0.0),
        repetition_penalty=pick("repetition_penalty", None, 1.0),
        seed=sampling.seed,
        max_tokens=sampling.max_tokens,
        stop=sampling.stop,
    )
