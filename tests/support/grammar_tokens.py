"""A vocabulary for grammars: every byte, an end, and what special tokens a test wants."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence


class ByteTokens:
    """Tokenize by bytes, special tokens where their text stands; the end is token 256."""

    def __init__(self, special: Sequence[str] = (), extra: Sequence[bytes] = ()) -> None:
        self.added_tokens: Mapping[str, int] = {
            text: 257 + index for index, text in enumerate(special)
        }
        self.special_token_ids = frozenset([256, *self.added_tokens.values()])
        self.eos_token_ids = frozenset([256])
        self._tokens = [bytes([byte]) for byte in range(256)] + [b"<end>"]
        self._tokens += [text.encode() for text in special]
        self._tokens += extra
        self.vocab_size = len(self._tokens)

    def serialized(self) -> str | None:
        """Be no `tokenizers` file."""
        return None

    def token_bytes(self, token_id: int) -> bytes:
        """Return a token's bytes."""
        return self._tokens[token_id]

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the bytes, special tokens where their text stands."""
        markers = "|".join(map(re.escape, self.added_tokens)) or "(?!)"
        found: list[int] = []
        for part in re.split(f"({markers})", text):
            special = self.added_tokens.get(part)
            found += list(part.encode()) if special is None else [special]
        return found

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, the end being none."""
        return b"".join(self._tokens[t] for t in tokens if t != 256).decode()


class PrintableTokens(ByteTokens):
    """Give the tiny models' vocabulary of 97 a text: printable ASCII, a line break, an end."""

    END = 96

    def __init__(self) -> None:
        super().__init__()
        self._tokens = [bytes([32 + token]) for token in range(95)] + [b"\n", b"<end>"]
        self.vocab_size = len(self._tokens)
        self.special_token_ids = self.eos_token_ids = frozenset([self.END])

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return one token for each character."""
        return [95 if character == "\n" else ord(character) - 32 for character in text]

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, the end being none."""
        return b"".join(self._tokens[t] for t in tokens if t != self.END).decode()


class PrintedText:
    """Decode tokens of `PrintableTokens` one by one."""

    def __init__(self) -> None:
        self._tokens = PrintableTokens()

    def add(self, token_id: int) -> str:
        """Return the token's text."""
        return self._tokens.decode([token_id])

    def flush(self) -> str:
        """Hold nothing back."""
        return ""
