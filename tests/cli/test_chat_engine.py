"""Hold the in-process backend of `chat` over an engine that speaks without a model."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from vllm_mlx.cli.chat_backends import ChatSampling
from vllm_mlx.cli.chat_engine import EngineBackend, open_engine_backend, resolved_sampling
from vllm_mlx.cli.chat_session import Message
from vllm_mlx.cli.engine_thread import EngineThread, ProgressCallback
from vllm_mlx.engine.config import ModelInfo
from vllm_mlx.engine.core.outputs import ErrorInfo, RowOutput, StepOutputs, unpack_tokens
from vllm_mlx.engine.core.request import GenerationRequest, SamplingParams
from vllm_mlx.engine.errors import (
    ContextLengthExceededError,
    ModelNotFoundError,
    UnsupportedModelError,
)

INFO = ModelInfo(
    model="fake",
    path="somewhere",
    model_type="fake",
    max_model_len=100,
    kv_max_tokens=100,
    dtype="float32",
    weights_bytes=1,
    kv_bytes_per_token=1,
    kv_budget_bytes=1,
    device="cpu",
    generation_defaults={"temperature": 0.6, "top_k": 20.0},
)
QUESTION = [Message("user", "Hi")]


class FakeEngine:
    """Answer each request with numbered words, one a step, until its `max_tokens`."""

    def __init__(self) -> None:
        self.info = INFO
        self.requests: list[GenerationRequest] = []
        self.threads: set[int] = set()
        self.num_steps = 0
        self.is_closed = False
        #: Called at the start of each step.
        self.before_step: Callable[[], None] = lambda: None
        self._rows: dict[str, int] = {}
        self._aborted: list[str] = []

    @property
    def has_work(self) -> bool:
        """Say whether rows run or final outputs are owed."""
        return bool(self._rows or self._aborted)

    def add_request(self, request: GenerationRequest) -> None:
        """Start a row."""
        self.threads.add(threading.get_ident())
        self.requests.append(request)
        self._rows[request.request_id] = 0

    def abort(self, request_id: str) -> None:
        """End a row."""
        if self._rows.pop(request_id, None) is not None:
            self._aborted.append(request_id)

    def step(self) -> StepOutputs:
        """Say one more word of every row."""
        self.before_step()
        self.threads.add(threading.get_ident())
        self.num_steps += 1
        rows = [RowOutput(request_id=name, finish_reason="abort") for name in self._aborted]
        self._aborted.clear()
        limits = {r.request_id: r.sampling.max_tokens for r in self.requests}
        for name, count in list(self._rows.items()):
            is_last = count + 1 == limits[name]
            rows.append(
                RowOutput(
                    request_id=name,
                    text=f"w{count} ",
                    finish_reason="length" if is_last else None,
                    num_prompt_tokens=3,
                    num_completion_tokens=count + 1,
                )
            )
            if is_last:
                del self._rows[name]
            else:
                self._rows[name] = count + 1
        return StepOutputs(rows=tuple(rows))

    def close(self) -> None:
        """Note that the engine was closed."""
        self.threads.add(threading.get_ident())
        self.is_closed = True


class FakeTokenizer:
    """Make one token of each message."""

    has_chat_template = True

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Return the lengths of the messages."""
        return [len(message["content"]) for message in messages]


@pytest.fixture
def engine() -> FakeEngine:
    """Give an engine without a model."""
    return FakeEngine()


@pytest.fixture
def backend(engine: FakeEngine) -> Iterator[EngineBackend]:
    """Give the backend over the engine."""
    thread = EngineThread(lambda on_progress: engine)
    opened = open_engine_backend(thread, lambda path: FakeTokenizer(), lambda stage, part: None)
    with contextlib.closing(opened):
        yield opened


def test_an_answer_comes_step_by_step(engine: FakeEngine, backend: EngineBackend) -> None:
    """Each step's text is one delta, and the last has the reason and the usage."""
    deltas = list(backend.answer(QUESTION, ChatSampling(max_tokens=3)))
    assert [delta.text for delta in deltas] == ["w0 ", "w1 ", "w2 "]
    assert [delta.finish_reason for delta in deltas] == [None, None, "length"]
    usage = deltas[-1].usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (3, 3, 0)
    assert unpack_tokens(engine.requests[0].prompt) == [2]


def test_one_thread_owns_the_engine(engine: FakeEngine, backend: EngineBackend) -> None:
    """Everything but asking happens on the engine's own thread, closing included."""
    list(backend.answer(QUESTION, ChatSampling(max_tokens=3)))
    backend.close()
    assert engine.is_closed
    assert len(engine.threads) == 1
    assert threading.get_ident() not in engine.threads


def test_leaving_an_answer_aborts_its_row(engine: FakeEngine, backend: EngineBackend) -> None:
    """The engine stops computing an answer that nobody reads, and answers the next question."""
    deltas = backend.answer(QUESTION, ChatSampling(max_tokens=10**9))
    assert next(deltas).text == "w0 "
    deltas.close()
    texts = [d.text for d in backend.answer(QUESTION, ChatSampling(max_tokens=2))]
    assert texts == ["w0 ", "w1 "]
    deadline = time.monotonic() + 5
    while engine.has_work and time.monotonic() < deadline:
        time.sleep(0.001)
    assert not engine.has_work


def test_an_interrupt_is_never_raised_in_a_step(engine: FakeEngine, backend: EngineBackend) -> None:
    """Ctrl-C strikes the thread that waits, while the engine's is in the middle of a step."""
    in_step, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        in_step.set()
        assert go_on.wait(5)

    engine.before_step = wait
    deltas = backend.answer(QUESTION, ChatSampling(max_tokens=10**9))
    interrupt = threading.Thread(target=_interrupt_main_after, args=(in_step,))
    interrupt.start()
    with pytest.raises(KeyboardInterrupt):
        next(deltas)
    interrupt.join()
    go_on.set()
    engine.before_step = lambda: None
    assert [d.text for d in backend.answer(QUESTION, ChatSampling(max_tokens=1))] == ["w0 "]


def _interrupt_main_after(event: threading.Event) -> None:
    assert event.wait(5)
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


def test_a_rows_error_is_raised_and_the_engine_goes_on(
    engine: FakeEngine, backend: EngineBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt that the engine refuses is the tree's error; the next one is answered."""

    def refuse() -> StepOutputs:
        monkeypatch.undo()
        engine._rows.clear()
        error = ErrorInfo("context_length_exceeded", "too long")
        name = engine.requests[-1].request_id
        return StepOutputs(rows=(RowOutput(request_id=name, finish_reason="error", error=error),))

    monkeypatch.setattr(engine, "step", refuse)
    with pytest.raises(ContextLengthExceededError, match="too long"):
        list(backend.answer(QUESTION, ChatSampling()))
    assert len(list(backend.answer(QUESTION, ChatSampling(max_tokens=2)))) == 2


def test_a_step_that_raises_ends_the_chat(engine: FakeEngine, backend: EngineBackend) -> None:
    """A defect of the engine is raised where the answer is read, rather than waited for."""

    def fail() -> None:
        raise ZeroDivisionError("a defect")

    engine.before_step = fail
    with pytest.raises(ZeroDivisionError, match="a defect"):
        list(backend.answer(QUESTION, ChatSampling()))
    backend.close()
    assert engine.is_closed


def test_loading_reports_and_fails_in_the_calling_thread() -> None:
    """Progress arrives where it can be shown, and so does the reason of a failed load."""
    shown: list[tuple[str, float | None, int]] = []

    def load(on_progress: ProgressCallback) -> FakeEngine:
        on_progress("loading weights", 0.5)
        raise ModelNotFoundError("no such model")

    def show(stage: str, fraction: float | None) -> None:
        shown.append((stage, fraction, threading.get_ident()))

    with pytest.raises(ModelNotFoundError, match="no such model"):
        open_engine_backend(EngineThread(load), lambda path: FakeTokenizer(), show)
    assert shown == [("loading weights", 0.5, threading.get_ident())]


def test_a_model_that_cannot_chat_is_refused(engine: FakeEngine) -> None:
    """A base model without a chat template is one clear error, and the engine is closed."""

    def tokenizer_of(path: Path) -> FakeTokenizer:
        tokenizer = FakeTokenizer()
        tokenizer.has_chat_template = False
        return tokenizer

    with pytest.raises(UnsupportedModelError, match="has no chat template"):
        open_engine_backend(EngineThread(lambda p: engine), tokenizer_of, lambda stage, part: None)
    assert engine.is_closed


def test_sampling_falls_back_to_the_model_then_to_the_servers_defaults() -> None:
    """What was asked wins, then the model's own, then what the server would take."""
    assert resolved_sampling(ChatSampling(), INFO.generation_defaults) == SamplingParams(
        temperature=0.6, top_p=0.9, top_k=20, max_tokens=4096
    )
    asked = ChatSampling(temperature=0.0, top_p=0.5, top_k=0, min_p=0.1, seed=7, stop=("x",))
    assert resolved_sampling(asked, INFO.generation_defaults) == SamplingParams(
        temperature=0.0, top_p=0.5, top_k=0, min_p=0.1, seed=7, max_tokens=4096, stop=("x",)
    )
