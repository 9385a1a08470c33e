"""The Slots layout on arrays: what a step, a join and a move cost, and that nothing is shared."""

from __future__ import annotations

import time
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ChunkedKVCache, KVCache
from support.engines import Driver, make_engine, random_prompt, tiny_model
from support.tiny_models import make_tiny_model

from vllm_mlx.engine.errors import UnsupportedModelError
from vllm_mlx.engine.kv.slot_layers import KVSlots, make_layer_slots
from vllm_mlx.engine.kv.step_view import GroupStep, StepView
from vllm_mlx.engine.models.probe import probe_model

HEADS, DIM = 4, 64


def filled_slots(rows: int, capacity: int) -> KVSlots:
    """Return slots of one evaluated group."""
    sample = mx.zeros((1, HEADS, 1, DIM))
    slots = KVSlots(sample, sample)
    slots.resize(0, capacity, [None] * rows)
    mx.eval(slots.arrays())
    return slots


def write_step(slots: KVSlots, rows: int, position: int) -> mx.array:
    """Write one token a row as a forward would, and return something that reads it."""
    step = GroupStep(0, 0, [position] * rows)
    slots.bind(StepView((step,), mx.array([position] * rows, dtype=mx.int32)))
    token = mx.full((rows, HEADS, 1, DIM), float(position))
    keys, values = slots.update_and_fetch(token, token)
    read = mx.fast.scaled_dot_product_attention(token, keys, values, scale=1.0, mask=None)
    mx.async_eval(read, *slots.arrays())
    return read


def test_a_pipelined_step_writes_in_place() -> None:
    """Twenty steps stay under half of one layer's keys in temporary memory."""
    rows, capacity = 8, 4096
    slots = filled_slots(rows, capacity)
    key_bytes = slots.arrays()[0].nbytes
    mx.eval(write_step(slots, rows, 0))
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    for position in range(1, 21):
        mx.eval(write_step(slots, rows, position))
    assert mx.get_peak_memory() - before < 0.5 * key_bytes


def test_a_held_view_is_what_breaks_it() -> None:
    """The same steps with a slice held copy whole arrays: the measurement above can fail."""
    rows, capacity = 8, 4096
    slots = filled_slots(rows, capacity)
    key_bytes = slots.arrays()[0].nbytes
    mx.eval(write_step(slots, rows, 0))
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    held = []
    for position in range(1, 4):
        held.append(slots.arrays()[0][:, :, :1])
        mx.eval(held[-1])
        mx.eval(write_step(slots, rows, position))
    assert mx.get_peak_memory() - before > 0.5 * key_bytes


def test_a_write_does_not_cost_more_at_a_larger_capacity() -> None:
    """The write of one token costs the same in a group of four times the capacity."""

    def best_of(slots: KVSlots) -> float:
        step = GroupStep(0, 0, [5] * 8)
        slots.bind(StepView((step,), mx.array([5] * 8, dtype=mx.int32)))
        token = mx.ones((8, HEADS, 1, DIM))
        times = []
        for _ in range(30):
            start = time.perf_counter()
            slots.update_and_fetch(token, token)
            mx.eval(slots.arrays())
            times.append(time.perf_counter() - start)
        return min(times)

    small, large = filled_slots(8, 512), filled_slots(8, 8 * 512)
    ratio = min(best_of(large) / best_of(small) for _ in range(3))
    assert ratio < 3.0, f"eight times the capacity costs {ratio:.1f} times as much"


def test_an_adopted_row_overwrites_all_of_its_slot() -> None:
    """What an earlier row left, NaN included, is gone: masked NaN would still poison attention."""
    slots = filled_slots(2, 64)
    for array in slots.arrays():
        array[1:2] = mx.full((1, HEADS, 64, DIM), float("nan"))
    cache = KVCache()
    rows = mx.random.normal((1, HEADS, 10, DIM))
    cache.update_and_fetch(rows, rows)
    slots.adopt(0, 1, cache, 10)
    for array in slots.arrays():
        assert mx.array_equal(array[1:2, :, :10], rows).item()
        assert not mx.any(mx.isnan(array)).item()


def test_joining_beside_long_rows_costs_the_row_and_not_the_batch() -> None:
    """While long rows decode, a short row's join needs a fraction of the batch's memory."""
    engine = make_engine("full", max_num_seqs=8)
    driver = Driver(engine)
    for n in range(4):
        driver.add(f"long{n}", random_prompt(1500, n), max_tokens=60)
    while engine.stats().num_running < 4:
        driver.step()
    held = engine.stats().kv_bytes
    driver.step()
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    driver.add("short", random_prompt(8, 9), max_tokens=20)
    while "short" not in {r.request_id for r in engine.stats().requests if r.phase == "generation"}:
        driver.step()
    assert mx.get_peak_memory() - before < 0.5 * held
    driver.run()


def test_a_cache_that_cannot_be_laid_out_by_row_is_refused_by_name() -> None:
    """The refusal says which model type and which cache."""
    with pytest.raises(UnsupportedModelError, match=r"'llama4' .* ChunkedKVCache"):
        make_layer_slots(ChunkedKVCache(8), "llama4")


def test_a_model_that_computes_otherwise_in_a_batch_is_refused() -> None:
    """The probe compares batched logits with the model's own and notices a wrong one."""
    model = make_tiny_model("full")

    class Shifted:
        """Take every position of a batch for one less, as a model that misreads offsets would."""

        def __init__(self) -> None:
            self.layers = model.layers

        def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
            """Compute, with one token too few in a batch."""
            logits = model(inputs, cache=cache)
            return logits if inputs.shape[0] == 1 else mx.roll(logits, 1, axis=-1)

    with pytest.raises(UnsupportedModelError, match="other logits in a batch"):
        probe_model(Shifted(), "shifted", max_token=97)


def test_latent_attention_is_served_in_one_group_and_full_attention_in_several() -> None:
    """A model that computes with its keys before attention cannot be split by group."""
    assert tiny_model("latent")[1].max_groups == 1
    assert tiny_model("full")[1].max_groups > 1
