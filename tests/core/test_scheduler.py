"""The scheduler's decisions: order, prefill budget, byte budget, preemption; no model involved."""

from __future__ import annotations

import random

import pytest
from support.fakes import FakeKVSpace, make_sequence

from vllm_mlx.engine.core.scheduler import Scheduler, StepPlan
from vllm_mlx.engine.core.sequence import Sequence, SequenceStatus

NO_EOS: frozenset[int] = frozenset()


def make_scheduler(
    kv: FakeKVSpace | None = None,
    *,
    max_num_seqs: int = 8,
    budget: int = 512,
    max_area: int | None = None,
) -> Scheduler:
    """Return a scheduler over a fake space."""
    return Scheduler(
        kv or FakeKVSpace(),
        max_num_seqs=max_num_seqs,
        prefill_tokens_per_step=budget,
        admission_headroom_tokens=512,
        max_prefill_area=max_area,
    )


def compute(plan: StepPlan) -> None:
    """Do to the sequences what a runner would: one token each, and the chunks."""
    for sequence in plan.decode:
        sequence.num_computed += 1
        sequence.append(7, NO_EOS)
    for chunk in plan.prefill:
        assert chunk.start == chunk.sequence.num_computed
        chunk.sequence.num_computed = chunk.stop


def chunks(plan: StepPlan) -> dict[str, int]:
    """Return the chunk sizes of a plan by sequence."""
    return {chunk.sequence.id: chunk.stop - chunk.start for chunk in plan.prefill}


def test_a_smaller_budget_counts_beside_rows_only() -> None:
    """What is left to prompts beside rows that decode does not cut those that are alone."""
    scheduler = make_scheduler()
    scheduler.prefill_budget_beside_rows = 32
    first, long = make_sequence("a", 400), make_sequence("b", 400)
    scheduler.add(first)
    plan = scheduler.schedule()
    assert chunks(plan) == {"a": 399}
    compute(plan)
    scheduler.add(long)
    plan = scheduler.schedule()
    assert (plan.decode, chunks(plan), plan.num_prefill_tokens) == ((first,), {"b": 32}, 32)


def test_a_prompt_is_prefilled_but_for_its_last_token_which_joins_a_decode_step() -> None:
    """A prompt of five tokens prefills four, then decodes from the fifth."""
    scheduler = make_scheduler()
    sequence = make_sequence("a", 5)
    scheduler.add(sequence)
    first = scheduler.schedule()
    assert (chunks(first), first.decode) == ({"a": 4}, ())
    compute(first)
    second = scheduler.schedule()
    assert ({}, (sequence,)) == (chunks(second), second.decode)
    assert SequenceStatus.RUNNING is sequence.status


def test_a_prompt_of_one_token_decodes_at_once() -> None:
    """There is nothing to prefill, so that the row joins in the step that admits it."""
    scheduler = make_scheduler()
    sequence = make_sequence("a", 1)
    scheduler.add(sequence)
    assert (sequence,) == scheduler.schedule().decode


def test_no_step_prefills_more_than_its_budget() -> None:
    """Whatever arrives, chunks of one step add up to at most the budget, and use all of it."""
    scheduler = make_scheduler(budget=512)
    for number, length in enumerate([3400, 90, 10, 2000, 700]):
        scheduler.add(make_sequence(str(number), length, arrival=number))
    totals = []
    while scheduler.num_waiting:
        plan = scheduler.schedule()
        totals.append(sum(chunks(plan).values()))
        compute(plan)
    assert max(totals) <= 512
    assert totals[0] == 512


def test_a_short_prompt_behind_a_long_one_starts_at_once() -> None:
    """Shares are equal, so that a short prompt does not wait for the end of a long one."""
    scheduler = make_scheduler(budget=512)
    scheduler.add(make_sequence("long", 6000, arrival=0))
    scheduler.add(make_sequence("short", 101, arrival=1))
    assert chunks(scheduler.schedule()) == {"short": 100, "long": 412}


def test_a_burst_of_short_prompts_is_prefilled_in_as_few_steps_as_the_budget_allows() -> None:
    """Twelve prompts of forty tokens fit one step's budget, so they do not wait for each other."""
    scheduler = make_scheduler(max_num_seqs=32, budget=512)
    for number in range(16):
        scheduler.add(make_sequence(str(number), 41, arrival=number))
    first = scheduler.schedule()
    assert (len(first.prefill), sum(chunks(first).values())) == (12, 480)
    compute(first)
    assert set(chunks(scheduler.schedule()).values()) == {40}


def test_a_small_budget_goes_to_the_oldest_prompt() -> None:
    """Shares too small for a forward of their own are not made."""
    scheduler = make_scheduler(budget=7)
    scheduler.add(make_sequence("a", 20, arrival=0))
    scheduler.add(make_sequence("b", 20, arrival=1))
    assert chunks(scheduler.schedule()) == {"a": 7}


def test_chunks_shrink_with_the_context_where_scores_are_stored() -> None:
    """A chunk's tokens times its context stay within the area."""
    scheduler = make_scheduler(budget=512, max_area=100_000)
    scheduler.add(make_sequence("a", 5000))
    while scheduler.num_waiting:
        plan = scheduler.schedule()
        for chunk in plan.prefill:
            assert (chunk.stop - chunk.start) * chunk.stop <= 100_000
        compute(plan)


def test_higher_priority_starts_first_and_equal_priority_by_arrival() -> None:
    """The waiting queue is ordered by priority, then arrival."""
    scheduler = make_scheduler(max_num_seqs=1)
    for name, arrival, priority in (("a", 0, 0), ("b", 1, 5), ("c", 2, 5)):
        scheduler.add(make_sequence(name, 1, arrival=arrival, priority=priority, max_tokens=1))
    order = []
    while scheduler.has_work:
        plan = scheduler.schedule()
        compute(plan)
        for sequence in plan.decode:
            order.append(sequence.id)
            scheduler.remove(sequence)
    assert order == ["b", "c", "a"]


def order_of_starts(scheduler: Scheduler) -> list[str]:
    """Run a scheduler to its end and return in which order its sequences were first computed."""
    order: list[str] = []
    while scheduler.has_work:
        plan = scheduler.schedule()
        started = [chunk.sequence for chunk in plan.prefill] + list(plan.decode)
        order += [s.id for s in started if s.id not in order]
        compute(plan)
        for sequence in plan.decode:
            if sequence.is_finished:
                scheduler.remove(sequence)
    return order


def test_a_client_does_not_wait_for_all_that_another_has_queued() -> None:
    """Behind fifty prompts of one client, another's starts as soon as a row is free."""
    scheduler = make_scheduler(max_num_seqs=4)
    for number in range(50):
        scheduler.add(make_sequence(f"a{number}", 2000, arrival=number, client="a", max_tokens=4))
    compute(scheduler.schedule())
    scheduler.add(make_sequence("b", 100, arrival=50, client="b", max_tokens=4))
    order = order_of_starts(scheduler)
    assert order.index("b") == 4
    assert [name for name in order if name != "b"] == [f"a{number}" for number in range(50)]


def test_a_short_prompt_is_computed_beside_many_long_ones_of_another_client() -> None:
    """With rows to spare it is prefilled in the step after it came, whatever else prefills."""
    scheduler = make_scheduler(max_num_seqs=64)
    for number in range(50):
        scheduler.add(make_sequence(f"a{number}", 6000, arrival=number, client="a"))
    compute(scheduler.schedule())
    scheduler.add(make_sequence("b", 101, arrival=50, client="b"))
    plan = scheduler.schedule()
    assert chunks(plan)["b"] == 100
    compute(plan)
    assert [sequence.id for sequence in scheduler.schedule().decode] == ["b"]


def test_clients_take_turns_and_each_keeps_its_own_order() -> None:
    """Who queues more does not start more often while others wait."""
    scheduler = make_scheduler(max_num_seqs=1)
    arrival = 0
    for client, count in (("a", 5), ("b", 3), ("c", 1)):
        for number in range(count):
            name = f"{client}{number}"
            scheduler.add(make_sequence(name, 3, arrival=arrival, client=client, max_tokens=1))
            arrival += 1
    assert order_of_starts(scheduler) == ["a0", "b0", "c0", "a1", "b1", "a2", "b2", "a3", "a4"]


def test_priority_goes_before_turns() -> None:
    """A client's urgent request does not wait for the turns of those that are not."""
    scheduler = make_scheduler(max_num_seqs=1)
    for number in range(3):
        scheduler.add(make_sequence(f"a{number}", 3, arrival=number, client="a", max_tokens=1))
    scheduler.add(make_sequence("b", 3, arrival=3, client="b", max_tokens=1))
    urgent = make_sequence("urgent", 3, arrival=4, client="a", max_tokens=1, priority=1)
    scheduler.add(urgent)
    assert order_of_starts(scheduler) == ["urgent", "a0", "b", "a1", "a2"]


def test_a_newcomer_is_never_put_before_what_has_started() -> None:
    """Bytes that run out are taken from the newcomer, although its client had no turn yet."""
    kv = FakeKVSpace(capacity=1200)
    scheduler = make_scheduler(kv)
    for number in range(2):
        name = f"a{number}"
        scheduler.add(make_sequence(name, 10, arrival=number, client="a", max_tokens=900))
    for _ in range(3):
        compute(scheduler.schedule())
    scheduler.add(make_sequence("b", 10, arrival=2, client="b", max_tokens=900))
    kv.capacity = 2000
    for _ in range(3):
        compute(scheduler.schedule())
    kv.capacity = 40
    while scheduler.num_running > 1:
        compute(scheduler.schedule())
    (left,) = scheduler.schedule().decode
    assert left.id == "a0"


def test_max_num_seqs_bounds_rows_that_prefill_or_decode() -> None:
    """No more rows than asked for are ever started."""
    scheduler = make_scheduler(max_num_seqs=2)
    for number in range(4):
        scheduler.add(make_sequence(str(number), 3, arrival=number))
    for _ in range(5):
        plan = scheduler.schedule()
        compute(plan)
        assert len(plan.decode) <= 2
    assert (scheduler.num_running, scheduler.num_waiting) == (2, 2)


def test_removing_a_sequence_frees_its_row_wherever_it_is() -> None:
    """Waiting, prefilling and running rows all leave nothing behind."""
    kv = FakeKVSpace()
    scheduler = make_scheduler(kv, max_num_seqs=2, budget=4)
    rows = [make_sequence(str(n), 5, arrival=n) for n in range(3)]
    for row in rows:
        scheduler.add(row)
    compute(scheduler.schedule())
    compute(scheduler.schedule())
    assert [row.status.value for row in rows] == ["running", "prefilling", "waiting"]
    for row in rows:
        scheduler.remove(row)
        scheduler.remove(row)
    assert (kv.rows, scheduler.has_work) == ({}, False)


def test_a_row_starts_only_with_room_for_its_prompt_and_new_tokens() -> None:
    """Admission asks for the prompt and up to 512 tokens more, never for a whole max_tokens."""
    kv = FakeKVSpace(capacity=1100)
    scheduler = make_scheduler(kv)
    scheduler.add(make_sequence("a", 10, arrival=0, max_tokens=32768))
    scheduler.add(make_sequence("b", 10, arrival=1, max_tokens=32768))
    scheduler.add(make_sequence("c", 10, arrival=2, max_tokens=32768))
    scheduler.schedule()
    assert kv.rows == {"a": 522, "b": 522}


def test_when_bytes_run_out_the_youngest_row_goes_back_to_waiting() -> None:
    """The oldest rows go on; the preempted one keeps its tokens and is prefilled again."""
    kv = FakeKVSpace(capacity=60)
    scheduler = make_scheduler(kv)
    old, young = make_sequence("old", 10, arrival=0), make_sequence("young", 10, arrival=1)
    scheduler.add(old)
    scheduler.add(young)
    compute(scheduler.schedule())
    compute(scheduler.schedule())
    kv.capacity = 25
    while young.status is SequenceStatus.RUNNING:
        compute(scheduler.schedule())
    assert (old.status, young.status) == (SequenceStatus.RUNNING, SequenceStatus.WAITING)
    assert (young.num_computed, young.num_preemptions, scheduler.num_preemptions) == (0, 1, 1)
    assert young.output
    kept = list(young.output)
    scheduler.remove(old)
    assert {"young": 10 + len(kept) - 1} == chunks(scheduler.schedule())


@pytest.mark.parametrize("seed", range(5))
def test_random_loads_always_finish_whatever_the_budget(seed: int) -> None:
    """No load deadlocks: every sequence that fits alone finishes, with the tokens it asked for."""
    rng = random.Random(seed)
    kv = FakeKVSpace(capacity=300)
    scheduler = make_scheduler(kv, max_num_seqs=rng.choice([1, 4, 16]), budget=rng.choice([1, 64]))
    pending = [
        make_sequence(
            str(n),
            rng.randint(1, 150),
            arrival=n,
            max_tokens=rng.randint(1, 100),
            priority=rng.choice([0, 0, 1]),
            client=rng.choice("aab"),
        )
        for n in range(40)
    ]
    everything = list(pending)
    steps = 0
    while pending or scheduler.has_work:
        steps += 1
        assert steps < 50_000, "the load does not finish"
        if pending and rng.random() < 0.3:
            scheduler.add(pending.pop())
        plan = scheduler.schedule()
        compute(plan)
        assert kv.allocated_bytes <= 300 or len(kv.rows) == 1
        for sequence in plan.decode:
            if sequence.is_finished:
                scheduler.remove(sequence)
    assert kv.rows == {}
    assert all(_is_complete(sequence) for sequence in everything)


def _is_complete(sequence: Sequence) -> bool:
    return len(sequence.output) == sequence.max_new_tokens
