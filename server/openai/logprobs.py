"""Log-probabilities in OpenAI's two shapes, and prompts that a completion echoes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_mlx.engine.core.logprobs import Logprobs, TokenLogprob

#: Spells one token as bytes.
Spell = Callable[[int], bytes]

#: What stands for the probability 0, whose logarithm JSON cannot say; as OpenAI has it.
_LEAST = -9999.0


@dataclass(frozen=True)
class Echo:
    """Hold a prompt as a completion that echoes repeats it."""

    text: str
    tokens: Sequence[int]
    #: Where each token begins in the text; empty where no log-probabilities are asked for.
    offsets: Sequence[int] = ()


def chat_logprobs(parts: Sequence[Logprobs], spell: Spell) -> dict[str, Any]:
    """Return the `logprobs` of a chat choice or chunk: one entry for each of its tokens."""
    return {
        "content": [
            {
                **_spelt(entry.token_id, entry.logprob, spell),
                "top_logprobs": [_spelt(token, value, spell) for token, value in entry.top],
            }
            for part in parts
            for entry in part.unpack()
        ],
        "refusal": None,
    }


class CompletionPieces:
    """Write what the choices of one completion say, piece by piece: text and log-probabilities.

    A choice's first piece begins with its prompt where the request echoes it. `spell` is None
    where the request asks for no log-probabilities.
    """

    def __init__(self, echoes: Sequence[Echo | None], spell: Spell | None) -> None:
        self._echoes = echoes
        self._spell = spell
        self._begun: set[int] = set()

    def piece(
        self,
        index: int,
        text: str,
        parts: Sequence[Logprobs],
        prompt: Logprobs | None = None,
    ) -> tuple[str, dict[str, Any] | None]:
        """Return the text and the `logprobs` of the next piece of choice `index`.

        `parts` are those of the answer's tokens, `prompt` those of the prompt's but its first.
        """
        echo = self._echoes[index]
        is_first = index not in self._begun
        self._begun.add(index)
        columns = None
        if self._spell is not None:
            columns = _Columns(self._spell)
            if echo is not None and is_first:
                columns.add_prompt(echo, prompt)
            shift = len(echo.text) if echo is not None else 0
            for part in parts:
                for entry in part.unpack():
                    columns.add(entry, entry.offset + shift)
        text = echo.text + text if echo is not None and is_first else text
        return text, columns.fields() if columns is not None else None

    def has_news(self, index: int, text: str, parts: Sequence[Logprobs]) -> bool:
        """Say whether a piece would hold anything."""
        is_due = self._echoes[index] is not None and index not in self._begun
        return bool(text or parts or is_due)


@dataclass
class _Columns:
    """Gather the four lists of a completion's `logprobs`."""

    spell: Spell
    tokens: list[str] = field(default_factory=list)
    values: list[float | None] = field(default_factory=list)
    top: list[dict[str, float] | None] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)

    def add_prompt(self, echo: Echo, logprobs: Logprobs | None) -> None:
        """Add a prompt's tokens; the first has nothing before it to be predicted from."""
        entries = logprobs.unpack() if logprobs is not None else []
        for token, offset in zip(echo.tokens[:1], echo.offsets[:1], strict=True):
            self.tokens.append(self._name(token))
            self.values.append(None)
            self.top.append(None)
            self.offsets.append(offset)
        # A prompt that was cancelled half-way has no entries.
        for entry, offset in zip(entries, echo.offsets[1:], strict=False):
            self.add(entry, offset)

    def add(self, entry: TokenLogprob, offset: int) -> None:
        """Add one token; it is always among its own alternatives."""
        top: dict[str, float] = {}
        for token, value in (*entry.top, (entry.token_id, entry.logprob)):
            # Two tokens may have one spelling; the likelier stands for both.
            top.setdefault(self._name(token), _bounded(value))
        self.tokens.append(self._name(entry.token_id))
        self.values.append(_bounded(entry.logprob))
        self.top.append(top)
        self.offsets.append(offset)

    def fields(self) -> dict[str, Any]:
        """Return the lists by their names."""
        return {
            "tokens": self.tokens,
            "token_logprobs": self.values,
            "top_logprobs": self.top,
            "text_offset": self.offsets,
        }

    def _name(self, token_id: int) -> str:
        """Spell a token; one that is part of a character as `bytes:\\xNN...`, as OpenAI does."""
        spelling = self.spell(token_id)
        try:
            return spelling.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelling)


def _spelt(token_id: int, value: float, spell: Spell) -> dict[str, Any]:
    spelling = spell(token_id)
    return {
        "token": spelling.decode("utf-8", "replace"),
        "logprob": _bounded(value),
        "bytes": list(spelling),
    }


def _bounded(value: float) -> float:
    return max(value, _LEAST)
