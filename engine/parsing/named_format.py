"""Formats whose calls are a name between markers, followed by the arguments as one JSON object."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from vllm_mlx.engine.parsing.grammar import Grammar, any_of, function_of
from vllm_mlx.engine.parsing.tool_format import ToolFormat


class NamedFormat(ToolFormat):
    """Write calls that are text around the JSON of the arguments; reading is each format's own."""

    #: What is written before the first call of a block and behind the last.
    opening: ClassVar[str] = ""
    closing: ClassVar[str] = ""
    between: ClassVar[str] = ""

    @classmethod
    @abstractmethod
    def frame(cls, name: str) -> tuple[str, str]:
        """Return what is written before and behind the arguments of call number `index`."""

    @classmethod
    def render_call(cls, name: str, arguments: Mapping[str, Any]) -> str:
        """Return the text of one call."""
        return cls.render_calls([(name, arguments)])

    @classmethod
    def render_calls(cls, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
        """Return the text of several calls in one block."""
        texts = []
        for name, arguments in calls:
            before, behind = cls.frame(name)
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
            arguments = grammar.json(schema)
            options.append(f"{grammar.text(before)} {arguments} {grammar.text(behind)}")
        call = grammar.rule("call", any_of(options))
        more = f" ({grammar.text(cls.between)} {call})*" if parallel else ""
        return grammar.build(
            f"{grammar.text(cls.opening)} {call}{more} {grammar.text(cls.closing)}"
        )
