"""Start a fake engine, print its pid, keep it busy in Python, and wait to be killed."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from vllm_mlx.engine.config import EngineConfig, ModelConfig
from vllm_mlx.engine.core.outputs import pack_tokens
from vllm_mlx.engine.core.request import GenerationRequest, SamplingParams
from vllm_mlx.engine.host.supervisor import EngineSupervisor

FAKE_ENGINE = (sys.executable, str(Path(__file__).with_name("fake_engine.py")))


async def main() -> None:
    """Supervise until killed; the argument is the command for the engine's one request."""
    supervisor = EngineSupervisor(ModelConfig(model="{}"), EngineConfig(), command=FAKE_ENGINE)
    await supervisor.start()
    await supervisor.wait_ready()
    request = GenerationRequest(
        request_id="a",
        prompt=pack_tokens([int(sys.argv[1])]),
        sampling=SamplingParams(max_tokens=1_000_000),
    )
    await anext(supervisor.generate(request))
    print(supervisor.state.pid, flush=True)  # noqa: T201
    await asyncio.sleep(600)


asyncio.run(main())
