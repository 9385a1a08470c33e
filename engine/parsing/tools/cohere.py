"""Cohere's Command: a JSON list of actions."""

from __future__ import annotations

from typing import Any

from vllm_mlx.engine.parsing.format_group import FormatGroup
from vllm_mlx.engine.parsing.json_calls import CallKeys
from vllm_mlx.engine.parsing.json_format import JsonFormat
from vllm_mlx.engine.parsing.reader import Steps
from vllm_mlx.engine.parsing.reasoning.cohere import Cohere as CohereReasoning
from vllm_mlx.engine.parsing.scan import Scan

#: The ids count the calls of one answer: they tell nobody apart across a conversation.
_KEYS = CallKeys(names=("tool_name",), arguments=("parameters",), ids=(), ignored=("tool_call_id",))


class CohereAction(JsonFormat):
    """Read and write the list of Command R7B and later, between markers."""

    triggers = ("<|START_ACTION|>",)
    closers = ("<|END_ACTION|>",)
    opening = "<|START_ACTION|>"
    closing = "<|END_ACTION|>"
    keys = _KEYS
    is_list = True

    @classmethod
    def call_object(cls, name: str, arguments: Any) -> dict[str, Any]:
        """Return a call as an object."""
        return {"tool_call_id": "0", **super().call_object(name, arguments)}


class CommandRAction(JsonFormat):
    """Read and write the list of Command R and R+, in a fence behind `Action:`."""

    triggers = ("Action:",)
    opening = "Action: ```json\n"
    closing = "\n```"
    keys = _KEYS
    is_list = True

    @classmethod
    def parse(cls, scan: Scan) -> Steps[None]:
        """Read one list."""
        fence = yield from scan.fence()
        yield from super().parse(scan)
        if fence:
            yield from scan.close("```")


class Cohere(FormatGroup):
    """Write the list between markers; read both."""

    signs = (("<|START_ACTION|>",),)
    tokens = ("<|START_ACTION|>",)
    framing = CohereReasoning
    members = (CohereAction, CommandRAction)


class CommandR(FormatGroup):
    """Write the list in a fence; read both."""

    signs = (("Action:", '"tool_name"'),)
    members = (CommandRAction, CohereAction)
