"""The tools of one request: what of them is checked, and which calls the answer may hold."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from vllm_mlx.engine.errors import InvalidRequestError

Tool = Mapping[str, Any]

_NAME = re.compile(r"[A-Za-z0-9_-]{1,128}")


@dataclass(frozen=True)
class ToolChoice:
    """Say whether calls are possible: `auto`, `none`, `required`, or one to `name` and no other."""

    mode: Literal["auto", "none", "required"] = "auto"
    name: str | None = None

    def __post_init__(self) -> None:
        assert self.name is None or self.mode == "required", "a named tool is required"


AUTO = ToolChoice()


def check_tools(tools: Sequence[Tool], choice: ToolChoice, *, place: str = "tools") -> None:
    """Raise `InvalidRequestError` for OpenAI tool objects that no call could be made to.

    `place` is what the API calls the list. Names are checked, not the meaning of the schemas.
    """
    names: set[str] = set()
    for index, tool in enumerate(tools):
        function = tool["function"]
        name = function["name"]
        where = f"{place}[{index}]"
        if _NAME.fullmatch(name) is None:
            raise InvalidRequestError(
                f"{where}: a tool's name is 1 to 128 letters, digits, _ and -, not {name[:150]!r}",
                param=f"{where}.function.name",
            )
        if name in names:
            raise InvalidRequestError(
                f"{where}: there are two tools of the name {name!r}",
                param=f"{where}.function.name",
            )
        names.add(name)
        kind = (function.get("parameters") or {}).get("type", "object")
        if kind != "object" and not (isinstance(kind, list) and "object" in kind):
            raise InvalidRequestError(
                f"{where}: the arguments of a tool are an object, not {kind!r}",
                param=f"{where}.function.parameters",
            )
    if choice.mode == "required" and not tools:
        raise InvalidRequestError(
            f"tool_choice asks for a call, but there are no {place}", param="tool_choice"
        )
    if choice.name is not None and choice.name not in names:
        raise InvalidRequestError(
            f"tool_choice names {choice.name!r}, which is not among the {place}",
            param="tool_choice",
        )


def is_strict(tool: Tool) -> bool:
    """Say whether the arguments of calls to a tool must follow its schema."""
    return bool(tool["function"].get("strict"))
