"""Calls that are forced on a model of random weights, in every format, at temperature 1."""

from __future__ import annotations

import codecs
import json
from functools import cache
from typing import Any

import jsonschema
import pytest
from support.engines import Driver, Finished, make_info, random_prompt
from support.grammar_tokens import ByteTokens
from support.tiny_models import KINDS, make_tiny_model

from vllm_mlx.engine.config import EngineConfig
from vllm_mlx.engine.models.assembly import assemble_engine
from vllm_mlx.engine.models.probe import Probe, probe_model
from vllm_mlx.engine.parsing import (
    TOOL_PARSERS,
    ContentDelta,
    ToolArgumentsDelta,
    ToolCallEnd,
    ToolCallStart,
    kept_tokens,
    make_parser,
)
from vllm_mlx.server.answers.call_grammar import forced_calls, free_answer
from vllm_mlx.server.answers.tool_choice import ToolChoice

#: One name of each format.
NAMES = sorted({kind: name for name, kind in reversed(TOOL_PARSERS.items())}.values())

#: Markers that are special tokens of the models that write them.
MARKERS = [
    *("<|tool_call>", "<tool_call|>", "<|tools_prefix|>", "<|tools_suffix|>", "<|START_ACTION|>"),
    *("<|END_ACTION|>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>"),
    *("<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "<|channel|>", "<|message|>", "<|constrain|>"),
    *("<|call|>", "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "[TOOL_CALLS]"),
    *("<|tool_call_begin|>", "<|tool_call_end|>", "<|tool_call_argument_begin|>", "[ARGS]"),
    *("<|tool_call_start|>", "<|tool_call_end|>", "<|function_call|>", "<|python_tag|>"),
]
VOCAB_SIZE = 300
CONFIG = {**KINDS["full"], "vocab_size": VOCAB_SIZE}

#: Values of which none is open-ended: random weights must find their way to an end.
VALUES: list[dict[str, Any]] = [
    {"enum": ["metric", "imperial", 'a "b" <c>']},
    {"type": "integer", "minimum": -5, "maximum": 5000},
    {"type": "boolean"},
    {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 1, "maxItems": 3},
    {"const": "über"},
    {"type": "string", "minLength": 2, "maxLength": 6},
    {"type": "number", "minimum": 0, "maximum": 9},
]


def tool_of(number: int) -> dict[str, Any]:
    """Return one of 20 tools, with one to five arguments of which some are optional."""
    values = {f"arg_{i}": VALUES[(number + i) % len(VALUES)] for i in range(1 + number % 5)}
    parameters = {
        "type": "object",
        "properties": values,
        "required": list(values)[: 1 + number // 5],
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": f"tool_{number}", "parameters": parameters}}


TOOLS = [tool_of(number) for number in range(20)]
TOKENS = ByteTokens(dict.fromkeys(MARKERS))


class Utf8:
    """Decode tokens that are bytes; special ones are no text of their own."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token_id: int) -> str:
        """Return the characters that a byte completes."""
        return self._decoder.decode(bytes([token_id])) if token_id < 256 else ""

    def flush(self) -> str:
        """Return what was begun and not completed."""
        return self._decoder.decode(b"", final=True)


@cache
def model() -> tuple[Any, Probe]:
    """Return a model whose vocabulary holds every byte and the markers."""
    KINDS.setdefault("bytes", CONFIG)
    made = make_tiny_model("bytes")
    return made, probe_model(made, CONFIG["model_type"], max_token=VOCAB_SIZE)


def driver() -> Driver:
    """Return an engine over it."""
    made, probe = model()
    engine = assemble_engine(
        made,
        probe,
        make_info("full", eos=(256,)),
        EngineConfig(max_num_seqs=64),
        Utf8,
        grammar_tokens=TOKENS,
    )
    return Driver(engine)


def add(run: Driver, row: str, name: str, grammar: str, seed: int) -> None:
    """Add one row of a format, drawn from the model's own distribution."""
    kept = kept_tokens(TOOL_PARSERS[name], None, TOKENS.added_tokens)
    shown = tuple((TOKENS.added_tokens[text], text) for text in kept)
    prompt = random_prompt(4 + seed % 7, seed)
    run.add(
        row,
        prompt,
        grammar=grammar,
        shown_tokens=shown,
        temperature=1.0,
        seed=seed,
        max_tokens=900,
    )


def check(result: Finished, name: str, tools: list[dict[str, Any]]) -> None:
    """Hold an answer to be one whole call that follows its schema, and nothing else."""
    assert result.final is not None
    assert result.final.finish_reason == "stop", (name, result.text)
    parser = make_parser(name, None, tools)
    events = [event for character in result.text for event in parser.feed(character)]
    events += parser.finish()
    content = "".join(event.text for event in events if isinstance(event, ContentDelta))
    (start,) = (event for event in events if isinstance(event, ToolCallStart))
    (end,) = (event for event in events if isinstance(event, ToolCallEnd))
    arguments = "".join(event.text for event in events if isinstance(event, ToolArgumentsDelta))
    assert end.complete, (name, result.text)
    assert content.strip() == "", (name, result.text)
    schema = next(
        tool["function"]["parameters"] for tool in tools if tool["function"]["name"] == start.name
    )
    jsonschema.validate(json.loads(arguments), schema)


def force(names: list[str], numbers: list[int]) -> int:
    """Force a call to one of the tools of these numbers in each format; return how many."""
    run = driver()
    special = dict(TOKENS.added_tokens)
    for index, name in enumerate(names):
        for number in numbers:
            choice = ToolChoice("required", f"tool_{number}" if number % 2 else None)
            grammar = forced_calls(
                TOOL_PARSERS[name],
                TOOLS[number : number + 3],
                choice,
                is_parallel=False,
                special_tokens=special,
            )
            add(run, f"{name} {number}", name, grammar, seed=1000 * index + number)
    results = run.run()
    for row, result in results.items():
        name, _, number = row.partition(" ")
        check(result, name, TOOLS[int(number) : int(number) + 3])
    return len(results)


def test_every_format_is_forced_once() -> None:
    """Rows of all formats in one batch end with one valid call each."""
    assert force(NAMES, [6]) == len(NAMES) >= 40


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_format_is_forced_over_every_schema() -> None:
    """20 schemas in each format, 800 draws and more, and not one that is no valid call."""
    assert force(NAMES, list(range(20))) >= 800


def test_strict_calls_among_text_follow_their_schema() -> None:
    """A model that may write anything writes no call that breaks the schema of a strict tool.

    The marker that begins a call is made likely, so that it comes, and the first of text.
    """
    strict = {"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}
    run = driver()
    marker = TOKENS.added_tokens["[TOOL_CALLS]"]
    grammar = free_answer(
        TOOL_PARSERS["mistral"],
        [strict],
        is_parallel=False,
        special_tokens=dict(TOKENS.added_tokens),
        reasoning=None,
    )
    assert grammar is not None
    for seed in range(4):
        kept = kept_tokens(TOOL_PARSERS["mistral"], None, TOKENS.added_tokens)
        run.add(
            f"{seed}",
            random_prompt(4, seed),
            grammar=grammar,
            shown_tokens=tuple((TOKENS.added_tokens[text], text) for text in kept),
            logit_bias=((marker, 60.0), (256, 30.0)),
            temperature=1.0,
            seed=seed,
            max_tokens=400,
        )
    for result in run.run().values():
        check(result, "mistral", [strict])
