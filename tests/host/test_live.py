"""The real worker with a real, tiny model: it loads, generates, dies and comes back."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from support.tiny_models import KINDS, VOCAB_SIZE, make_tiny_model
from tokenizers import Tokenizer, models, pre_tokenizers

from vllm_mlx.engine.config import EngineConfig, ModelConfig
from vllm_mlx.engine.core.outputs import pack_tokens, unpack_tokens
from vllm_mlx.engine.core.request import GenerationRequest, SamplingParams
from vllm_mlx.engine.host.supervisor import EngineSupervisor


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model folder as a hub would have it: a tiny Llama and one word for each token."""
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "config.json").write_text(json.dumps({**KINDS["full"], "eos_token_id": 0}))
    weights = dict(tree_flatten(make_tiny_model("full").parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    words = {"<end>": 0} | {f"w{number}": number for number in range(1, VOCAB_SIZE)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<end>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def greedy(request_id: str, max_tokens: int) -> GenerationRequest:
    """Return a greedy request that runs to its length."""
    return GenerationRequest(
        request_id=request_id,
        prompt=pack_tokens([5, 17, 42]),
        sampling=SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True),
    )


@contextlib.asynccontextmanager
async def supervised(folder: Path) -> AsyncIterator[EngineSupervisor]:
    """Run a ready supervisor of the real worker."""
    supervisor = EngineSupervisor(
        ModelConfig(model=str(folder)), EngineConfig(kv_memory_bytes=1 << 24)
    )
    await supervisor.start()
    try:
        await supervisor.wait_ready()
        yield supervisor
    finally:
        await supervisor.stop(0)


async def test_a_real_engine_generates_alone_and_beside_others(tiny_folder: Path) -> None:
    """Greedy tokens are the same alone and batched, and statistics and information are true."""
    async with supervised(tiny_folder) as supervisor:
        info = supervisor.info
        assert info is not None
        assert (info.path, info.model_type, info.dtype) == (str(tiny_folder), "llama", "float32")
        assert info.pid == supervisor.state.pid
        alone = await supervisor.generate(greedy("alone", 20)).collect()
        assert (alone.finish_reason, alone.num_prompt_tokens) == ("length", 3)
        tokens = unpack_tokens(alone.token_ids)
        assert len(tokens) == 20
        streams = [supervisor.generate(greedy(f"beside {i}", 20 + i)) for i in range(4)]
        finals = await asyncio.gather(*(stream.collect() for stream in streams))
        assert [unpack_tokens(final.token_ids)[:20] for final in finals] == [tokens] * 4
        stats = await supervisor.stats()
        assert (stats.requests_finished, stats.num_running, stats.num_waiting) == (5, 0, 0)


@pytest.mark.faults
async def test_a_real_engine_that_is_killed_comes_back_the_same(tiny_folder: Path) -> None:
    """Three SIGKILLs under eight streams: each ends once in a second, tokens do not change."""
    async with supervised(tiny_folder) as supervisor:
        before = await supervisor.generate(greedy("before", 20)).collect()
        for life in range(3):
            pid = supervisor.state.pid
            assert pid is not None
            streams = [supervisor.generate(greedy(f"{life}-{i}", 4000)) for i in range(8)]
            for stream in streams:
                await anext(stream)
            os.kill(pid, signal.SIGKILL)
            started = time.monotonic()
            finals = await asyncio.gather(*(stream.collect() for stream in streams))
            assert time.monotonic() - started < 1.0
            assert {final.finish_reason for final in finals} == {"error"}
            await supervisor.wait_ready()
            after = await supervisor.generate(greedy(f"after {life}", 20)).collect()
            assert after.token_ids == before.token_ids
        assert supervisor.state.num_restarts == 3
