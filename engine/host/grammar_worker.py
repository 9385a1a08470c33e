"""The grammar process: `python -m vllm_mlx.engine.host.grammar_worker` tries grammars out.

Compiling runs over whatever a client has sent, in a library whose stack and time a strange grammar
can use up. Here that ends one small process.
"""

from __future__ import annotations

import os
import sys
import threading
from typing import IO

import msgspec

from vllm_mlx.engine.core.grammar import GrammarCompiler
from vllm_mlx.engine.errors import InvalidRequestError

#: Smaller than that of any thread which follows grammars, so that what passes here passes there.
STACK_BYTES = 4 << 20
#: Most memory of the process, where the system holds to it.
_MEMORY_BYTES = 4 << 30

_LENGTH_BYTES = 4


class Vocabulary(msgspec.Struct, frozen=True):
    """Describe a tokenizer to the process: as its file, or else token by token."""

    vocab_size: int
    eos_token_ids: frozenset[int]
    special_token_ids: frozenset[int]
    added_tokens: dict[str, int]
    #: Of a `tokenizers` tokenizer.
    file: str | None = None
    tokens: tuple[bytes, ...] = ()

    def serialized(self) -> str | None:
        """Return the text of a `tokenizers` file."""
        return self.file

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token stands for."""
        return self.tokens[token_id]

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Encode byte by byte: whether a text can follow does not depend on its tokens."""
        del add_special_tokens
        of_byte = {token: index for index, token in enumerate(self.tokens) if len(token) == 1}
        pieces = (bytes([byte]) for byte in text.encode())
        return [of_byte[piece] for piece in pieces if piece in of_byte]


class Ready(msgspec.Struct, frozen=True):
    """Say that grammars can be tried, and which tokens no text of them matches."""

    special_tokens: dict[str, int]


class Trial(msgspec.Struct, frozen=True):
    """Ask whether a grammar can be followed."""

    grammar: str


class Verdict(msgspec.Struct, frozen=True):
    """Say why it cannot; None if it can."""

    reason: str | None = None


def write_frame(stream: IO[bytes], message: msgspec.Struct) -> None:
    """Write one message, its length before it."""
    body = msgspec.msgpack.encode(message)
    stream.write(len(body).to_bytes(_LENGTH_BYTES, "little") + body)
    stream.flush()


def read_frame(stream: IO[bytes]) -> bytes | None:
    """Read one message's bytes; None at the end."""
    head = stream.read(_LENGTH_BYTES)
    if len(head) < _LENGTH_BYTES:
        return None
    length = int.from_bytes(head, "little")
    body = stream.read(length)
    return body if len(body) == length else None


def main() -> None:
    """Serve trials from standard input to standard output until its end."""
    _limit_memory()
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    first = read_frame(source)
    if first is None:
        return
    compiler = GrammarCompiler(msgspec.msgpack.decode(first, type=Vocabulary))
    write_frame(sink, Ready(dict(compiler.special_tokens)))
    threading.stack_size(STACK_BYTES)
    # This thread goes on to read, so that it sees the end of the parent amid a trial.
    while (frame := read_frame(source)) is not None:
        trial = msgspec.msgpack.decode(frame, type=Trial)
        threading.Thread(target=_try, args=(compiler, trial, sink), daemon=True).start()
    os._exit(0)


def _try(compiler: GrammarCompiler, trial: Trial, sink: IO[bytes]) -> None:
    reason = None
    try:
        compiler.check(trial.grammar)
    except InvalidRequestError as error:
        reason = error.message
    write_frame(sink, Verdict(reason))


def _limit_memory() -> None:
    if sys.platform != "linux":
        return
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = _MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(_MEMORY_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


if __name__ == "__main__":
    main()
