"""Follow the grammars of open rows and say which tokens each may draw; pure but for llguidance."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

import numpy as np
from llguidance import LLExecutor, LLMatcher
from llguidance.numpy import fill_next_token_bitmask_par
from numpy.typing import NDArray

from vllm_mlx.engine.core.grammar import GrammarCompiler, matcher_error
from vllm_mlx.engine.core.outputs import ErrorInfo
from vllm_mlx.engine.core.sequence import Finish
from vllm_mlx.engine.core.sequence import Sequence as TokenSequence
from vllm_mlx.engine.errors import InvalidRequestError, RowFailedError

logger = logging.getLogger(__name__)

#: How long a step without other work waits for a grammar to be compiled.
_WAIT_S = 0.01
#: Of the threads that compile and follow grammars, whose recursion goes as deep as a grammar is
#: nested: more than what each grammar is tried with before.
_STACK_BYTES = 16 << 20

Words = NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """Say which tokens some rows may draw in one step."""

    #: The rows' sequences, in the order of `words`.
    sequences: tuple[TokenSequence, ...]
    #: `[len(sequences), ceil(V / 32)]`: bit `t % 32` of word `t // 32` allows token `t`.
    words: Words


@dataclass(slots=True, eq=False)
class _Row:
    """Follow one row; what is not yet read of its tokens is read in the next filling."""

    sequence: TokenSequence
    compiling: Future[LLMatcher]
    matcher: LLMatcher | None = None
    num_read: int = 0
    #: The grammar is complete and allows nothing more.
    is_complete: bool = False
    error: Exception | None = None

    def read(self, tokens: Sequence[int]) -> None:
        """Advance over the row's new tokens; sets `is_complete` or `error` where that ends it."""
        assert self.matcher is not None
        for token in tokens:
            if self.error is not None or self.is_complete:
                return
            self.num_read += 1
            if not self.matcher.consume_token(token):
                self.fail(f"token {token} does not follow it ({matcher_error(self.matcher)})")
            elif self.matcher.is_stopped():
                self.stopped()

    def stopped(self) -> None:
        """Tell a grammar that is complete from one that cannot go on or that gave up."""
        assert self.matcher is not None
        if self.matcher.is_error() or not self.matcher.is_accepting():
            self.fail(matcher_error(self.matcher) or self.matcher.stop_reason())
        else:
            self.is_complete = True

    def fail(self, reason: str) -> None:
        """End the row with an error."""
        self.error = RowFailedError(
            f"the grammar of this answer can be followed no further: {reason}"
        )


@dataclass(slots=True)
class _Filling:
    """Hold what the thread beside the steps is doing, or has done."""

    rows: list[_Row]
    done: Future[Words]
    #: Rows that may not end yet, whatever their grammars say.
    must_go_on: list[bool] = field(default_factory=list)


class _Threads:
    """Hold the threads that work beside the steps, all with deep stacks."""

    def __init__(self) -> None:
        # What llguidance's own threads go by, too.
        os.environ.setdefault("RUST_MIN_STACK", str(_STACK_BYTES))
        before = threading.stack_size(_STACK_BYTES)
        try:
            self.compiler = ThreadPoolExecutor(1, thread_name_prefix="grammars")
            self.filler = ThreadPoolExecutor(1, thread_name_prefix="masks")
            # A thread is made for the first piece of work.
            wait([pool.submit(_nothing) for pool in (self.compiler, self.filler)])
            self.executor = LLExecutor()
        finally:
            threading.stack_size(before)

    def close(self) -> None:
        """Let the threads end."""
        self.compiler.shutdown(wait=False, cancel_futures=True)
        self.filler.shutdown(wait=False, cancel_futures=True)


def _nothing() -> None:
    """Do nothing."""


class GrammarRows:
    """Own the matchers of the rows that have a grammar; used by the engine thread.

    Grammars are compiled on threads of their own, beside the rows' prefill: until then a row is
    held (`Sequence.is_held`) and does not join the batch. In each step `begin` hands what is to
    be done to another thread, which reads the tokens that came and fills the masks, without
    Python's lock and for several rows at once, while the device computes; `collect` waits for it.

    A matcher follows the tokens of its sequence, not its KV: preemption leaves it as it is.
    """

    def __init__(self, compiler: GrammarCompiler | None, eos_token_ids: Iterable[int]) -> None:
        """Take what compiles grammars over the logits' tokens; None refuses them."""
        self._compiler = compiler
        self._eos = sorted(eos_token_ids)
        self._rows: dict[TokenSequence, _Row] = {}
        self._held: list[_Row] = []
        self._filling: _Filling | None = None
        self._threads: _Threads | None = None

    def open(self, sequence: TokenSequence) -> None:
        """Begin to compile the grammar of a new row; nothing happens to a row without one.

        Raises `InvalidRequestError` where this engine knows no grammars.
        """
        grammar = sequence.sampling.grammar
        if grammar is None:
            return
        if self._compiler is None:
            raise InvalidRequestError("this engine follows no grammars", param="grammar")
        if self._threads is None:
            self._threads = _Threads()
        compiling = self._threads.compiler.submit(self._compiler.compile, grammar, param="grammar")
        row = self._rows[sequence] = _Row(sequence, compiling)
        self._held.append(row)
        sequence.is_held = True

    def release(self) -> None:
        """Let rows whose grammar is compiled join the batch; end those whose grammar is wrong."""
        for row in [row for row in self._held if row.compiling.done()]:
            self._held.remove(row)
            row.sequence.is_held = False
            if row.compiling.cancelled():
                continue
            error = row.compiling.exception()
            if error is None:
                row.matcher = row.compiling.result()
            elif row.sequence.finish is None:
                row.sequence.finish = _ended(error)

    def wait(self) -> None:
        """Wait a moment for a grammar; called when a step had nothing to do."""
        if self._held:
            wait([self._held[0].compiling], timeout=_WAIT_S)

    def begin(self, sequences: Sequence[TokenSequence]) -> None:
        """Begin to read the new tokens of the rows that decode, and to fill their masks."""
        self.abandon()
        rows = [row for s in sequences if (row := self._rows.get(s)) is not None]
        if not rows or self._threads is None:
            return
        fresh = [row.sequence.output[row.num_read :] for row in rows]
        must_go_on = [s.must_go_on or s.sampling.ignore_eos for s in (r.sequence for r in rows)]
        done = self._threads.filler.submit(self._fill, rows, fresh, self._threads.executor)
        self._filling = _Filling(rows, done, must_go_on)

    def collect(self) -> TokenMasks | None:
        """Wait for the masks; ends rows whose grammar is complete or has failed.

        A complete grammar ends its row whatever `min_tokens` and `ignore_eos` say: there is
        nothing that could follow.
        """
        filling, self._filling = self._filling, None
        if filling is None:
            return None
        words = self._result(filling)
        kept = []
        for index, row in enumerate(filling.rows):
            if row.error is None and not row.is_complete and filling.must_go_on[index]:
                row.is_complete = not self._without_end(words[index])
            if row.sequence.finish is not None:
                continue
            if row.error is not None:
                self._forget_compiled(row.sequence)
                logger.error("request %s: %s", row.sequence.id, row.error)
                row.sequence.finish = _ended(row.error)
            elif row.is_complete:
                row.sequence.finish = Finish("stop")
            else:
                kept.append(index)
                self._respect(row.sequence, words[index])
        if not kept:
            return None
        return TokenMasks(tuple(filling.rows[i].sequence for i in kept), words[kept])

    @staticmethod
    def _result(filling: _Filling) -> Words:
        try:
            return filling.done.result()
        except Exception as error:
            # A fault of llguidance ends these rows only.
            logger.exception("filling masks failed")
            for row in filling.rows:
                row.fail(f"{type(error).__name__}: {error}")
            return np.zeros((len(filling.rows), 0), dtype=np.uint32)

    def cut(self, sequence: TokenSequence) -> None:
        """Tell whether a row that used up its tokens was complete all the same: then it stopped."""
        row = self._rows.get(sequence)
        if row is None or row.matcher is None or sequence.finish != Finish("length"):
            return
        row.read(sequence.output[row.num_read :])
        if row.is_complete:
            sequence.finish = Finish("stop")

    def forget(self, sequence: TokenSequence) -> None:
        """Let go of a row that has left."""
        row = self._rows.pop(sequence, None)
        if row is not None and row in self._held:
            self._held.remove(row)
            row.compiling.cancel()

    def abandon(self) -> None:
        """Wait for a filling that nobody collected; what it read stays read."""
        filling, self._filling = self._filling, None
        if filling is not None:
            filling.done.exception()

    def close(self) -> None:
        """Let go of the threads."""
        if self._threads is not None:
            self._threads.close()

    def _fill(self, rows: list[_Row], fresh: list[list[int]], executor: LLExecutor) -> Words:
        """Read tokens and return the masks of all rows; on the thread beside the steps."""
        assert self._compiler is not None
        num_words = (self._compiler.tokenizer.vocab_size + 31) // 32
        words = np.zeros((len(rows), num_words), dtype=np.int32)
        places = []
        for index, (row, tokens) in enumerate(zip(rows, fresh, strict=True)):
            row.read(tokens)
            if row.error is None and not row.is_complete and row.matcher is not None:
                places.append((row.matcher, index))
        if places:
            fill_next_token_bitmask_par(executor, places, words)
        for matcher, index in places:
            if matcher.is_stopped():
                rows[index].stopped()
        return words.view(np.uint32)

    def _forget_compiled(self, sequence: TokenSequence) -> None:
        if self._compiler is not None and sequence.sampling.grammar is not None:
            self._compiler.forget(sequence.sampling.grammar)

    def _without_end(self, words: Words) -> bool:
        """Take the ends of sequence out of one mask; return whether anything is left."""
        for token in self._eos:
            if token // 32 < len(words):
                words[token // 32] &= np.uint32(0xFFFFFFFF ^ 1 << token % 32)
        return bool(words.any())

    @staticmethod
    def _respect(sequence: TokenSequence, words: Words) -> None:
        """Put off a forced token that the grammar does not allow right here.

        The end of reasoning cannot stand within a character whose bytes are several tokens.
        """
        token = sequence.forced_token
        if token is not None and not int(words[token // 32]) >> token % 32 & 1:
            sequence.forced_token = None


def _ended(error: BaseException) -> Finish:
    if not isinstance(error, InvalidRequestError | RowFailedError):
        logger.error("a grammar could not be compiled", exc_info=error)
    return Finish("error", error=ErrorInfo.of(error))
