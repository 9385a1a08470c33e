"""Hold the worked example of a new format in the documentation to what it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from parsing.harness import TOOLS, put_together
from parsing.test_grammars import BYTES

from vllm_mlx.engine.parsing import TOOL_PARSERS, detect_parsers, kept_tokens, make_reasoning
from vllm_mlx.engine.parsing.reasoning_format import ReasoningFormat
from vllm_mlx.engine.parsing.schema import ToolSet
from vllm_mlx.engine.parsing.stream import StreamParser
from vllm_mlx.engine.parsing.tool_format import ToolFormat

PAGE = Path(__file__).parents[2] / "docs" / "contributing.md"


@pytest.fixture(scope="module")
def acme() -> type[ToolFormat]:
    """Give the class of the example, run as the page has it."""
    (source,) = re.findall(r'```python\n("""Acme:.*?)```', PAGE.read_text(), re.DOTALL)
    names: dict[str, object] = {"__name__": "acme"}
    exec(compile(source, "acme.py", "exec"), names)
    found = names["Acme"]
    assert isinstance(found, type)
    assert issubclass(found, ToolFormat)
    return found


def test_the_example_reads_writes_and_enforces_calls(acme: type[ToolFormat]) -> None:
    """The class of the page parses what it writes, at every cut, and its grammar takes it."""
    calls = [("get_weather", {"city": 'a "</call>" b', "days": 3}), ("get", {})]
    text = f"Look:\n{acme.render_calls(calls)}\nDone <call name="
    for at in range(len(text)):
        parser = StreamParser([acme], ReasoningFormat(), ToolSet(TOOLS))
        events = parser.feed(text[:at]) + parser.feed(text[at:]) + parser.finish()
        parsed = put_together(events)
        assert parsed.values() == calls
        assert parsed.content == "Look:\nDone <call name="
    encoded = BYTES.encode(acme.render_call(*calls[0]))
    matcher = BYTES.matcher(acme.grammar(TOOLS))
    assert matcher.try_consume_tokens(encoded) == len(encoded)
    assert matcher.is_accepting()


def test_the_page_names_real_files_and_lines() -> None:
    """The registry has lines of the form that the page shows, and the folders are there."""
    root = PAGE.parents[1]
    page = PAGE.read_text()
    for path in re.findall(r"`((?:engine|tests)/parsing/[a-z_./]+)`", page):
        assert (root / path).exists(), path
    registry = (root / "engine/parsing/registry.py").read_text()
    assert re.search(
        r'^    "[a-z0-9_]+\.[A-Za-z0-9]+": \("[a-z0-9_]+",\),$', registry, re.MULTILINE
    )


def test_special_tokens_that_text_must_keep() -> None:
    """Of the special tokens those that the formats read are kept, and no others."""
    special = ["<s>", "</s>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "<|channel|>"]
    special += ["<|message|>", "<|constrain|>", '<|"|>', "<|tool_call>", "<|python_tag|>", ""]
    reasoning = make_reasoning("mistral")
    kept = kept_tokens(TOOL_PARSERS["mistral"], reasoning, special)
    assert kept == {"[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]"}
    kept = kept_tokens(TOOL_PARSERS["harmony"], None, special)
    assert kept == {"<|channel|>", "<|message|>", "<|constrain|>"}
    assert kept_tokens(TOOL_PARSERS["gemma4"], None, special) == {'<|"|>', "<|tool_call>"}
    assert kept_tokens(None, None, special) == frozenset()


def test_a_token_of_the_vocabulary_helps_where_the_template_does_not() -> None:
    """Tokens decide only if the template shows nothing."""
    assert detect_parsers("{{ tools }}", {"[TOOL_CALLS]"})[0] == "mistral_list"
    assert detect_parsers("<TOOLCALL>", {"[TOOL_CALLS]"})[0] == "nemotron_v2"
    assert detect_parsers("{{ messages }}", {"<think>"})[:2] == (None, "qwen3")
