"""Formats whose calls are a name between markers, followed by the arguments as one JSON object."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from vllm_mlx.engine.parsing.grammar import Grammar, any_of, function_of
from vllm_mlx.engine.parsing.tool_format import ToolFormat

#: Stands for an id in a frame.
ID = "\0"


class NamedFormat(ToolFormat):
    """Write calls that are text around the JSON of the arguments; reading is each format's own."""

    #: What is written before the first call of a block and behind the last.
    opening: ClassVar[str] = ""
    closing: ClassVar[str] = ""
    between: ClassVar[str] = ""
    #: Ids that a model writes itself, as a pattern; their place in the frame is `ID`.
    id_pattern: ClassVar[str] = ""

    @classmethod
    @abstractmethod
    def frame(cls, name: str) -> tuple[str, str]:
        """Return what is written before and behind the arguments."""

    @classmethod
    def render_id(cls, index: int) -> str:
        """Return an id for call number `index` of a block."""
        return str(index)

    @classmethod
    def render_call(cls, name: str, arguments: Mapping[str, Any]) -> str:
        """Return the text of one call."""
        return cls.render_calls([(name, arguments)])

    @classmethod
    def render_calls(cls, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
        """Return the text of several calls in one block."""
        texts = []
        for index, (name, arguments) in enumerate(calls):
            before, behind = cls.frame(name)
            before = before.replace(ID, cls.render_id(index))
            texts.append(f"{before}{json.dumps(arguments, ensure_ascii=False)}{behind}")
        return f"{cls.opening}{cls.between.join(texts)}{cls.closing}"

    @classmethod
    def grammar(
        cls,
        tools: Sequence[Mapping[str, Any]],
        *,
        special_tokens: Mapping[str, int] | None = None,
        parallel: bool = False,
    ) -> str:
        """Return Lark text that forces a call."""
        grammar = Grammar(special_tokens)
        options = []
        for name, schema in map(function_of, tools):
            before, behind = cls.frame(name)
            texts = [grammar.text(part) for part in before.split(ID)]
            opened = f" {cls.id_pattern} ".join(texts)
            options.append(f"{opened} {grammar.json(schema)} {grammar.text(behind)}")
        call = grammar.rule("call", any_of(options))
        more = f" ({grammar.text(cls.between)} {call})*" if parallel else ""
        return grammar.build(
            f"{grammar.text(cls.opening)} {call}{more} {grammar.text(cls.closing)}"
        )
