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
