"""Follow one row's reasoning as it is generated: count its tokens, and close it when due."""

from __future__ import annotations

from vllm_mlx.engine.core.request import Thinking
from vllm_mlx.engine.parsing import make_parser


class ThinkingTracker:
    """Know whether a row is within reasoning, and which token it must draw next.

    The text decides, read by the very parser that the answer is read with: markers are found
    however the model cuts them into tokens. Owned by the row's text; fed one token at a time.
    """

    def __init__(self, thinking: Thinking) -> None:
        self._closing = thinking.closing
        self._max_tokens = thinking.max_tokens
        self._parser = make_parser(
            thinking.tools,
            thinking.reasoning,
            in_reasoning=thinking.starts_inside,
            reasoning_delimiters=thinking.delimiters,
        )
        #: Tokens drawn within reasoning, its end's marker included.
        self.num_tokens = 0
        #: Of those, the ones that the model chose.
        self._num_chosen = 0
        #: How many tokens of the closing have been drawn; None while nothing is forced.
        self._num_closed: int | None = None
        self._force_if_due()

    @property
    def forced_token(self) -> int | None:
        """Return the only token that may come next; None if any may."""
        return None if self._num_closed is None else self._closing[self._num_closed]

    def take(self, token: int, text: str) -> None:
        """Take the next token and the text that it has added, which may be none.

        It may be another than the one to be forced: a grammar puts that off where it cannot stand.
        """
        was_inside = self._parser.in_reasoning
        self.num_tokens += was_inside
        self._parser.feed(text)
        if self._num_closed is None:
            self._num_chosen += was_inside
            self._force_if_due()
            return
        if token == self._closing[self._num_closed]:
            self._num_closed += 1
        elif self._parser.in_reasoning:
            return
        if self._num_closed == len(self._closing) or not self._parser.in_reasoning:
            self._num_closed = None

    def _force_if_due(self) -> None:
        """Begin to close reasoning that has had all its tokens.

        A closing that did not end it is not begun again before a token of the model's own.
        """
        is_spent = self._max_tokens is not None and self._num_chosen >= self._max_tokens
        if is_spent and self._closing and self._parser.in_reasoning:
            self._num_closed = 0
