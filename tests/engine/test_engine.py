"""What one engine does with requests: how they end, fail, wait, and what is counted."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from support.engines import Driver, make_engine, random_prompt, reference, tiny_model
from support.tiny_models import VOCAB_SIZE

from vllm_mlx.engine.core.outputs import ErrorInfo, RowTimings


def greedy(prompt: list[int], count: int) -> list[int]:
    """Return mlx-lm's greedy continuation."""
    return reference("full", tuple(prompt), count)[0]


def error_of(driver: Driver, name: str) -> ErrorInfo:
    """Return the error that a request ended with."""
    final = driver.results[name].final
    assert final is not None
    assert final.error is not None
    return final.error


def ending(driver: Driver, name: str) -> tuple[Any, Any]:
    """Return a request's finish reason and stop reason."""
    final = driver.results[name].final
    assert final is not None
    return final.finish_reason, final.stop_reason


def test_end_of_sequence_ends_a_row_without_its_text() -> None:
    """An EOS token finishes the row with `stop`; it counts, but has no text."""
    prompt = random_prompt(10, 0)
    tokens = greedy(prompt, 12)
    eos = tokens[5]
    expected = tokens[: tokens.index(eos) + 1]
    driver = Driver(make_engine(eos=(eos,)))
    driver.add("row", prompt, max_tokens=12)
    result = driver.run()["row"]
    assert result.tokens == expected
    assert ending(driver, "row") == ("stop", None)
    assert result.text == "".join(f"{token} " for token in expected[:-1])


def test_ignore_eos_goes_on_through_the_end_of_sequence() -> None:
    """With `ignore_eos` the row runs to its length."""
    prompt = random_prompt(10, 0)
    tokens = greedy(prompt, 12)
    driver = Driver(make_engine(eos=(tokens[5],)))
    driver.add("row", prompt, max_tokens=12, ignore_eos=True)
    assert driver.run()["row"].tokens == tokens
    assert ending(driver, "row") == ("length", None)


def test_a_stop_token_id_is_named_as_the_reason() -> None:
    """A stop id of the request ends the row, and says which it was."""
    prompt = random_prompt(10, 0)
    tokens = greedy(prompt, 12)
    driver = Driver(make_engine())
    driver.add("row", prompt, max_tokens=12, stop_token_ids=(tokens[3],))
    result = driver.run()["row"]
    assert ending(driver, "row") == ("stop", tokens[3])
    assert result.tokens == tokens[: tokens.index(tokens[3]) + 1]


@pytest.mark.parametrize("stream_interval", [1, 5])
def test_a_stop_string_over_two_tokens_is_cut_out_exactly(stream_interval: int) -> None:
    """Text ends right before the stop string, wherever token borders are."""
    prompt = random_prompt(10, 0)
    tokens = greedy(prompt, 12)
    text = "".join(f"{token} " for token in tokens)
    stop = text[text.index(f"{tokens[4]} ") + 1 :][:4]
    driver = Driver(make_engine())
    driver.add("row", prompt, max_tokens=12, stop=(stop,), stream_interval=stream_interval)
    result = driver.run()["row"]
    assert ending(driver, "row") == ("stop", stop)
    assert result.text == text[: text.index(stop)]


def test_a_stop_string_in_the_last_allowed_token_is_a_stop_and_not_a_length() -> None:
    """Where both ends fall on one token, the text must not hold the stop string."""
    prompt = random_prompt(10, 0)
    tokens = greedy(prompt, 3)
    stop = f"{tokens[2]} "
    driver = Driver(make_engine())
    driver.add("row", prompt, max_tokens=3, stop=(stop,))
    result = driver.run()["row"]
    assert ending(driver, "row") == ("stop", stop)
    assert stop not in result.text


def test_min_tokens_forbids_every_kind_of_stop_before_it() -> None:
    """Neither EOS nor a stop id is drawn, and no stop string matches, before `min_tokens`."""
    prompt = random_prompt(10, 0)
    first = greedy(prompt, 1)[0]
    driver = Driver(make_engine(eos=(first,)))
    driver.add("eos", prompt, max_tokens=8, min_tokens=4)
    driver.add("id", prompt, max_tokens=8, min_tokens=4, ignore_eos=True, stop_token_ids=(first,))
    driver.add("string", prompt, max_tokens=8, min_tokens=4, ignore_eos=True, stop=(" ",))
    results = driver.run()
    assert first not in results["eos"].tokens[:4]
    assert first not in results["id"].tokens[:4]
    assert len(results["string"].tokens) == 4


def test_an_aborted_row_ends_at_the_next_step_wherever_it_is() -> None:
    """Queued, prefilling and running rows all end with `abort`, and all bytes return."""
    engine = make_engine(max_num_seqs=2, prefill_tokens_per_step=8)
    driver = Driver(engine)
    driver.add("running", random_prompt(3, 1), max_tokens=50)
    driver.step()
    driver.step()
    driver.add("prefilling", random_prompt(200, 1), max_tokens=50)
    driver.step()
    driver.add("queued", random_prompt(3, 2), max_tokens=50)
    phases = {row.request_id: row.phase for row in engine.stats().requests}
    assert phases == {"running": "generation", "prefilling": "prefill", "queued": "queued"}
    for name in phases:
        engine.abort(name)
    engine.abort("unknown")
    finals = driver.step()
    assert {row.request_id: row.finish_reason for row in finals} == dict.fromkeys(phases, "abort")
    driver.run()
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.kv_bytes) == (0, 0, 0)


def test_the_final_output_says_how_long_each_part_took() -> None:
    """Parts that a row did not get to are missing; the gaps between all tokens are counted."""
    engine = make_engine(max_num_seqs=1)
    driver = Driver(engine)
    driver.add("first", random_prompt(70, 1), max_tokens=5)
    driver.add("one token", random_prompt(3, 2), max_tokens=1)
    driver.add("queued", random_prompt(3, 3), max_tokens=5)
    driver.step()
    engine.abort("queued")
    results = driver.run()
    timings = {name: result.final.timings for name, result in results.items() if result.final}
    first, one, queued = timings["first"], timings["one token"], timings["queued"]
    assert first is not None
    assert one is not None
    assert queued == RowTimings()
    assert first.queue_s is not None
    assert first.prefill_s is not None
    assert first.decode_s is not None
    assert one.queue_s is not None
    assert min(first.queue_s, first.prefill_s, first.decode_s) >= 0
    # It waited for all of the first.
    assert one.queue_s >= first.prefill_s + first.decode_s
    assert one.decode_s == 0
    gaps = engine.stats().token_gaps
    assert gaps is not None
    assert sum(gaps.counts) == 4
    assert gaps.total == pytest.approx(first.decode_s)


def test_a_finished_row_is_freed_within_one_step_even_if_it_was_the_last() -> None:
    """A row that ended on its text is in flight once more; the engine steps on to free it."""
    engine = make_engine()
    driver = Driver(engine)
    driver.add("row", random_prompt(3, 1), max_tokens=50, stop=(" ",))
    while driver.results["row"].final is None:
        driver.step()
    assert engine.has_work
    driver.step()
    assert not engine.has_work
    assert engine.stats().kv_bytes == 0


@pytest.mark.parametrize(
    ("prompt", "sampling", "code", "words"),
    [
        ([], {}, "invalid_value", "no tokens"),
        ([VOCAB_SIZE], {}, "invalid_value", f"token id {VOCAB_SIZE}"),
        ([-1], {}, "invalid_value", "token id -1"),
        ([1] * 256, {}, "context_length_exceeded", "256 tokens"),
        ([1], {"max_tokens": -1}, "invalid_value", "negative"),
        ([1], {"repetition_penalty": 0.0}, "invalid_value", "above 0"),
        ([1], {"presence_penalty": float("nan")}, "invalid_value", "presence_penalty"),
        ([1], {"frequency_penalty": float("inf")}, "invalid_value", "frequency_penalty"),
        ([1], {"logit_bias": ((VOCAB_SIZE, 1.0),)}, "invalid_value", f"{VOCAB_SIZE}: 1.0"),
        ([1], {"logit_bias": ((1, float("inf")),)}, "invalid_value", "finite"),
    ],
)
def test_a_request_that_cannot_be_served_ends_with_its_error(
    prompt: list[int], sampling: dict[str, Any], code: str, words: str
) -> None:
    """The error says what was wrong; a neighbour is not disturbed."""
    driver = Driver(make_engine(max_model_len=256))
    driver.add("good", [1, 2, 3], max_tokens=5)
    driver.add("bad", prompt, **sampling)
    driver.run()
    assert error_of(driver, "bad").code == code
    assert words in error_of(driver, "bad").message
    assert len(driver.results["good"].tokens) == 5


def test_a_prompt_over_the_kv_budget_is_refused_with_the_sizes() -> None:
    """What can never fit is refused at once, by name."""
    row_bytes = make_engine()._layout.row_cost.row_bytes(100)
    driver = Driver(make_engine(kv_budget_bytes=row_bytes))
    driver.add("big", random_prompt(100, 0), max_tokens=4)
    driver.add("fits", random_prompt(99, 0), max_tokens=4)
    driver.run()
    assert error_of(driver, "big").code == "request_too_large"
    assert "at most 100 tokens" in error_of(driver, "big").message
    assert ending(driver, "fits") == ("length", None)


def test_a_completion_is_clamped_to_the_context() -> None:
    """Prompt and completion together never exceed the context; the row ends with `length`."""
    driver = Driver(make_engine(max_model_len=64))
    driver.add("row", random_prompt(60, 0), max_tokens=1000)
    assert len(driver.run()["row"].tokens) == 4
    assert ending(driver, "row") == ("length", None)


class Faulty:
    """Wrap a model and raise when a forward's input holds a given token, or on a given call."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.layers = model.layers
        self.bad_token: int | None = None
        self.fails_at_batch = False

    def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
        """Compute, or raise."""
        is_prefill = inputs.shape[1] > 1
        if is_prefill and self.bad_token is not None and self.bad_token in inputs.tolist()[0]:
            raise RuntimeError("this prompt breaks the model")
        if not is_prefill and self.fails_at_batch:
            raise RuntimeError("the device failed")
        return self.model(inputs, cache=cache)


def make_faulty() -> tuple[Faulty, Driver]:
    """Return a wrapped model and a driver over an engine of it."""
    faulty = Faulty(tiny_model("full")[0])
    return faulty, Driver(make_engine(model=faulty))


def test_a_prompt_that_breaks_the_model_ends_its_own_row_only() -> None:
    """A failing prefill is one request's error; its neighbour keeps its tokens."""
    faulty, driver = make_faulty()
    good = [token for token in random_prompt(30, 0) if token != 5]
    faulty.bad_token = 5
    driver.add("good", good, max_tokens=20)
    driver.add("bad", [1, 5, 2, 3], max_tokens=20)
    results = driver.run()
    assert "breaks the model" in error_of(driver, "bad").message
    assert results["good"].tokens == greedy(good, 20)


def test_a_device_fault_ends_the_rows_it_had_and_the_engine_goes_on() -> None:
    """After a failed batch forward every row has its error, nothing is held, and new rows run."""
    faulty, driver = make_faulty()
    for n in range(3):
        driver.add(f"lost{n}", random_prompt(10 + n, 0), max_tokens=20)
    for _ in range(4):
        driver.step()
    faulty.fails_at_batch = True
    driver.step()
    faulty.fails_at_batch = False
    for n in range(3):
        assert error_of(driver, f"lost{n}").code == "row_failed"
    assert driver.engine.stats().kv_bytes == 0
    prompt = random_prompt(12, 3)
    driver.add("new", prompt, max_tokens=10)
    assert driver.run()["new"].tokens == greedy(prompt, 10)


def test_a_long_prompt_beside_a_stream_never_computes_more_than_the_budget_a_step() -> None:
    """Between two tokens of the stream at most `prefill_tokens_per_step` prompt tokens run."""
    budget = 64
    engine = make_engine(prefill_tokens_per_step=budget)
    driver = Driver(engine)
    driver.add("stream", random_prompt(3, 0), max_tokens=80)
    while not driver.results["stream"].tokens:
        driver.step()
    driver.add("long", random_prompt(3400, 0), max_tokens=2)
    computed, seen = [], engine.stats().prefilled_tokens
    while driver.results["stream"].final is None:
        received = len(driver.results["stream"].tokens)
        driver.step()
        assert len(driver.results["stream"].tokens) == received + 1, "the stream skipped a step"
        now = engine.stats().prefilled_tokens
        computed.append(now - seen)
        seen = now
    assert max(computed) == budget
    driver.run()


def test_a_burst_of_short_prompts_is_prefilled_in_few_forwards() -> None:
    """Sixteen prompts of like length take two forwards, by the step's budget, and not sixteen."""
    model, _ = tiny_model("full")
    shapes = []

    class Counting:
        """Note the shape of every prefill."""

        layers = model.layers

        def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
            """Compute."""
            if inputs.shape[1] > 1:
                shapes.append(inputs.shape)
            return model(inputs, cache=cache)

    driver = Driver(make_engine(model=Counting()))
    for n in range(16):
        driver.add(str(n), random_prompt(41, n), max_tokens=2)
    driver.run()
    assert shapes == [(12, 40), (4, 40)]


def test_counters_say_what_happened() -> None:
    """Prompt tokens, computed tokens and completion tokens are counted once each."""
    engine = make_engine()
    driver = Driver(engine)
    driver.add("a", random_prompt(10, 0), max_tokens=5)
    driver.add("b", random_prompt(20, 0), max_tokens=7)
    driver.run()
    stats = engine.stats()
    assert (stats.requests_finished, stats.prompt_tokens, stats.completion_tokens) == (2, 30, 12)
    assert stats.prefilled_tokens == 9 + 19
    final = driver.results["b"].final
    assert final is not None
    assert (final.num_prompt_tokens, final.num_completion_tokens) == (20, 7)
    assert final.num_cached_tokens == 0


def test_deltas_are_gathered_by_the_stream_interval() -> None:
    """With an interval of four, ten tokens come in deltas of 4, 4 and 2."""
    driver = Driver(make_engine())
    driver.add("row", random_prompt(3, 0), max_tokens=10, stream_interval=4)
    sizes = []
    while driver.engine.has_work:
        sizes += [len(row.token_ids) // 4 for row in driver.step()]
    assert sizes == [4, 4, 2]


@pytest.mark.parametrize("where", ["start", "restore"])
def test_a_row_that_cannot_be_started_ends_all_the_same(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault between two queues loses no request, and the engine goes on."""
    engine = make_engine()
    owner: object = engine._layout if where == "start" else engine._prefixes
    sound = getattr(owner, where)
    faults = iter([MemoryError("no room on the device")])

    def fail_once(*arguments: object) -> object:
        for fault in faults:
            raise fault
        return sound(*arguments)

    monkeypatch.setattr(owner, where, fail_once)
    driver = Driver(engine)
    driver.add("first", random_prompt(5, 1), max_tokens=3)
    results = driver.run()
    assert results["first"].final is not None
    assert results["first"].final.finish_reason == "error"
    driver.add("second", random_prompt(5, 1), max_tokens=3)
    assert len(driver.run()["second"].tokens) == 3
    assert engine.stats().kv_bytes == 0
