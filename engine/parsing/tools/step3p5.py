"""Step 3.5: Qwen 3 Coder's tags, calls without a line break between them."""

from __future__ import annotations

from vllm_mlx.engine.parsing.tools.qwen3_xml import Qwen3Xml


class Step3p5(Qwen3Xml):
    """Read and write Step 3.5's calls."""

    signs = (
        (
            "<function=",
            "<|im_start|>tool_response",
        ),
    )
    between = ""
