"""Reasoning followed by the token: counted truly, and closed when its budget is spent."""

from __future__ import annotations

import pytest

from vllm_mlx.engine.core.request import Thinking
from vllm_mlx.engine.core.thinking import ThinkingTracker
from vllm_mlx.engine.parsing import REASONING_PARSERS, make_parser, make_reasoning
from vllm_mlx.engine.parsing.events import ContentDelta, ReasoningDelta
from vllm_mlx.server.answers.plan import closing_text

DELIMITERS = ("<<", ">>")
#: One name of each reasoning format.
NAMES = sorted({kind: name for name, kind in REASONING_PARSERS.items()}.values())


def markers_of(name: str) -> tuple[str, str] | None:
    """Return the markers that the format of this name must be told."""
    return DELIMITERS if name == "delimiters" else None


def opener_of(name: str) -> str:
    """Return what a format writes up to where its reasoning begins."""
    reasoning = make_reasoning(name, markers_of(name))
    assert reasoning is not None
    parser, opener = make_parser(reasoning=name, reasoning_delimiters=markers_of(name)), ""
    for character in reasoning.render("x"):
        parser.feed(character)
        opener += character
        if parser.in_reasoning:
            break
    return opener


def drawn(tracker: ThinkingTracker, wanted: list[str], closing: list[str], limit: int) -> list[str]:
    """Draw what the model wants but where a token is forced; return the texts of all tokens."""
    texts: list[str] = []
    wanted = list(wanted)
    while wanted and len(texts) < limit:
        forced = tracker.forced_token
        text = closing[forced] if forced is not None else wanted.pop(0)
        tracker.take(-1 if forced is None else forced, text)
        texts.append(text)
    return texts


@pytest.mark.parametrize("size", [1, 3, 100])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("budget", [0, 5])
def test_every_format_is_closed_after_its_budget(name: str, budget: int, size: int) -> None:
    """Whatever the marker, and however it is cut, so many tokens of thought come and no more."""
    reasoning = make_reasoning(name, markers_of(name))
    assert reasoning is not None
    end = closing_text(reasoning)
    closing = [end[start : start + size] for start in range(0, len(end), size)]
    tracker = ThinkingTracker(
        Thinking(
            reasoning=name,
            delimiters=markers_of(name),
            max_tokens=budget,
            closing=tuple(range(len(closing))),
        )
    )
    opener = opener_of(name)
    texts = drawn(tracker, [*opener, *["t"] * 20], closing, limit=200)
    assert tracker.num_tokens == budget + len(closing)
    parser = make_parser(reasoning=name, reasoning_delimiters=markers_of(name))
    events = [event for text in texts for event in parser.feed(text)] + parser.finish()
    thought = "".join(event.text for event in events if isinstance(event, ReasoningDelta))
    assert thought == "t" * budget
    if not reasoning.answer_opening:
        answer = "".join(event.text for event in events if isinstance(event, ContentDelta))
        assert answer == "t" * (20 - budget)


def test_a_prompt_may_have_begun_the_reasoning() -> None:
    """Without a budget nothing is forced, and the marker's own tokens count as reasoning."""
    tracker = ThinkingTracker(Thinking(reasoning="qwen3", starts_inside=True))
    texts = drawn(tracker, ["so", " it", " is", "</", "think", ">", "\n\n", "Yes"], [], 20)
    assert texts[-1] == "Yes"
    assert tracker.num_tokens == 6


def test_a_model_that_ends_in_time_is_left_alone() -> None:
    """Nothing is forced within the budget, nor after the reasoning has ended."""
    thinking = Thinking(reasoning="qwen3", starts_inside=True, max_tokens=3, closing=(0,))
    tracker = ThinkingTracker(thinking)
    texts = drawn(tracker, ["a", "b", "</think>", *"c" * 9], ["</think>"], 30)
    assert texts == ["a", "b", "</think>", *"c" * 9]
    assert tracker.num_tokens == 3


def test_reasoning_that_begins_again_is_closed_at_once() -> None:
    """The budget is that of the whole answer."""
    thinking = Thinking(reasoning="qwen3", max_tokens=2, closing=(0,))
    texts = drawn(
        ThinkingTracker(thinking), ["<think>", "a", "b", "c", "<think>", "d"], ["</think>"], 30
    )
    assert texts == ["<think>", "a", "b", "</think>", "c", "<think>", "</think>", "d"]


def test_a_closing_that_closes_nothing_does_not_go_on_for_ever() -> None:
    """The model draws between two attempts."""
    thinking = Thinking(reasoning="qwen3", starts_inside=True, max_tokens=0, closing=(0,))
    texts = drawn(ThinkingTracker(thinking), ["a", "b"], ["x"], 30)
    assert texts == ["x", "a", "x", "b"]


def test_a_call_may_end_reasoning() -> None:
    """Formats whose calls do so are read with their calls."""
    thinking = Thinking(reasoning="gpt_oss", tools="harmony", max_tokens=99, closing=(0,))
    tracker = ThinkingTracker(thinking)
    call = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>"
    drawn(tracker, ["<|channel|>analysis<|message|>", "a", call, "b"], ["<|end|>"], 30)
    assert tracker.num_tokens == 2
