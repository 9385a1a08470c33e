"""The interface of a reasoning format: which markers say where reasoning begins and ends."""

from __future__ import annotations

from typing import ClassVar

from vllm_mlx.engine.parsing.outbox import Mode
from vllm_mlx.engine.parsing.reader import Reader, Steps


class ReasoningFormat:
    """Describe how a model sets its reasoning apart from its answer.

    A class for formats that always use the same markers; an instance where they are configured.
    Neither holds anything of a stream.
    """

    #: Markers behind which reasoning follows, the usual one first.
    openers: tuple[str, ...] = ()
    #: Markers behind which the answer follows.
    closers: tuple[str, ...] = ()
    #: What is written before the text of every answer that is no call; empty where nothing is.
    answer_opening: str = ""
    #: Markers that say neither and are left out.
    dropped: tuple[str, ...] = ()
    #: What shows in a chat template that a model reasons so: any of these groups, whole.
    signs: ClassVar[tuple[tuple[str, ...], ...]] = ()
    #: Tokens of which one shows the same in a vocabulary.
    tokens: ClassVar[tuple[str, ...]] = ()

    @property
    def markers(self) -> tuple[str, ...]:
        """Return all markers, `dropped` not among them."""
        return (*self.openers, *self.closers)

    def enter(self, marker: str, reader: Reader) -> Steps[Mode]:
        """Return what follows behind `marker`, having read what else belongs to the marker.

        Raises `MismatchError` where the marker turns out to be plain text.
        """
        del reader
        yield from ()
        return Mode.REASONING if marker in self.openers else Mode.CONTENT

    def is_open(self, prompt: str) -> bool:
        """Say whether a rendered prompt ends within reasoning: the template opened it itself."""
        return prompt.rstrip().endswith(self.openers)

    def render(self, reasoning: str) -> str:
        """Return the text of a reasoning block as a model writes it."""
        return f"{self.openers[0]}\n{reasoning}\n{self.closers[0]}\n\n"
