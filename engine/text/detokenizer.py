"""Turn token ids into text one at a time, equal to decoding them all at once.

The `tokenizers` library's own `DecodeStream` does not serve: it has no end at which held text
comes out, and it holds invalid bytes for ever, decoding them all again for each token.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

#: Most tokens that `WindowDetokenizer` waits for one character: the longest takes four bytes.
_MAX_PENDING = 8

#: What a byte-fallback vocabulary calls its byte tokens.
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")

#: Returns a token's string in the vocabulary; None for ids that no text comes from.
PieceOf = Callable[[int], str | None]


class Detokenizer(Protocol):
    """Decode one row's tokens as they come.

    The texts of all `add` calls and of `flush` joined equal the tokenizer's own decoding of all
    the ids without special tokens. Each token costs O(1), amortised. Not thread-safe; one per row.
    """

    def add(self, token_id: int) -> str:
        """Take one token and return the new text that no later token can change."""

    def flush(self) -> str:
        """Return what is left at the end; incomplete characters become U+FFFD."""


class _Table(dict[int, Any]):
    """A table filled on first use; concurrent readers at worst compute an entry twice."""

    def __init__(self, compute: Callable[[int], Any]) -> None:
        super().__init__()
        self._compute = compute

    def __missing__(self, token_id: int) -> Any:
        entry = self[token_id] = self._compute(token_id)
        return entry


class ByteLevelDetokenizer:
    """Decode byte-level vocabularies (GPT-2, Llama 3, Qwen): tokens are bytes of UTF-8."""

    def __init__(self, pieces: _Table) -> None:
        self._pieces = pieces
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token_id: int) -> str:
        """Take one token and return the characters that it completes."""
        return self._decoder.decode(self._pieces[token_id])

    def flush(self) -> str:
        """Return U+FFFD for a character that was begun and not completed."""
        return self._decoder.decode(b"", final=True)


@dataclass(frozen=True, slots=True)
class PieceRules:
    """Say how a SentencePiece-like vocabulary becomes text."""

    #: Replacements made inside each token, in order.
    replacements: tuple[tuple[str, str], ...] = ()
    #: Tokens named `<0xNN>` are bytes.
    byte_fallback: bool = False
    #: Leading characters taken off the whole text, and how many at most.
    strip_char: str = " "
    strip_count: int = 0
    #: A mark that the very first token loses everywhere; None where it is treated like the others.
    first_drops: str | None = None


class SentencePieceDetokenizer:
    """Decode SentencePiece-like vocabularies (Llama 2, Mistral, Gemma, T5).

    A run of byte tokens is decoded when it ends, since one invalid byte turns each byte of the
    whole run into U+FFFD.
    """

    def __init__(self, pieces: _Table, rules: PieceRules) -> None:
        self._pieces = pieces
        self._run = bytearray()
        self._strip_char = rules.strip_char
        self._strip_left = rules.strip_count
        self._first_drops = rules.first_drops

    def add(self, token_id: int) -> str:
        """Take one token; return its text, after the run of bytes that it may have ended."""
        piece, byte, raw = self._pieces[token_id]
        if piece is None:
            return ""
        if byte is not None:
            self._run.append(byte)
            return ""
        if self._first_drops is not None:
            piece = raw.replace(self._first_drops, "")
            self._first_drops = None
        return self._strip(self._end_run() + piece)

    def flush(self) -> str:
        """Return the run of bytes that no token ended."""
        return self._strip(self._end_run())

    def _end_run(self) -> str:
        if not self._run:
            return ""
        try:
            text = self._run.decode("utf-8")
        except UnicodeDecodeError:
            text = REPLACEMENT * len(self._run)
        self._run.clear()
        return text

    def _strip(self, text: str) -> str:
        start = 0
        while self._strip_left and start < len(text):
            if text[start] != self._strip_char:
                self._strip_left = 0
                break
            start += 1
            self._strip_left -= 1
        return text[start:]


class WindowDetokenizer:
    """Decode with any tokenizer, by decoding a short window of the last tokens twice.

    The difference between the window with and without the new tokens is the new text. Holds for
    decoders in which a token's text depends on the token before it only. Text that ends in U+FFFD
    is held for at most `_MAX_PENDING` tokens, after which it is taken for what the model said.
    """

    def __init__(
        self, decode: Callable[[Sequence[int]], str], is_text: Callable[[int], bool]
    ) -> None:
        self._decode = decode
        self._is_text = is_text
        self._window: list[int] = []
        self._num_read = 0
        self._read_text = ""

    def add(self, token_id: int) -> str:
        """Take one token and return what it adds to the text of the window."""
        if not self._is_text(token_id):
            return ""
        self._window.append(token_id)
        text = self._decode(self._window)
        num_pending = len(self._window) - self._num_read
        is_open = text.endswith(REPLACEMENT) or len(text) <= len(self._read_text)
        if is_open and num_pending < _MAX_PENDING:
            return ""
        new = text[len(self._read_text) :]
        self._window = self._window[self._num_read :]
        self._num_read = len(self._window)
        self._read_text = self._decode(self._window)
        return new

    def flush(self) -> str:
        """Return the text that is still held."""
        if len(self._window) == self._num_read:
            return ""
        text = self._decode(self._window)[len(self._read_text) :]
        self._window, self._num_read, self._read_text = [], 0, ""
        return text


def byte_level_pieces(piece_of: PieceOf) -> _Table:
    """Return the bytes of each token of a byte-level vocabulary, computed on first use."""
    bytes_of = _byte_level_alphabet()

    def compute(token_id: int) -> bytes:
        piece = piece_of(token_id)
        if piece is None:
            return b""
        try:
            return bytes(bytes_of[char] for char in piece)
        except KeyError:
            # A token added by hand, which is outside the alphabet as a whole.
            return piece.encode("utf-8")

    return _Table(compute)


def sentencepiece_pieces(piece_of: PieceOf, rules: PieceRules) -> _Table:
    """Return (text, byte value, vocabulary string) of each token, computed on first use."""

    def compute(token_id: int) -> tuple[str | None, int | None, str | None]:
        raw = text = piece_of(token_id)
        if text is None:
            return None, None, None
        for old, new in rules.replacements:
            text = text.replace(old, new)
        byte = _BYTE_TOKEN.fullmatch(text) if rules.byte_fallback else None
        return text, int(byte.group(1), 16) if byte else None, raw

    return _Table(compute)


def make_detokenizer_factory(
    decoder_state: bytes | None,
    piece_of: PieceOf,
    decode: Callable[[Sequence[int]], str],
) -> Callable[[], Detokenizer]:
    """Choose the detokenizer for a `tokenizers` decoder and return what makes one per row.

    `decoder_state` is the decoder's JSON (None without one), `decode` the tokenizer's own
    decoding without special tokens. All detokenizers of one factory share one table of pieces.
    """
    spec = decoder_spec(decoder_state)
    if spec.get("type") == "ByteLevel":
        byte_pieces = byte_level_pieces(piece_of)
        return lambda: ByteLevelDetokenizer(byte_pieces)
    rules = parse_rules(spec)
    if rules is not None:
        pieces = sentencepiece_pieces(piece_of, rules)
        return lambda: SentencePieceDetokenizer(pieces, rules)
    return lambda: WindowDetokenizer(decode, lambda token_id: piece_of(token_id) is not None)


def decoder_spec(decoder_state: bytes | None) -> dict[str, Any]:
    """Return a decoder's own description; empty without one."""
    spec: dict[str, Any] = {} if decoder_state is None else json.loads(decoder_state)
    return spec


def parse_rules(spec: dict[str, Any]) -> PieceRules | None:
    """Read a decoder's JSON as piece rules; None where it does something else."""
    if spec.get("type") == "Metaspace":
        mark = spec["replacement"]
        drops = None if spec.get("prepend_scheme") == "never" else mark
        return PieceRules(replacements=((mark, " "),), first_drops=drops)
    if spec.get("type") != "Sequence":
        return None
    stages = list(spec["decoders"])
    replacements = []
    while stages and stages[0]["type"] == "Replace":
        stage = stages.pop(0)
        if "String" not in stage["pattern"]:
            return None
        replacements.append((stage["pattern"]["String"], stage["content"]))
    byte_fallback = bool(stages) and stages[0]["type"] == "ByteFallback"
    stages = stages[1:] if byte_fallback else stages
    strip_char, strip_count = " ", 0
    if [stage["type"] for stage in stages] == ["Fuse", "Strip"] and stages[1]["stop"] == 0:
        strip_char, strip_count = stages[1]["content"], stages[1]["start"]
    elif [stage["type"] for stage in stages] != ["Fuse"]:
        return None
    return PieceRules(tuple(replacements), byte_fallback, strip_char, strip_count)


def _byte_level_alphabet() -> dict[str, int]:
    """Return the byte that each character of a byte-level vocabulary stands for.

    GPT-2's convention: printable Latin-1 characters stand for themselves, every other byte for
    the next unused code point from 256 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return alphabet
