"""FireFunction 2: a JSON list behind `functools`."""

from __future__ import annotations

from vllm_mlx.engine.parsing.json_format import JsonFormat


class FireFunction(JsonFormat):
    """Read and write FireFunction's list."""

    signs = (("functools[",),)
    triggers = ("functools[",)
    opening = "functools"
    is_list = True
