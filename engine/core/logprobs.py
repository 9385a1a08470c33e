"""Log-probabilities of tokens, packed so that they cross the process boundary in a few bytes."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

import msgspec

Number = TypeVar("Number", int, float)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Say how likely one token was, and which tokens were the likeliest in its place.

    Natural logarithms of the model's own distribution: before temperature, penalties and masks.
    """

    token_id: int
    logprob: float
    #: The likeliest tokens, best first, with their log-probabilities; the token may be among them.
    top: tuple[tuple[int, float], ...] = ()
    #: Characters of the row's text before this token's own.
    offset: int = 0

    def at(self, offset: int) -> TokenLogprob:
        """Return the same with another offset."""
        return replace(self, offset=offset)


class Logprobs(msgspec.Struct, frozen=True, omit_defaults=True):
    """Carry the log-probabilities of a run of tokens.

    Integers are little-endian int32 and values little-endian float32, one after the other; the
    alternatives are rows of `num_top`.
    """

    num_top: int
    token_ids: bytes = b""
    values: bytes = b""
    offsets: bytes = b""
    top_ids: bytes = b""
    top_values: bytes = b""

    def __len__(self) -> int:
        return len(self.token_ids) // 4

    @classmethod
    def pack(cls, entries: Sequence[TokenLogprob]) -> Logprobs:
        """Pack entries, which must all have as many alternatives."""
        num_top = len(entries[0].top) if entries else 0
        assert all(len(entry.top) == num_top for entry in entries), "rows of unlike length"
        alternatives = [pair for entry in entries for pair in entry.top]
        return cls(
            num_top,
            _packed("i", (entry.token_id for entry in entries)),
            _packed("f", (entry.logprob for entry in entries)),
            _packed("i", (entry.offset for entry in entries)),
            _packed("i", (token for token, _ in alternatives)),
            _packed("f", (value for _, value in alternatives)),
        )

    @classmethod
    def joined(cls, parts: Sequence[Logprobs]) -> Logprobs | None:
        """Return parts of one row as one, in their order; None for no parts."""
        parts = [part for part in parts if len(part)]
        if len(parts) < 2:
            return parts[0] if parts else None
        return cls(
            parts[0].num_top,
            b"".join(part.token_ids for part in parts),
            b"".join(part.values for part in parts),
            b"".join(part.offsets for part in parts),
            b"".join(part.top_ids for part in parts),
            b"".join(part.top_values for part in parts),
        )

    def unpack(self) -> list[TokenLogprob]:
        """Return the entries."""
        width = self.num_top
        top = list(zip(_ints(self.top_ids), _floats(self.top_values), strict=True))
        columns = zip(_ints(self.token_ids), _floats(self.values), _ints(self.offsets), strict=True)
        return [
            TokenLogprob(token, value, tuple(top[index * width : (index + 1) * width]), offset)
            for index, (token, value, offset) in enumerate(columns)
        ]


def _packed(kind: Literal["i", "f"], values: Iterable[float]) -> bytes:
    packed: array[float] = array(kind, values)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def _ints(data: bytes) -> array[int]:
    return _native(array("i", data))


def _floats(data: bytes) -> array[float]:
    return _native(array("f", data))


def _native(values: array[Number]) -> array[Number]:
    if sys.byteorder == "big":
        values.byteswap()
    return values
