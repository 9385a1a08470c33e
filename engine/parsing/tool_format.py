"""The interface of a tool format: how calls are found, read, written and enforced."""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from vllm_mlx.engine.parsing.reader import Steps
from vllm_mlx.engine.parsing.reasoning_format import ReasoningFormat
from vllm_mlx.engine.parsing.scan import Scan


class ToolFormat(ABC):
    """Describe one way in which models write tool calls.

    Classes hold no state: all that a stream needs to remember is in the steps of `parse`.
    """

    #: Text that may begin a call, wherever it stands.
    triggers: ClassVar[tuple[str, ...]] = ()
    #: Text that may begin a call only where an answer begins: at the start of the text, behind
    #: reasoning, behind another call.
    anchored: ClassVar[tuple[str, ...]] = ()
    #: Text that ends calls: a broken call ends there, and behind a call whose own end was missing
    #: it is let go.
    closers: ClassVar[tuple[str, ...]] = ()
    #: Markers within calls that are read, but neither above nor in what `render_call` writes.
    inner_markers: ClassVar[tuple[str, ...]] = ()
    #: Formats that are tried in turn in place of this one.
    members: ClassVar[tuple[type[ToolFormat], ...]] = ()
    #: Whether a call in the midst of reasoning ends the reasoning.
    ends_reasoning: ClassVar[bool] = False
    #: Reads what frames the whole answer, where no reasoning format does.
    framing: ClassVar[type[ReasoningFormat] | None] = None
    #: What shows in a chat template that a model writes this format: any of these groups, whole.
    signs: ClassVar[tuple[tuple[str, ...], ...]] = ()
    #: Tokens of which one shows the same in a vocabulary.
    tokens: ClassVar[tuple[str, ...]] = ()
    #: Written between two rendered calls.
    between: ClassVar[str] = "\n"

    @classmethod
    @abstractmethod
    def parse(cls, scan: Scan) -> Steps[None]:
        """Read one block of calls, from behind its trigger to behind the end of the block.

        Raises `MismatchError` at the first character that does not belong. Before the first call
        was started that gives everything back, and behind a call what stands behind it.
        """

    @classmethod
    @abstractmethod
    def render_call(cls, name: str, arguments: Mapping[str, Any]) -> str:
        """Return the text of one call as a model writes it."""

    @classmethod
    def render_calls(cls, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
        """Return the text of several calls as a model writes them."""
        return cls.between.join(cls.render_call(name, arguments) for name, arguments in calls)

    @classmethod
    @abstractmethod
    def grammar(
        cls,
        tools: Sequence[Mapping[str, Any]],
        *,
        special_tokens: Mapping[str, int] | None = None,
        parallel: bool = False,
    ) -> str:
        """Return llguidance's Lark text that forces a call to one of `tools`.

        `special_tokens` gives the ids of markers that are special tokens of the model, which
        llguidance must be told apart from text. With `parallel` more than one call may come.
        """

    @classmethod
    def new_id(cls) -> str:
        """Make the id of a call whose text carries none."""
        return f"call_{secrets.token_hex(12)}"
