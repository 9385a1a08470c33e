"""The tools of a Responses body as templates and parsers take them, and back from their names."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from vllm_mlx.engine.errors import InvalidRequestError
from vllm_mlx.server.answers.tool_choice import AUTO, ToolChoice, check_tools
from vllm_mlx.server.responses_api.custom_text import ARGUMENT
from vllm_mlx.server.responses_api.schemas import (
    CustomFormat,
    ResponseTool,
    ResponseToolChoice,
    kind_left_out,
)

#: How the fields of tools are named in the chat's shape.
_PLACE = re.compile(r"tools\[(?P<index>\d+)\]\.function\.(?P<field>\w+)")

_CUSTOM_PARAMETERS = {
    "type": "object",
    "properties": {ARGUMENT: {"type": "string"}},
    "required": [ARGUMENT],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class CalledTool:
    """Say which tool of the client's a name in an answer means."""

    name: str
    namespace: str | None = None
    #: Its input is a text instead of JSON.
    is_custom: bool = False


@dataclass(frozen=True)
class OfferedTools:
    """Hold the tools that the model may call, and whose they are."""

    #: In OpenAI's chat shape.
    tools: Sequence[dict[str, Any]] = ()
    choice: ToolChoice = AUTO
    by_name: Mapping[str, CalledTool] = field(default_factory=dict)

    def called(self, name: str) -> CalledTool:
        """Return the tool of the client's that `name` means."""
        return self.by_name.get(name, CalledTool(name))


def offered_tools(
    tools: Sequence[ResponseTool],
    choice: Literal["auto", "none", "required"] | ResponseToolChoice | None,
) -> OfferedTools:
    """Return what of the tools the model may call; raise `InvalidRequestError` for wrong ones."""
    objects: dict[str, dict[str, Any]] = {}
    by_name: dict[str, CalledTool] = {}
    every, places = [], []
    for where, tool, namespace in _flat(tools):
        called = CalledTool(_name_of(tool, where), namespace, tool.type == "custom")
        shown = shown_name(called.name, namespace)
        every.append(_tool_object(tool, shown))
        places.append(where)
        objects[shown], by_name[shown] = every[-1], called
    _check_all(every, places)
    resolved = AUTO
    if isinstance(choice, str):
        resolved = ToolChoice(choice)
    elif choice is not None:
        resolved, allowed = _chosen(choice, by_name)
        objects = {name: objects[name] for name in allowed}
    check_tools(list(objects.values()), resolved)
    return OfferedTools(list(objects.values()), resolved, by_name)


def left_out(tools: Sequence[ResponseTool]) -> list[str]:
    """Return the kinds of tools that the model is not offered, as fields are named."""
    kinds = {kind_left_out(tool.type) for tool in tools}
    return sorted(f"tools[].{kind}" for kind in kinds if kind is not None)


def shown_name(name: str, namespace: str | None) -> str:
    """Return the name by which the model knows a tool: models know no namespaces."""
    if not namespace:
        return name
    return f"{namespace}{name}" if namespace.endswith("__") else f"{namespace}__{name}"


def _check_all(tools: Sequence[dict[str, Any]], places: Sequence[str]) -> None:
    """Check tools as every API does, and name each by its place in this one."""
    try:
        check_tools(tools, AUTO)
    except InvalidRequestError as error:
        found = _PLACE.fullmatch(error.param or "")
        assert found is not None, "what is wrong with a tool has a place"
        where = places[int(found["index"])]
        message = error.message.replace(f"tools[{found['index']}]", where, 1)
        raise InvalidRequestError(message, param=f"{where}.{found['field']}") from None


def _flat(
    tools: Sequence[ResponseTool], place: str = "tools", namespace: str | None = None
) -> list[tuple[str, ResponseTool, str | None]]:
    """Return the tools that the client runs, each with its place and its namespace."""
    found = []
    for index, tool in enumerate(tools):
        where = f"{place}[{index}]"
        if tool.type != "namespace":
            if kind_left_out(tool.type) is None:
                found.append((where, tool, namespace))
            continue
        if namespace is not None:
            raise InvalidRequestError(
                f"{where}: a namespace cannot hold another", param=f"{where}.type"
            )
        found += _flat(tool.tools or (), f"{where}.tools", _name_of(tool, where))
    return found


def _name_of(tool: ResponseTool, where: str) -> str:
    if not tool.name:
        raise InvalidRequestError(f"{where}: a tool has a name", param=f"{where}.name")
    return tool.name


def _tool_object(tool: ResponseTool, name: str) -> dict[str, Any]:
    """Return a tool in the one order of its parts that templates print."""
    function: dict[str, Any] = {"name": name}
    description = tool.description
    if tool.type == "custom":
        description = _custom_description(description, tool.format)
    if description is not None:
        function["description"] = description
    parameters = _CUSTOM_PARAMETERS if tool.type == "custom" else tool.parameters
    if parameters is not None:
        function["parameters"] = parameters
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def _custom_description(description: str | None, form: CustomFormat | None) -> str:
    lines = [] if description is None else [description]
    lines.append(f"Call it with the whole text, and nothing else, as the argument `{ARGUMENT}`.")
    if form is not None and form.definition is not None:
        lines.append(f"The text follows this grammar ({form.syntax}):\n{form.definition}")
    return "\n\n".join(lines)


def _chosen(
    choice: ResponseToolChoice, by_name: Mapping[str, CalledTool]
) -> tuple[ToolChoice, list[str]]:
    """Return what an object says of calls, and the names of the tools that it leaves."""
    if choice.type in ("function", "custom"):
        name = _shown(choice.name, choice.type, by_name)
        return ToolChoice("required", name), [*by_name]
    if choice.type != "allowed_tools":
        raise InvalidRequestError(
            f"tool_choice: the type {choice.type[:64]!r} is not supported in this build; known: "
            "function, custom, allowed_tools",
            param="tool_choice.type",
        )
    wanted = [
        _shown(tool.get("name"), tool.get("type"), by_name)
        for tool in choice.tools or ()
        if kind_left_out(str(tool.get("type"))) is None
    ]
    # In the order in which they are defined, whatever the order here: prompts stay alike.
    allowed = [name for name in by_name if name in wanted]
    return ToolChoice("required" if choice.mode == "required" else "auto"), allowed


def _shown(name: object, kind: object, by_name: Mapping[str, CalledTool]) -> str:
    """Return the name by which the model knows the tool that a choice names."""
    for shown, called in by_name.items():
        is_custom = kind == "custom"
        if name in (shown, called.name) and called.is_custom == is_custom:
            return shown
    raise InvalidRequestError(
        f"tool_choice names {str(name)[:150]!r}, which is not among the tools",
        param="tool_choice",
    )
