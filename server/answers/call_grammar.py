"""Grammars of answers that hold calls, or none: enforced, allowed among text, or ruled out."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from vllm_mlx.engine.errors import InvalidRequestError
from vllm_mlx.engine.parsing.grammar import quoted
from vllm_mlx.engine.parsing.reasoning_format import ReasoningFormat
from vllm_mlx.engine.parsing.tool_format import ToolFormat
from vllm_mlx.server.answers.tool_choice import Tool, ToolChoice, is_strict

#: Stands, as if it were a token, for the text that begins a call.
_TRIGGER_ID = 2**31 - 1

_ANY = "/(?s:.*)/"
_HEAD = "%llguidance {}"

#: Where a call is plain JSON or Python, text is what begins otherwise.
_BARE = {"{": r"\{", "[": r"\["}


def forced_calls(
    tool_format: type[ToolFormat],
    tools: Sequence[Tool],
    choice: ToolChoice,
    *,
    is_parallel: bool,
    special_tokens: Mapping[str, int],
) -> str:
    """Return the grammar of one call, or several, to the tools that `choice` leaves, only.

    Raises `InvalidRequestError`, as all here, for parameters that are no schema.
    """
    allowed = [tool for tool in tools if choice.name in (None, tool["function"]["name"])]
    is_parallel = is_parallel and choice.name is None
    return _grammar_of(tool_format, allowed, special_tokens, is_parallel=is_parallel)


def free_answer(
    tool_format: type[ToolFormat],
    tools: Sequence[Tool],
    *,
    is_parallel: bool,
    special_tokens: Mapping[str, int],
    reasoning: ReasoningFormat | None,
) -> str | None:
    """Return the grammar of text with calls in it, of which those to strict tools are checked.

    Without tools it is text that holds no call. None where the format gives no sign at which a
    call begins, so that text cannot be told from it.
    """
    leaf = tool_format.members[0] if tool_format.members else tool_format
    free = [tool if is_strict(tool) else _without_schema(tool) for tool in tools]
    opening = reasoning.answer_opening if reasoning is not None else ""
    rendered = leaf.render_call("f", {"a": "b"})
    trigger = max((t for t in leaf.triggers if t and rendered.startswith(t)), key=len, default="")
    times = "*" if is_parallel else "?"
    lines = [_HEAD]
    if "" in leaf.anchored:
        # The prompt has begun a call or a text already.
        return None
    if leaf.framing is not None or (opening and opening.startswith(trigger)):
        if not opening:
            return None
        calls = _calls(leaf, free, special_tokens, lines, is_parallel=is_parallel)
        text = f"{_literal(opening, special_tokens)} {_ANY}"
        options = [text, *([calls] if calls else [])]
    elif trigger:
        calls = _calls(leaf, free, {**special_tokens, trigger: _TRIGGER_ID}, lines)
        lines.append(_up_to_trigger(trigger, special_tokens))
        lines.append(f"TAIL: {_ANY} & ~/(?s:.*){_escaped(trigger)}(?s:.*)/")
        options = [f"{calls}{times} TAIL" if calls else "TAIL"]
    elif rendered[:1] in _BARE and rendered[:1] in leaf.anchored:
        calls = _calls(leaf, free, special_tokens, lines, is_parallel=is_parallel)
        first = _BARE[rendered[0]]
        lines.append(rf"TEXT: /[ \r\n\t]*([^ \r\n\t{first}](?s:.*))?/")
        options = ["TEXT", *([calls] if calls else [])]
    else:
        return None
    lines.insert(1, f"start: {' | '.join(options)}")
    text = "\n".join([*lines, ""])
    return text.replace(f"<[{_TRIGGER_ID}]>", "up_to_trigger")


def _calls(
    leaf: type[ToolFormat],
    tools: Sequence[Tool],
    special_tokens: Mapping[str, int],
    lines: list[str],
    *,
    is_parallel: bool = False,
) -> str:
    """Add the rules of calls to `lines` and return the name of theirs; empty without tools."""
    if not tools:
        return ""
    lark = _grammar_of(leaf, tools, special_tokens, is_parallel=is_parallel)
    head, start, *rules = lark.strip().split("\n")
    assert head == _HEAD, "grammars of formats have one form"
    assert start.startswith("start: "), "grammars of formats have one form"
    lines += [f"calls: {start.removeprefix('start: ')}", *rules]
    return "calls"


def _grammar_of(
    kind: type[ToolFormat],
    tools: Sequence[Tool],
    special_tokens: Mapping[str, int],
    *,
    is_parallel: bool,
) -> str:
    try:
        return kind.grammar(tools, special_tokens=special_tokens, parallel=is_parallel)
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        # Only the schemas are the client's: one that is none, such as properties that are a list.
        raise InvalidRequestError(
            f"tools: the parameters of a tool are no JSON schema that can be enforced: {error}",
            param="tools",
        ) from error


def _up_to_trigger(trigger: str, special_tokens: Mapping[str, int]) -> str:
    """Return the rule of any text and the first `trigger` behind it."""
    literal = _literal(trigger, special_tokens)
    if literal == quoted(trigger):
        return f"up_to_trigger[suffix={literal}]: {_ANY}"
    # The marker begins with a token of its own; spelt out in others it must not be there.
    return f"up_to_trigger: BEFORE {literal}\nBEFORE: {_ANY} & ~/(?s:.*){_escaped(trigger)}(?s:.*)/"


def _literal(text: str, special_tokens: Mapping[str, int]) -> str:
    """Return an expression for exactly this text, in which special tokens stand as such."""
    pieces = _split(text, special_tokens)
    return " ".join(
        f"<[{special_tokens[piece]}]>" if piece in special_tokens else quoted(piece)
        for piece in pieces
    )


def _split(text: str, special_tokens: Iterable[str]) -> list[str]:
    markers = sorted(special_tokens, key=len, reverse=True)
    pattern = "|".join(map(re.escape, markers)) or "(?!)"
    return [piece for piece in re.split(f"({pattern})", text) if piece]


def _escaped(text: str) -> str:
    return "".join(c if c.isascii() and c.isalnum() else f"\\x{{{ord(c):x}}}" for c in text)


def _without_schema(tool: Tool) -> dict[str, Any]:
    """Return a tool that takes any arguments."""
    parameters = {"type": "object", "additionalProperties": True}
    return {**tool, "function": {"name": tool["function"]["name"], "parameters": parameters}}
