"""Poolside's Laguna: GLM's calls, with the name on the line of the opening tag."""

from __future__ import annotations

from vllm_mlx.engine.parsing.tools.glm47 import Glm47


class PoolsideV1(Glm47):
    """Read and write Laguna's calls."""

    signs = (
        (
            "<arg_key>",
            "</assistant>",
        ),
    )
    value_opens = {"</arg_key><arg_value>": None}  # noqa: RUF012
    line = ""
