"""The engine: add requests, call `step` in a loop, and every request gets exactly one final output.

Synchronous: no threads, no asyncio. One thread owns an engine and all its MLX state.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Sequence

from vllm_mlx.engine.config import EngineConfig, ModelInfo
from vllm_mlx.engine.core.grammar_rows import GrammarRows
from vllm_mlx.engine.core.logprobs import Logprobs, TokenLogprob
from vllm_mlx.engine.core.memory_guard import MemoryGuard
from vllm_mlx.engine.core.output_processor import OutputProcessor, TokenDecoder
from vllm_mlx.engine.core.outputs import ErrorInfo, RowOutput, StepOutputs
from vllm_mlx.engine.core.prefill_groups import group_chunks
from vllm_mlx.engine.core.prefill_pace import PrefillPace
from vllm_mlx.engine.core.prefixes import Clearing, Prefixes
from vllm_mlx.engine.core.request import GenerationRequest
from vllm_mlx.engine.core.request_check import check_request
from vllm_mlx.engine.core.scheduler import PrefillChunk, Scheduler, StepPlan
from vllm_mlx.engine.core.sequence import Finish
from vllm_mlx.engine.core.sequence import Sequence as TokenSequence
from vllm_mlx.engine.core.stats import DeviceMemory, EngineStats
from vllm_mlx.engine.core.stats_builder import StatsBuilder
from vllm_mlx.engine.errors import RequestError, RowFailedError
from vllm_mlx.engine.kv.layout import KVLayout
from vllm_mlx.engine.run.runner import DrawnToken, Runner
from vllm_mlx.engine.run.scoring import not_numbers

logger = logging.getLogger(__name__)


class Engine:
    """Batch requests continuously over one model.

    `add_request` and `abort` may be called between steps; their outputs come out of `step`.
    """

    def __init__(
        self,
        info: ModelInfo,
        config: EngineConfig,
        runner: Runner,
        layout: KVLayout,
        make_decoder: Callable[[], TokenDecoder],
        *,
        vocab_size: int,
        prefixes: Prefixes,
        guard: MemoryGuard,
        grammars: GrammarRows,
        max_prefill_area: int | None,
        device_memory: Callable[[], DeviceMemory | None],
        release_memory: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.info = info
        self._runner = runner
        self._layout = layout
        self._scheduler = Scheduler(
            layout,
            max_num_seqs=config.max_num_seqs,
            prefill_tokens_per_step=config.prefill_tokens_per_step,
            admission_headroom_tokens=config.admission_headroom_tokens,
            max_prefill_area=max_prefill_area,
            prefixes=prefixes,
        )
        self._pace = PrefillPace(config.target_itl_s, config.prefill_tokens_per_step)
        self._prefixes = prefixes
        self._guard = guard
        self._grammars = grammars
        self._outputs = OutputProcessor(make_decoder)
        self._stats = StatsBuilder(clock)
        self._eos = frozenset(info.eos_token_ids)
        self._vocab_size = vocab_size
        self._device_memory = device_memory
        self._release_memory = release_memory
        self._clock = clock
        self._open: dict[str, TokenSequence] = {}
        self._refused: list[RowOutput] = []
        self._num_arrivals = 0

    @property
    def has_work(self) -> bool:
        """Say whether `step` has anything to do."""
        return bool(self._open or self._refused or self._scheduler.has_work)

    def add_request(self, request: GenerationRequest) -> None:
        """Take a request; one that cannot be served gets its error from the next `step`."""
        assert request.request_id not in self._open, f"{request.request_id} is open already"
        seed = request.sampling.seed
        sequence = TokenSequence.of(
            request,
            arrival=self._num_arrivals,
            seed=random.getrandbits(63) if seed is None else seed,
            max_model_len=min(self.info.max_model_len, self.info.kv_max_tokens),
            now_s=self._clock(),
        )
        self._num_arrivals += 1
        try:
            check_request(sequence, self.info, self._vocab_size)
            self._guard.check_room()
            self._grammars.open(sequence)
        except RequestError as error:
            self._refused.append(
                RowOutput(
                    request_id=sequence.id,
                    finish_reason="error",
                    error=ErrorInfo.of(error),
                    num_prompt_tokens=len(sequence.prompt),
                )
            )
            return
        if sequence.max_new_tokens == 0 and not sequence.wants_prompt_logprobs:
            sequence.finish = Finish("length")
        self._open[sequence.id] = sequence
        self._outputs.open(sequence)
        self._scheduler.add(sequence)

    def abort(self, request_id: str) -> None:
        """End a request; its final output comes from the next `step`. Unknown ids are ignored."""
        sequence = self._open.get(request_id)
        if sequence is not None and sequence.finish is None:
            sequence.finish = Finish("abort")

    def step(self) -> StepOutputs:
        """Compute one token for every running row and one budget of prefill.

        Between `collect` and `forward` nothing is in flight: rows join, leave and move there.
        What follows `forward` runs while the device computes.
        """
        self._stats.begin_step()
        try:
            tokens = self._runner.collect()
            self._pace.collected(self._clock())
            drawn = self._advance(tokens)
            self._grammars.release()
            self._release_finished()
            self._guard.relieve(self._scheduler, self._prefixes)
            self._scheduler.prefill_budget_beside_rows = self._pace.tokens
            plan = self._scheduler.schedule()
            self._stats.planned(plan)
            self._pace.planned(len(plan.decode), plan.num_prefill_tokens)
            self._grammars.begin(plan.decode)
            self._runner.forward(plan.decode)
            self._decode_text(drawn)
            self._runner.sample(plan.decode, self._eos, self._grammars.collect())
            self._prefill(plan)
            if plan.is_empty and self._scheduler.has_work:
                self._prefixes.wait()
                self._grammars.wait()
        except Exception as error:  # noqa: BLE001 - a device fault ends its rows, not the engine
            self._fail_all(error)
        if not self._scheduler.has_work:
            self._release_memory()
        rows = self._report()
        self._stats.end_step(self._scheduler)
        return StepOutputs(rows=rows)

    def stats(self) -> EngineStats:
        """Return a snapshot of the counters and of every open request."""
        return self._stats.snapshot(
            self._open.values(),
            self._scheduler,
            kv_bytes=self._layout.allocated_bytes,
            kv_budget_bytes=self.info.kv_budget_bytes,
            memory=self._device_memory(),
            memory_pressure=self._guard.state,
            prefixes=self._prefixes.stats(),
        )

    def close(self) -> None:
        """Drop every open request and what it holds, without outputs; store what is worth it."""
        self._runner.abandon()
        for sequence in self._open.values():
            self._scheduler.remove(sequence)
        self._open.clear()
        self._grammars.close()
        self._prefixes.close()

    def idle(self) -> bool:
        """Do a little of what can wait until there is no work; return whether there is more."""
        self._guard.relieve(self._scheduler, self._prefixes)
        return self._prefixes.persist()

    def store_prefixes(self, timeout_s: float) -> bool:
        """Store durably every prefix that is worth it, and wait; return whether it is done."""
        return self._prefixes.flush(timeout_s)

    def clear_prefixes(self, *, ram: bool = True, ssd: bool = False) -> Clearing:
        """Remove stored prefixes that are not in use; from SSD beside the steps that follow."""
        return self._prefixes.clear(ram=ram, ssd=ssd)

    def _advance(
        self, tokens: dict[str, DrawnToken]
    ) -> list[tuple[TokenSequence, TokenLogprob | None]]:
        """Append the drawn tokens; rows that ended meanwhile drop theirs, broken ones end."""
        advanced = []
        for row_id, drawn in tokens.items():
            sequence = self._open.get(row_id)
            if sequence is None or sequence.finish is not None:
                continue
            if drawn.is_broken:
                self._prefixes.discard(sequence)
                self._fail(sequence, RowFailedError(not_numbers("row")))
                continue
            sequence.append(drawn.token, self._eos)
            self._stats.token(sequence)
            self._prefixes.after_step(sequence)
            advanced.append((sequence, drawn.logprob))
        return advanced

    def _release_finished(self) -> None:
        for sequence in self._scheduler.sequences():
            if sequence.finish is not None:
                self._scheduler.remove(sequence)

    def _decode_text(self, drawn: Sequence[tuple[TokenSequence, TokenLogprob | None]]) -> None:
        for sequence, logprob in drawn:
            try:
                self._outputs.take(sequence, logprob)
                self._grammars.cut(sequence)
            except Exception as error:  # noqa: BLE001 - a row's failure is the row's
                self._fail(sequence, error)

    def _prefill(self, plan: StepPlan) -> None:
        for group in group_chunks(plan.prefill):
            is_done = len(group) > 1 and self._prefill_together(group)
            for chunk in group:
                self._prefill_chunk(chunk, is_done=is_done)

    def _prefill_together(self, group: Sequence[PrefillChunk]) -> bool:
        try:
            return self._runner.prefill_together(group)
        except Exception:
            # The rows are as they were: their own caches change only once all has succeeded. Each
            # is then computed by itself, so that the one at fault fails alone.
            logger.warning("prefilling %d prompts together failed", len(group), exc_info=True)
            return False

    def _prefill_chunk(self, chunk: PrefillChunk, *, is_done: bool) -> None:
        """Compute a chunk, unless that is done, and tell those who keep track of it."""
        try:
            scored = None if is_done else self._runner.prefill(chunk)
            self._stats.prefilled(chunk.size)
            self._prefixes.after_chunk(chunk.sequence, chunk.size)
            if scored is not None:
                self._take_prompt_logprobs(chunk, scored)
        except Exception as error:  # noqa: BLE001 - a row's failure is the row's
            self._fail(chunk.sequence, error)

    def _take_prompt_logprobs(self, chunk: PrefillChunk, scored: Logprobs) -> None:
        sequence = chunk.sequence
        self._outputs.add_prompt_logprobs(sequence, chunk.start, scored)
        if sequence.max_new_tokens == 0 and not sequence.wants_prompt_logprobs:
            sequence.finish = Finish("length")

    def _fail(self, sequence: TokenSequence, error: Exception) -> None:
        logger.error("request %s failed", sequence.id, exc_info=error)
        sequence.finish = Finish("error", error=ErrorInfo.of(error))

    def _fail_all(self, error: Exception) -> None:
        """End every row that has state on the device, which is not to be trusted any more."""
        self._runner.abandon()
        self._grammars.abandon()
        for sequence in self._scheduler.sequences():
            if sequence.finish is None:
                self._fail(sequence, error)
            self._scheduler.remove(sequence, is_sound=False)
        self._release_memory()

    def _report(self) -> tuple[RowOutput, ...]:
        rows, self._refused = self._refused, []
        for sequence in list(self._open.values()):
            output = self._outputs.report(sequence)
            if output is None:
                continue
            rows.append(output)
            if output.finish_reason is not None:
                del self._open[sequence.id]
                self._grammars.forget(sequence)
                self._stats.finished(sequence)
        return tuple(rows)
