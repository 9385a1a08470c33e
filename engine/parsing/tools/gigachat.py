"""GigaChat 3: one JSON object behind a marker."""

from __future__ import annotations

from typing import ClassVar

from vllm_mlx.engine.parsing.json_format import JsonFormat


class GigaChat(JsonFormat):
    """Read both forms of GigaChat 3; write that of 3.1."""

    signs: ClassVar[tuple[tuple[str, ...], ...]] = (("<|function_call|>",),)
    triggers = (
        "<|function_call|>",
        "function call<|role_sep|>",
        "<|message_sep|>\n\nfunction call<|role_sep|>",
    )
    closers = ("<|message_sep|>",)
    opening = "<|function_call|>"
    closing: ClassVar[str] = "<|message_sep|>"
    between = ""


class GigaChat3(GigaChat):
    """Read both forms; write that of 3.0, where a call is a message of its own."""

    signs = (("function call", "<|role_sep|>"),)
    opening = "function call<|role_sep|>\n"
    between = "\n\n"
