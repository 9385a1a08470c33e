"""Rows with a grammar: valid, batched with plain rows, preempted, aborted, cut and forced."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from support.engines import Driver, Finished, make_engine, random_prompt, tiny_model
from support.grammar_tokens import PrintableTokens, PrintedText

from vllm_mlx.engine.core.request import Thinking
from vllm_mlx.engine.parsing.registry import make_reasoning
from vllm_mlx.server.structured_output import with_reasoning

END = PrintableTokens.END
HEAD = "%llguidance {}\nstart: "
#: A model of random weights must find its way to an end, so nothing here is open-ended.
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "level": {"type": "integer", "minimum": -20, "maximum": 5000},
        "tags": {"type": "array", "items": {"enum": ["a", "bc", 'd"e']}, "maxItems": 4},
        "inner": {
            "type": "object",
            "properties": {"on": {"type": "boolean"}, "x": {"type": ["null", "boolean"]}},
            "required": ["on"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "level", "inner"],
    "additionalProperties": False,
}
_SPACE = {"x-guidance": {"whitespace_pattern": "[ \\n]{0,3}"}}
GRAMMAR = f"{HEAD}%json {json.dumps({**SCHEMA, **_SPACE})}"


def driver(**options: Any) -> Driver:
    """Return an engine whose tokens are printable characters."""
    tokens = PrintableTokens()
    return Driver(
        make_engine(grammar_tokens=tokens, make_decoder=PrintedText, eos=(END,), **options)
    )


def check(result: Finished) -> None:
    """Hold a finished answer to the schema."""
    assert result.final is not None
    assert result.final.finish_reason == "stop", result.final
    jsonschema.validate(json.loads(result.text), SCHEMA)
    assert PrintableTokens().decode(result.tokens) == result.text


def add_plain(run: Driver, count: int = 5) -> None:
    """Add rows without a grammar, greedy and hot, with and without penalties."""
    for index in range(count):
        kind: dict[str, Any] = [
            {"temperature": 0.0},
            {"temperature": 1.0, "seed": index},
            {"temperature": 0.8, "seed": index, "top_p": 0.9, "repetition_penalty": 1.2},
        ][index % 3]
        run.add(f"plain-{index}", random_prompt(5 + 7 * index, index), max_tokens=60, **kind)


def test_rows_follow_their_grammars_and_leave_others_alone() -> None:
    """Every answer validates, and plain rows draw what they draw without company."""
    alone = driver()
    add_plain(alone)
    alone.run()
    together = driver()
    add_plain(together)
    for index in range(6):
        together.add(
            f"json-{index}",
            random_prompt(3 + index, index),
            grammar=GRAMMAR,
            temperature=0.0 if index == 0 else 1.0,
            top_p=0.9 if index == 1 else 1.0,
            presence_penalty=0.5 if index == 2 else 0.0,
            seed=index,
            max_tokens=400,
        )
    results = together.run()
    for name, result in alone.results.items():
        assert results[name].tokens == result.tokens
    for index in range(6):
        check(results[f"json-{index}"])
    assert len({results[f"json-{index}"].text for index in range(6)}) == 6


def test_an_answer_depends_on_its_seed_only() -> None:
    """The same seed gives the same answer alone, in company, and however it is sent."""

    def answer(company: int, interval: int) -> Finished:
        run = driver()
        add_plain(run, company)
        run.add(
            "row",
            [1, 2, 3],
            grammar=GRAMMAR,
            temperature=1.0,
            seed=7,
            max_tokens=400,
            stream_interval=interval,
        )
        return run.run()["row"]

    first = answer(0, 1)
    check(first)
    assert [answer(3, 1).text, answer(0, 16).text] == [first.text] * 2


def test_preempted_rows_go_on_where_they_were() -> None:
    """Rows that lose their KV and come back end as those that never did."""

    def run(budget: int) -> Driver:
        found = driver(kv_budget_bytes=budget, admission_headroom_tokens=8)
        for index in range(6):
            found.add(
                f"{index}",
                random_prompt(40, index),
                grammar=GRAMMAR,
                temperature=1.0,
                seed=index,
                max_tokens=300,
            )
        found.run()
        return found

    roomy, tight = run(1 << 40), run(250_000)
    assert tight.engine.stats().num_preemptions > 0
    for name, result in roomy.results.items():
        check(result)
        assert tight.results[name].text == result.text


@pytest.mark.parametrize(
    ("body", "options", "text", "reason"),
    [
        # Nothing may follow: the row ends by itself, without a token for the end.
        ('"yes"', {}, "yes", "stop"),
        # Used up exactly, but complete: it was not cut.
        ('"yes"', {"max_tokens": 3}, "yes", "stop"),
        ('"yes"', {"max_tokens": 2}, "ye", "length"),
        # An end is not drawn before the grammar allows it, nor before `min_tokens`.
        ("/a{2,9}/", {"logit_bias": ((END, 100.0),)}, "aa", "stop"),
        ("/a{2,9}/", {"logit_bias": ((END, 100.0),), "min_tokens": 5}, "aaaaa", "stop"),
        ("/a{2,9}/", {"logit_bias": ((END, 100.0),), "ignore_eos": True}, "aaaaaaaaa", "stop"),
        # A complete grammar ends the row whatever else is asked for.
        ('"yes"', {"min_tokens": 9}, "yes", "stop"),
        ('"yes"', {"ignore_eos": True}, "yes", "stop"),
        # Stop strings and tokens cut as ever.
        ('"yes" "no"', {"stop": ("sn",)}, "ye", "stop"),
        ('"yes"', {"stop_token_ids": (ord("e") - 32,)}, "y", "stop"),
        ('""', {}, "", "stop"),
    ],
)
def test_how_a_row_ends(body: str, options: dict[str, Any], text: str, reason: str) -> None:
    """A complete grammar ends its row with `stop`, a cut one with `length`."""
    run = driver()
    run.add("row", [5, 6], grammar=HEAD + body, **{"max_tokens": 40, **options})
    result = run.run()["row"]
    assert result.final is not None
    assert (result.text, result.final.finish_reason) == (text, reason)


def test_one_rows_bad_grammar_is_its_own() -> None:
    """A grammar that does not compile ends its row with the reason, and no other."""
    run = driver()
    run.add("bad", [1], grammar=f"{HEAD}unknown")
    run.add("good", [1], grammar=f'{HEAD}"yes"')
    run.add("plain", [1], max_tokens=8)
    results = run.run()
    final = results["bad"].final
    assert final is not None
    assert final.error is not None
    assert (final.error.code, final.error.param) == ("invalid_value", "grammar")
    assert "unknown name" in final.error.message
    assert results["good"].text == "yes"
    assert len(results["plain"].tokens) == 8


def test_an_engine_without_a_tokenizer_refuses_grammars() -> None:
    """There a grammar is an error, not ignored."""
    run = Driver(make_engine())
    run.add("row", [1], grammar=GRAMMAR)
    final = run.run()["row"].final
    assert final is not None
    assert final.error is not None
    assert "follows no grammars" in final.error.message


def test_a_token_that_breaks_the_grammar_ends_the_row() -> None:
    """Where nothing that the grammar allows can be drawn, the row says so and others go on."""
    run = driver()
    run.add("row", [1], grammar=f'{HEAD}"yes"', stop_token_ids=(ord("y") - 32,), min_tokens=5)
    run.add("plain", [1], max_tokens=8)
    results = run.run()
    final = results["row"].final
    assert final is not None
    assert final.error is not None
    assert final.error.code == "row_failed"
    assert "can be followed no further" in final.error.message
    assert len(results["plain"].tokens) == 8


def test_rows_may_be_aborted_at_any_time() -> None:
    """While its grammar compiles, and while it decodes, a row leaves within one step."""
    run = driver()
    run.add("early", [1], grammar=GRAMMAR, max_tokens=400)
    run.engine.abort("early")
    run.step()
    assert run.results["early"].num_finals == 1
    run.add("late", [1], grammar=GRAMMAR, max_tokens=400)
    while not run.results["late"].tokens:
        run.step()
    run.engine.abort("late")
    run.step()
    final = run.results["late"].final
    assert final is not None
    assert final.finish_reason == "abort"
    assert not run.engine.has_work


def test_a_fault_of_the_device_leaves_the_engine_able() -> None:
    """Rows in flight end with it; a grammar that comes after is followed."""
    model, _ = tiny_model("full")
    faults = [RuntimeError("device lost")]

    class Faulty:
        layers = model.layers

        def __call__(self, tokens: Any, **kwargs: Any) -> Any:
            if faults and run.results["first"].tokens:
                raise faults.pop()
            return model(tokens, **kwargs)

    run = driver(model=Faulty())
    run.add("first", [1], grammar=GRAMMAR, max_tokens=400)
    run.run()
    final = run.results["first"].final
    assert final is not None
    assert final.finish_reason == "error"
    run.add("second", [1], grammar=GRAMMAR, temperature=1.0, seed=1, max_tokens=400)
    check(run.run()["second"])


class HalfTokens(PrintableTokens):
    """Have the two bytes of one character as tokens of their own, 0 and 1."""

    def __init__(self) -> None:
        super().__init__()
        self._tokens[0], self._tokens[1] = "é".encode()[:1], "é".encode()[1:]


@pytest.mark.parametrize("budget", [0, 1, 2, 3, 6, 7])
def test_reasoning_is_closed_where_a_grammar_lets_it(budget: int) -> None:
    """A budget of reasoning that ends amid a character lets the character end first."""
    reasoning = make_reasoning("delimiters", ("<<", ">>"))
    grammar = with_reasoning(
        f'{HEAD}"yes"', reasoning=reasoning, in_reasoning=True, special_tokens={}
    )
    tokens = HalfTokens()
    closing = tuple(tokens.encode(">>"))
    run = Driver(make_engine(grammar_tokens=tokens, make_decoder=PrintedText, eos=(END,)))
    run.add(
        "row",
        [5],
        grammar=grammar,
        # The model would write this character for ever, and no line breaks.
        logit_bias=((0, 100.0), (1, 100.0), (95, -100.0)),
        thinking=Thinking(
            reasoning="delimiters",
            delimiters=("<<", ">>"),
            starts_inside=True,
            max_tokens=budget,
            closing=closing,
        ),
        max_tokens=50,
    )
    result = run.run()["row"]
    assert result.final is not None
    assert result.final.finish_reason == "stop", result.final
    thought = [0, 1] * ((budget + 1) // 2)
    assert result.tokens == [*thought, *closing, *tokens.encode("yes")]
