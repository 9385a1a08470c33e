"""MiniCPM 5: `<function name="f">` and `<param name="city">` tags, longer text as CDATA."""

from __future__ import annotations

from typing import Any

from vllm_mlx.engine.parsing.tagged_format import TaggedFormat
from vllm_mlx.engine.parsing.tagged_value import ValueEnd

_CDATA = '"><![CDATA['


class MiniCpm5(TaggedFormat):
    """Read and write MiniCPM 5's calls."""

    signs = (('<function name="', "<param name="),)
    triggers = ('<function name="',)
    closers = ("</function>",)
    call_open = '<function name="'
    name_close = '">'
    call_close = "</function>"
    argument_open = '<param name="'
    value_opens = {_CDATA: True, '">': None}  # noqa: RUF012
    value_close = "</param>"
    line = ""

    @classmethod
    def value_end(cls, opener: str) -> ValueEnd:
        """Return what ends a value that began with `opener`."""
        end = super().value_end(opener)
        return ValueEnd(("]]></param>",), end.followers) if opener == _CDATA else end

    @classmethod
    def render_argument(cls, key: str, value: Any) -> str:
        """Return one argument with its tags."""
        if isinstance(value, str) and any(char in value for char in "<&\n"):
            return f"{cls.argument_open}{key}{_CDATA}{value}]]>{cls.value_close}"
        return f'{cls.argument_open}{key}">{cls.value_text(value)}{cls.value_close}'
