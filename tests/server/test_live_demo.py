"""The demo model, a real instruct model, answers the real client, many questions at once."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from support.server_process import ServerProcess

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

COUNTRIES = ["France", "Italy", "Japan", "Spain"]


@pytest.fixture(scope="module")
def server(
    tmp_path_factory: pytest.TempPathFactory, demo_model_path: Any
) -> Iterator[ServerProcess]:
    """Return a ready server of the demo model."""
    with ServerProcess("demo", tmp_path_factory.mktemp("demo")) as process:
        yield process.wait_ready(180)


async def ask(client: openai.AsyncOpenAI, country: str, **fields: Any) -> str:
    """Ask for a capital and return the streamed answer."""
    stream = await client.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": f"What is the capital of {country}?"}],
        stream=True,
        **fields,
    )
    return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])


async def test_many_questions_at_once_get_their_own_answers(server: ServerProcess) -> None:
    """Greedy, each answer is the same alone as among others, and one is known to be right."""
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        together = await asyncio.gather(
            *(ask(client, country, temperature=0, max_tokens=16) for country in COUNTRIES)
        )
        alone = [await ask(client, name, temperature=0, max_tokens=16) for name in COUNTRIES]
    assert together == alone
    assert "Paris" in together[0]
    assert not any("<|" in answer for answer in together)


async def test_a_seeded_answer_is_the_same_in_any_company(server: ServerProcess) -> None:
    """64 tokens at temperature 1 repeat with their seed, alone and beside others."""
    fields: dict[str, Any] = {
        "temperature": 1,
        "max_tokens": 64,
        "extra_body": {"ignore_eos": True},
    }
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        alone = await ask(client, "Italy", seed=5, **fields)
        together = await asyncio.gather(
            ask(client, "Italy", seed=5, **fields),
            *(ask(client, country, seed=9, **fields) for country in ("Japan", "Spain")),
        )
        assert together[0] == alone
