"""What a config.json says of resuming a prefix is what the loaded model needs."""

from __future__ import annotations

import pytest
from support.engines import tiny_model
from support.tiny_models import KINDS

from vllm_mlx.engine.kv.block_codec import BlockCodec
from vllm_mlx.engine.models.kv_shape import resume_rule


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_the_estimate_is_what_the_model_needs(kind: str) -> None:
    """The parts of a block and the window, for every kind of cache."""
    _, probe = tiny_model(kind)
    codec = BlockCodec(probe.seen_caches, 64)
    rule = resume_rule(KINDS[kind], 64)
    assert (rule.kinds, rule.window) == (codec.kinds, codec.window)
