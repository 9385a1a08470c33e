"""An engine that is to keep a time between tokens cuts prompts to what its model really takes."""

from __future__ import annotations

import time
from typing import Any

import pytest
from support.engines import Driver, make_engine, random_prompt, tiny_model

from vllm_mlx.engine.core.prefill_pace import MIN_PACED_TOKENS

#: What a prompt token of the slow model takes, far above what this machine adds.
TOKEN_S = 0.002


class SlowModel:
    """Take time for each prompt token, and note the sizes of the pieces."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self._model = tiny_model("full")[0]
        self.layers = self._model.layers

    def __call__(self, tokens: Any, **options: Any) -> Any:
        """Compute as the tiny model does, later."""
        if tokens.shape[1] > 1:
            self.sizes.append(tokens.shape[1])
            time.sleep(TOKEN_S * tokens.shape[1])
        return self._model(tokens, **options)


@pytest.mark.parametrize("target_s", [None, 0.1])
def test_a_prompt_beside_a_row_is_cut_to_the_time_between_tokens(target_s: float | None) -> None:
    """Pieces beside a row take about the target; alone, or without a target, they are whole."""
    model = SlowModel()
    driver = Driver(make_engine(model=model, target_itl_s=target_s, prefill_tokens_per_step=200))
    driver.add("row", random_prompt(150, 1), max_tokens=60)
    while len(driver.results["row"].tokens) < 5:
        driver.step()
    assert model.sizes == [149]
    model.sizes.clear()
    driver.add("long", random_prompt(401, 2), max_tokens=1)
    driver.run()
    assert sum(model.sizes) == 400
    if target_s is None:
        assert model.sizes == [200, 200]
        return
    # The first is a guess. Whatever else the machine does makes pieces smaller, never larger.
    assert model.sizes[0] == 50
    assert max(model.sizes[1:]) <= 1.5 * target_s / TOKEN_S
    assert min(model.sizes[:-1]) >= MIN_PACED_TOKENS
