"""Try a freshly loaded model in a batch before serving it, against its own single-row forward."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from vllm_mlx.engine.errors import UnsupportedModelError
from vllm_mlx.engine.kv.slots import MAX_GROUPS, SlotLayout, make_slot_layout
from vllm_mlx.engine.kv.stock_caches import cache_arrays
from vllm_mlx.engine.platform import allows_tf32
from vllm_mlx.engine.run.attention import install_attention_hook

logger = logging.getLogger(__name__)

#: Lengths of the two probe rows: they differ, and stand in groups of unlike capacity.
_LENGTHS = (5, 70)
#: Largest difference of logits, as a share of their spread, by dtype size in bytes.
_TOLERANCE = {4: 1e-3, 2: 0.1}
#: The same of float32 for those who let a GPU compute its products in TF32.
_TF32_TOLERANCE = 0.02


@dataclass(frozen=True, slots=True)
class Probe:
    """Say what one forward showed of a model."""

    #: The model's stock caches after one token: their shapes and dtypes.
    seen_caches: list[Any]
    #: How many groups its attention can be split into: 1 where the hook does not reach it.
    max_groups: int
    vocab_size: int


def probe_model(model: Any, model_type: str, *, max_token: int) -> Probe:
    """Learn the shapes of a model's state, and check that batching leaves its logits unchanged.

    Two rows of unlike length take one decode step, in one group and in several, and must agree
    with the model's own single-row forward. Raises UnsupportedModelError where one group does
    not; where only several do not, one group serves. `max_token` bounds the token ids tried.
    """
    install_attention_hook()
    seen = make_prompt_cache(model)
    logits = model(mx.array([[_token(0, max_token)]]), cache=seen)
    mx.eval(logits, cache_arrays(seen))
    vocab_size = int(logits.shape[-1])

    stock = _stock_logits(model, max_token)
    if not _agrees(model, model_type, seen, stock, max_token, max_groups=1):
        raise UnsupportedModelError(
            f"model type {model_type!r} gives other logits in a batch than alone, so it cannot be "
            "served in batches; run it with mlx-lm itself"
        )
    try:
        can_group = _agrees(model, model_type, seen, stock, max_token, max_groups=MAX_GROUPS)
    except Exception as error:  # noqa: BLE001 - model code may do anything with a grouped handle
        logger.debug("attention of %s cannot be split by group: %r", model_type, error)
        can_group = False
    return Probe(seen, MAX_GROUPS if can_group else 1, vocab_size)


def _token(index: int, max_token: int) -> int:
    return (7 + 13 * index) % max_token


def _row(number: int, max_token: int) -> list[int]:
    return [_token(number * 31 + index, max_token) for index in range(_LENGTHS[number])]


def _stock_logits(model: Any, max_token: int) -> list[mx.array]:
    """Return each probe row's logits after its last token, from the model's own caches."""
    rows = []
    for number in range(len(_LENGTHS)):
        tokens = _row(number, max_token)
        caches = make_prompt_cache(model)
        model(mx.array([tokens[:-1]]), cache=caches)
        mx.eval(cache_arrays(caches))
        logits = model(mx.array([tokens[-1:]]), cache=caches)[0, -1]
        mx.eval(logits)
        rows.append(logits)
    return rows


def _agrees(
    model: Any,
    model_type: str,
    seen: list[Any],
    stock: list[mx.array],
    max_token: int,
    *,
    max_groups: int,
) -> bool:
    make_caches: Callable[[], list[Any]] = lambda: make_prompt_cache(model)  # noqa: E731
    layout = make_slot_layout(
        make_caches, seen, model_type, budget_bytes=1 << 62, max_capacity=512, max_groups=max_groups
    )
    for number in range(len(_LENGTHS)):
        _prefill(model, layout, number, max_token)
    view = layout.begin_step([(str(number), length - 1) for number, length in enumerate(_LENGTHS)])
    inputs = [0] * view.num_rows
    for row in view.rows:
        inputs[row.index] = _row(int(row.row_id), max_token)[-1]
    logits = model(mx.array(inputs)[:, None], cache=layout.layer_caches)[:, -1]
    mx.eval(logits)
    if max_groups > 1 and layout.num_groups == 1:
        return False
    return all(_is_close(logits[row.index], stock[int(row.row_id)]) for row in view.rows)


def _prefill(model: Any, layout: SlotLayout, number: int, max_token: int) -> None:
    tokens = _row(number, max_token)
    layout.start(str(number), len(tokens))
    caches = layout.private_caches(str(number))
    model(mx.array([tokens[:-1]]), cache=caches)
    mx.eval(cache_arrays(caches))
    layout.join(str(number), len(tokens))


def _is_close(logits: mx.array, expected: mx.array) -> bool:
    tolerance = _TOLERANCE.get(expected.dtype.size, _TOLERANCE[2])
    if expected.dtype == mx.float32 and allows_tf32():
        tolerance = _TF32_TOLERANCE
    logits, expected = logits.astype(mx.float32), expected.astype(mx.float32)
    spread = mx.maximum(expected.max() - expected.min(), 1e-6)
    return cast(float, (mx.abs(logits - expected).max() / spread).item()) < tolerance
