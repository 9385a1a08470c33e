"""Budgets of reasoning in a batch: closed by force, counted, and no row's business but its own."""

from __future__ import annotations

from typing import Any

from support.engines import Driver, make_engine, random_prompt
from support.grammar_tokens import PrintableTokens, PrintedText

from vllm_mlx.engine.core.request import Thinking

TOKENS = PrintableTokens()
CLOSING = tuple(TOKENS.encode("\n>>"))


def thinking(budget: int | None, *, starts_inside: bool = True) -> Thinking:
    """Return what tells reasoning between two markers."""
    return Thinking(
        reasoning="delimiters",
        delimiters=("<<", ">>"),
        starts_inside=starts_inside,
        max_tokens=budget,
        closing=CLOSING if budget is not None else (),
    )


def add(run: Driver, name: str, seed: int, **fields: Any) -> None:
    """Add a hot row that never writes a marker by itself, and ends at its limit."""
    run.add(
        name,
        random_prompt(3 + seed, seed),
        temperature=1.0,
        seed=seed,
        max_tokens=24,
        logit_bias=tuple((token, -100.0) for token in TOKENS.encode("<>\n")),
        **fields,
    )


def test_each_row_is_closed_after_its_own_budget() -> None:
    """Others draw what they draw alone, also those that only count."""
    alone = Driver(make_engine(make_decoder=PrintedText))
    add(alone, "plain", 5)
    add(alone, "counted", 6, thinking=thinking(None))
    expected = alone.run()
    run = Driver(make_engine(make_decoder=PrintedText))
    add(run, "plain", 5)
    add(run, "counted", 6, thinking=thinking(None))
    budgets = (0, 1, 7, 30)
    for index, budget in enumerate(budgets):
        add(run, f"budget-{budget}", index, thinking=thinking(budget))
    add(run, "outside", 9, thinking=thinking(3, starts_inside=False))
    results = run.run()
    for name in ("plain", "counted"):
        assert results[name].tokens == expected[name].tokens
    assert results["plain"].final is not None
    assert results["plain"].final.num_reasoning_tokens == 0
    assert results["counted"].final is not None
    assert results["counted"].final.num_reasoning_tokens == 24
    for budget in budgets:
        result = results[f"budget-{budget}"]
        assert result.final is not None
        if budget < 24:
            assert tuple(result.tokens[budget : budget + len(CLOSING)]) == CLOSING
            assert ">" not in result.text[: budget + 1]
            assert result.final.num_reasoning_tokens == budget + len(CLOSING)
        else:
            assert result.final.num_reasoning_tokens == 24
        assert result.text.count(">>") == (budget < 24)
    assert results["outside"].final is not None
    assert results["outside"].final.num_reasoning_tokens == 0
    assert ">" not in results["outside"].text
