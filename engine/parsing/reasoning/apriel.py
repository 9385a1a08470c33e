"""Apriel: reasoning behind one sentence, the answer behind another."""

from __future__ import annotations

from vllm_mlx.engine.parsing.reasoning_format import ReasoningFormat


class Apriel(ReasoningFormat):
    """Read what comes before `[BEGIN FINAL RESPONSE]`; the template writes the first sentence."""

    signs = (("[BEGIN FINAL RESPONSE]",),)
    openers = ("Here are my reasoning steps:", "<thinking>")
    closers = ("[BEGIN FINAL RESPONSE]", "[END FINAL RESPONSE]", "</thinking>")
