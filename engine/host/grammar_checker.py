"""Say of grammars whether they can be followed, without letting one harm this process."""

from __future__ import annotations

import hashlib
import logging
import os
import selectors
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping

import msgspec

from vllm_mlx.engine.core.grammar import GrammarTokens, check_grammar_length
from vllm_mlx.engine.errors import InvalidRequestError, VllmMlxError
from vllm_mlx.engine.host.grammar_worker import Ready, Trial, Verdict, Vocabulary, write_frame

logger = logging.getLogger(__name__)

#: `-P` keeps the working directory out of the module path.
_COMMAND = (sys.executable, "-P", "-m", "vllm_mlx.engine.host.grammar_worker")

#: What compiling one grammar may take; real schemas take milliseconds.
CHECK_TIMEOUT_S = 5.0
#: What the process' start may take: tables over the whole vocabulary.
_START_TIMEOUT_S = 120.0

#: Grammars that are known to be right.
_MAX_KNOWN = 1024


class GrammarChecker:
    """Own a process that compiles grammars on trial; safe on any thread, which it blocks.

    The process is started at the first use, and anew after a grammar has crashed it or has taken
    too long. It ends with this one, however that ends.
    """

    def __init__(self, tokens: GrammarTokens, *, timeout_s: float = CHECK_TIMEOUT_S) -> None:
        self._tokens = tokens
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._special_tokens: Mapping[str, int] | None = None
        self._known: OrderedDict[bytes, None] = OrderedDict()
        self._is_closed = False

    @property
    def special_tokens(self) -> Mapping[str, int]:
        """Return `GrammarCompiler.special_tokens`; starts the process the first time."""
        if self._special_tokens is None:
            with self._lock:
                self._running()
        assert self._special_tokens is not None
        return self._special_tokens

    def knows(self, grammar: str) -> bool:
        """Say whether a grammar was found right already; cheap."""
        return _key(grammar) in self._known

    def check(self, grammar: str, *, param: str | None = None) -> None:
        """Raise `InvalidRequestError`, naming `param`, if the grammar cannot be enforced."""
        check_grammar_length(grammar, param=param)
        try:
            grammar.encode("utf-8")
        except UnicodeEncodeError:
            raise InvalidRequestError(
                "the grammar is not valid Unicode: it holds a lone surrogate", param=param
            ) from None
        with self._lock:
            key = _key(grammar)
            if key in self._known:
                self._known.move_to_end(key)
                return
            reason = self._verdict(grammar)
            if reason is None:
                self._known[key] = None
                while len(self._known) > _MAX_KNOWN:
                    self._known.popitem(last=False)
        if reason is not None:
            raise InvalidRequestError(reason, param=param)

    def close(self) -> None:
        """End the process; nothing can be checked any more."""
        self._is_closed = True
        self._end()

    def _verdict(self, grammar: str) -> str | None:
        """Return why a grammar cannot be followed; None if it can."""
        process = self._running()
        try:
            _write(process, Trial(grammar))
            reply = _read(process, self._timeout_s)
        except _TooLateError:
            self._end()
            return f"compiling it takes over {self._timeout_s:g} s: it is too complex"
        except (OSError, EOFError):
            self._end()
            return "compiling it needs too much memory or nesting: it is too complex"
        return msgspec.msgpack.decode(reply, type=Verdict).reason

    def _running(self) -> subprocess.Popen[bytes]:
        """Return the process, started if there is none; the caller holds the lock."""
        if self._process is not None and self._process.poll() is None:
            return self._process
        self._end()
        if self._is_closed:
            raise VllmMlxError("grammars are not checked any more: the server is closing")
        file = self._tokens.serialized()
        if file is not None:
            try:
                return self._start(_vocabulary(self._tokens, file))
            except (OSError, EOFError):
                logger.info("llguidance cannot read the tokenizer, which is spelt out to it")
        try:
            return self._start(_vocabulary(self._tokens, None))
        except (_TooLateError, OSError, EOFError) as error:
            raise VllmMlxError(f"the process that checks grammars cannot start: {error}") from error

    def _start(self, vocabulary: Vocabulary) -> subprocess.Popen[bytes]:
        # Of a session of its own: a terminal's Ctrl-C is for the server.
        process = self._process = subprocess.Popen(
            _COMMAND,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            _write(process, vocabulary)
            ready = msgspec.msgpack.decode(_read(process, _START_TIMEOUT_S), type=Ready)
        except (_TooLateError, OSError, EOFError):
            self._end()
            raise
        self._special_tokens = ready.special_tokens
        return process

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                try:
                    stream.close()
                except OSError as error:
                    logger.debug("closing a pipe to the grammar process: %s", error)


class _TooLateError(Exception):
    """Report that the process has not answered in time."""


def _read(process: subprocess.Popen[bytes], timeout_s: float) -> bytes:
    """Read one frame; raise EOFError where the process has ended, _TooLateError in the end."""
    assert process.stdout is not None
    file = process.stdout.fileno()
    deadline = time.monotonic() + timeout_s
    with selectors.DefaultSelector() as selector:
        selector.register(file, selectors.EVENT_READ)

        def read(length: int) -> bytes:
            parts = b""
            while len(parts) < length:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise _TooLateError(f"no answer within {timeout_s:g} s")
                piece = os.read(file, length - len(parts))
                if not piece:
                    raise EOFError("the process has ended")
                parts += piece
            return parts

        return read(int.from_bytes(read(4), "little"))


def _write(process: subprocess.Popen[bytes], message: msgspec.Struct) -> None:
    assert process.stdin is not None
    write_frame(process.stdin, message)


def _vocabulary(tokens: GrammarTokens, file: str | None) -> Vocabulary:
    spelt = () if file is not None else map(tokens.token_bytes, range(tokens.vocab_size))
    return Vocabulary(
        tokens.vocab_size,
        tokens.eos_token_ids,
        tokens.special_token_ids,
        dict(tokens.added_tokens),
        file,
        tuple(spelt),
    )


def _key(grammar: str) -> bytes:
    return hashlib.sha256(grammar.encode("utf-8", "surrogatepass")).digest()
