"""XLAM: a JSON list, bare or in a code fence."""

from __future__ import annotations

from vllm_mlx.engine.parsing.fenced_json import FencedJson


class XLam(FencedJson):
    """Read and write xLAM's lists."""

    is_list = True
