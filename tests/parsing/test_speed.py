"""Hold that parsing keeps up with any model, and takes no longer by the character as texts grow."""

from __future__ import annotations

import pytest

from vllm_mlx.engine.benchmark.parsing import rate, texts

pytestmark = pytest.mark.performance


@pytest.mark.parametrize("tools", ["hermes", "qwen3_xml", "glm47", "gemma4", "auto"])
def test_text_is_parsed_at_two_megabytes_a_second(tools: str) -> None:
    """Prose and long strings pass at 2 MB of CPU time and more, in pieces of 64 characters."""
    found = {name: rate(text, 64, tools) for name, text in texts(tools)}
    assert min(found["prose"], found["long string"]) >= 2.0, found


@pytest.mark.parametrize("tools", ["hermes", "qwen3_xml", "mistral", "minimax_m3"])
def test_time_grows_with_the_text_alone(tools: str) -> None:
    """Eight times the text takes eight times as long, not sixty-four times."""
    for _, text in texts(tools):
        short = text[: len(text) // 8]
        assert rate(text, 16, tools) > rate(short, 16, tools) / 3
