"""An engine process without a model: the real worker around a small engine that echoes and fails.

The model name is a JSON object of `FakeModel`; the first prompt token of a request is one of the
commands below. Run as a script, it takes the place of the worker module.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import signal
import sys
import threading
import time
from concurrent.futures import Future
from pathlib import Path

import msgspec

from vllm_mlx.engine.config import EngineConfig, ModelConfig, ModelInfo
from vllm_mlx.engine.core.outputs import (
    ErrorInfo,
    FinishReason,
    RowOutput,
    StepOutputs,
    pack_tokens,
    unpack_tokens,
)
from vllm_mlx.engine.core.prefixes import Clearing
from vllm_mlx.engine.core.request import GenerationRequest
from vllm_mlx.engine.core.stats import EngineStats
from vllm_mlx.engine.errors import InsufficientMemoryError
from vllm_mlx.engine.host.worker import ProgressCallback, end_process, main

#: Generate `max_tokens` tokens.
ECHO = 0
#: Raise out of `step` after one token.
RAISE = 1
#: Die by SIGKILL after one token.
KILL = 2
#: Hold the main thread in a Python loop after one token, for ever.
SPIN = 3
#: End with an error of this row.
FAIL_ROW = 4
#: Die by SIGKILL before any output.
KILL_FIRST = 5
#: Sleep in native code that keeps the interpreter's lock, after one token.
HOLD_LOCK = 6
#: Before any output start a child that holds the socket and the log open; die by SIGKILL.
SPAWN_AND_KILL = 7
#: Hold the main thread in a Python loop before any output, for ever.
SPIN_FIRST = 8


class FakeModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Say how the fake loads and how fast it steps."""

    step_s: float = 0.002
    load_s: float = 0.0
    #: `memory` (an error of the tree), `bug` (another exception) or None.
    load_failure: str | None = None
    #: The first so many loads end by SIGKILL; they are counted in `count_file`.
    num_load_deaths: int = 0
    count_file: str = ""
    #: Loads after this one fail with an error of the tree.
    num_good_loads: int | None = None
    close_s: float = 0.0
    #: How long removing prefixes from SSD takes.
    clear_s: float = 0.0


class FakeEngine:
    """Echo the prompt of each request, one token a step, at a given pace."""

    def __init__(self, model: FakeModel, name: str) -> None:
        self.info = ModelInfo(
            model=name,
            path="",
            model_type="fake",
            max_model_len=1 << 20,
            dtype="float32",
            weights_bytes=0,
            kv_bytes_per_token=0,
            kv_budget_bytes=0,
            kv_max_tokens=1 << 20,
            device="cpu",
        )
        self._model = model
        self._open: dict[str, tuple[GenerationRequest, list[int], int]] = {}
        self._aborted: set[str] = set()
        self._num_steps = 0
        self._num_finished = 0

    @property
    def has_work(self) -> bool:
        """Say whether a request is open."""
        return bool(self._open)

    def add_request(self, request: GenerationRequest) -> None:
        """Open a request."""
        self._open[request.request_id] = (request, unpack_tokens(request.prompt), 0)

    def abort(self, request_id: str) -> None:
        """Let the next step end the request."""
        if request_id in self._open:
            self._aborted.add(request_id)

    def step(self) -> StepOutputs:
        """Give every open request its next token."""
        time.sleep(self._model.step_s)
        self._num_steps += 1
        rows = tuple(self._advance(request_id) for request_id in list(self._open))
        return StepOutputs(rows=rows)

    def stats(self) -> EngineStats:
        """Count steps and requests."""
        return EngineStats(
            steps_executed=self._num_steps,
            num_running=len(self._open),
            requests_finished=self._num_finished,
        )

    def clear_prefixes(self, *, ram: bool, ssd: bool) -> Clearing:
        """Say that 3 blocks and, after a while, 2 files are gone, or that the disk is broken."""
        logging.getLogger("vllm_mlx.fake").debug("clearing")
        num_runs: Future[int] = Future()
        if ssd:
            threading.Timer(self._model.clear_s, num_runs.set_result, (2,)).start()
        return Clearing(3 * ram, num_runs if ssd else None)

    def idle(self) -> bool:
        """Have nothing that can wait."""
        return False

    def close(self) -> None:
        """Take as long as told."""
        time.sleep(self._model.close_s)
        logging.getLogger("fake").warning("closed")

    def _advance(self, request_id: str) -> RowOutput:
        request, prompt, num_done = self._open[request_id]
        command = prompt[0]
        _misbehave(command, num_done)
        finish_reason: FinishReason | None = None
        error: ErrorInfo | None = None
        if request_id in self._aborted:
            finish_reason = "abort"
        elif command == FAIL_ROW:
            finish_reason = "error"
            error = ErrorInfo.of(ValueError("a bad row"))
        elif num_done + 1 >= request.sampling.max_tokens:
            finish_reason = "length"
        if finish_reason is not None:
            del self._open[request_id]
            self._aborted.discard(request_id)
            self._num_finished += 1
        else:
            self._open[request_id] = (request, prompt, num_done + 1)
        has_token = finish_reason in (None, "length")
        return RowOutput(
            request_id=request_id,
            text=f"{num_done} " if has_token else "",
            token_ids=pack_tokens([prompt[num_done % len(prompt)]]) if has_token else b"",
            finish_reason=finish_reason,
            error=error,
            num_prompt_tokens=len(prompt),
            num_completion_tokens=num_done + has_token,
        )


def _misbehave(command: int, num_done: int) -> None:
    if command == SPAWN_AND_KILL:
        os.set_inheritable(int(sys.argv[-1]), True)
        os.posix_spawnp("sleep", ["sleep", "3"], os.environ)
    if command in (KILL_FIRST, SPAWN_AND_KILL):
        os.kill(os.getpid(), signal.SIGKILL)
    while command == SPIN_FIRST:
        pass
    if num_done == 0:
        return
    if command == RAISE:
        raise RuntimeError("the step failed")
    if command == HOLD_LOCK:
        ctypes.PyDLL(None).sleep(600)
    if command == KILL:
        os.kill(os.getpid(), signal.SIGKILL)
    while command == SPIN:
        pass


def load(config: ModelConfig, engine: EngineConfig, on_progress: ProgressCallback) -> FakeEngine:
    """Load as the model's name says."""
    model = msgspec.convert(json.loads(config.model), FakeModel)
    num_loads = 0
    if model.count_file:
        with Path(model.count_file).open("a") as counter:
            counter.write("x")
        num_loads = Path(model.count_file).stat().st_size
    on_progress("loading weights", 0.5)
    time.sleep(model.load_s)
    if num_loads and num_loads <= model.num_load_deaths:
        print("about to die", flush=True)  # noqa: T201
        os.kill(os.getpid(), signal.SIGKILL)
    if model.num_good_loads is not None and num_loads > model.num_good_loads:
        raise InsufficientMemoryError("not enough memory now")
    if model.load_failure == "memory":
        raise InsufficientMemoryError("12 GiB do not fit")
    if model.load_failure == "bug":
        raise KeyError("hidden_size")
    return FakeEngine(model, config.model)


if __name__ == "__main__":
    if "--garbage" in sys.argv:
        os.write(int(sys.argv[-1]), b"\xff" * 64)
        time.sleep(60)
    end_process(main(load=load))
