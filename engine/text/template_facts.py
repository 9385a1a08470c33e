"""Find out what a chat template shows, by rendering small chats with it; pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

#: Renders messages, with tools where there are any; raises whatever the template does.
Render = Callable[..., str]

_TOOL, _KEY, _VALUE, _RESULT = "probe_tool", "probe_key", "probe_value", "probe_result"
_SYSTEM, _LATE_SYSTEM = "Probe the first.", "Probe the second."
#: Nine characters, as the most particular templates want ids to be.
_CALL_ID = "probe0001"

_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": _TOOL,
            "description": "Probe.",
            "parameters": {
                "type": "object",
                # Another than that of the calls: tools may be printed in another way.
                "properties": {"probe_field": {"type": "string", "description": "Probe."}},
                "required": ["probe_field"],
            },
        },
    }
]
_ASK = {"role": "user", "content": "Ask."}
_ANSWER = {"role": "assistant", "content": "Probe the answer."}


@dataclass(frozen=True)
class TemplateFacts:
    """Say what a template shows, where it neither refuses nor drops it."""

    #: A system message that comes first.
    takes_system: bool = True
    #: One that comes later.
    takes_late_system: bool = True
    #: Lists the tools of a request.
    takes_tools: bool = False
    #: Shows earlier calls, given their arguments so; None if it does not.
    call_arguments: Literal["objects", "texts"] | None = None
    #: Shows messages of the role `tool`.
    takes_results: bool = False


def probe_template(render: Render) -> TemplateFacts:
    """Render chats with marked tools, calls and results, and look for the marks."""
    system = {"role": "system", "content": _SYSTEM}
    late = [system, _ASK, _ANSWER, {"role": "system", "content": _LATE_SYSTEM}, _ASK]
    takes_system = _SYSTEM in _rendered(render, [system, _ASK], tools=False)
    shown = _rendered(render, late, tools=False)
    places = [shown.find(text) for text in (_SYSTEM, _ANSWER["content"], _LATE_SYSTEM)]
    takes_late_system = -1 < places[0] < places[1] < places[2]
    asks: list[list[dict[str, Any]]] = [[_ASK], [system, _ASK]]
    takes_tools = any(_TOOL in _rendered(render, messages) for messages in asks)
    call_arguments: Literal["objects", "texts"] | None = None
    objects = _rendered(render, _history({_KEY: _VALUE}))
    texts = _rendered(render, _history(f'{{"{_KEY}": "{_VALUE}"}}'))
    # A dictionary that is printed as Python prints it is not JSON; JSON in a string is escaped.
    if _shows_call(objects) and f"'{_KEY}'" not in objects:
        call_arguments = "objects"
    elif _shows_call(texts) and f'\\"{_KEY}' not in texts:
        call_arguments = "texts"
    takes_results = any(_RESULT in text for text in (objects, texts))
    return TemplateFacts(
        takes_system, takes_late_system, takes_tools, call_arguments, takes_results
    )


def _history(arguments: Any) -> list[dict[str, Any]]:
    function = {"name": _TOOL, "arguments": arguments}
    call = {"id": _CALL_ID, "type": "function", "function": function}
    return [
        _ASK,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": _CALL_ID, "name": _TOOL, "content": _RESULT},
    ]


def _rendered(render: Render, messages: Sequence[Mapping[str, Any]], *, tools: bool = True) -> str:
    """Return what the template makes of a chat, with `tools`; nothing where it refuses."""
    try:
        return render(messages, **({"tools": _TOOLS} if tools else {}))
    except Exception:  # noqa: BLE001 - a template is a program of the model's and raises anything
        return ""


def _shows_call(text: str) -> bool:
    # The tool itself may be listed, so only its argument's value tells of the call.
    return _VALUE in text
