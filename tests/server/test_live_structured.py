"""The demo model, at temperature 1, keeps to every form: schemas of all kinds, streamed or not."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import openai
import pytest
from jsonschema.validators import validator_for
from support.schemas import OWN, real_parts, real_schemas
from support.server_process import ServerProcess, is_running

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

logger = logging.getLogger(__name__)

#: Requests at once: more would only wait.
NUM_AT_ONCE = 16
QUESTION = [{"role": "user", "content": "Give me an example in JSON, as short as possible."}]


@pytest.fixture(scope="module")
def server(
    tmp_path_factory: pytest.TempPathFactory, demo_model_path: Any
) -> Iterator[ServerProcess]:
    """Return a ready server of the demo model."""
    with ServerProcess("demo", tmp_path_factory.mktemp("demo")) as process:
        yield process.wait_ready(180)


def client_of(server: ServerProcess) -> openai.AsyncOpenAI:
    """Return a client that does not try again."""
    return openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def form(schema: Any) -> Any:
    """Return the response format of a schema."""
    return {"type": "json_schema", "json_schema": {"name": "form", "schema": schema}}


async def ask(client: openai.AsyncOpenAI, **fields: Any) -> tuple[str, str]:
    """Return text and reason of an answer at temperature 1, the filters off."""
    fields = {"temperature": 1, "top_p": 1, "max_tokens": 200, "messages": QUESTION, **fields}
    answer = await client.chat.completions.create(model="demo", **fields)
    choice = answer.choices[0]
    return choice.message.content or "", str(choice.finish_reason)


async def stream(client: openai.AsyncOpenAI, **fields: Any) -> tuple[str, str]:
    """Return the same of a stream."""
    fields = {"temperature": 1, "top_p": 1, "max_tokens": 200, "messages": QUESTION, **fields}
    text, reason = "", ""
    async for chunk in await client.chat.completions.create(model="demo", stream=True, **fields):
        text += chunk.choices[0].delta.content or ""
        reason = chunk.choices[0].finish_reason or reason
    return text, reason


def check(schema: Any, text: str) -> None:
    """Hold an answer to its schema, formats included."""
    cls = validator_for(schema, default=jsonschema.Draft202012Validator)
    cls(schema, format_checker=cls.FORMAT_CHECKER).validate(json.loads(text))


async def test_every_answer_follows_its_schema(server: ServerProcess) -> None:
    """Over well more than 60 schemas, whatever ends by itself validates; others are refused.

    Our own are all enforced. Of the real ones some use what cannot be enforced, which is a 400 that
    says so; most of their parts can be.
    """
    own = list(OWN.items())
    real = [*real_schemas(), *real_parts(4)]
    places = asyncio.Semaphore(NUM_AT_ONCE)
    ended: dict[str, str] = {}
    refused: dict[str, str] = {}
    wrong: dict[str, str] = {}

    async def one(name: str, schema: Any, seed: int) -> None:
        async with places:
            try:
                text, reason = await ask(client, response_format=form(schema), seed=seed)
            except openai.BadRequestError as error:
                refused[name] = str(error.param)
                return
        if reason == "length":
            return
        ended[f"{name}, {seed}"] = text
        try:
            check(schema, text)
        except (ValueError, jsonschema.ValidationError) as error:
            wrong[f"{name}, {seed}"] = f"{text}: {str(error)[:300]}"

    async with client_of(server) as client:
        await asyncio.gather(
            *(one(name, schema, seed) for name, schema in own for seed in range(2)),
            *(one(name, schema, 0) for name, schema in real),
        )
    assert wrong == {}
    assert not set(refused) & set(OWN), refused
    answered = {name.rpartition(",")[0] for name in ended}
    logger.info(
        "%d own schemas and %d real ones: %d answers ended by themselves, over %d schemas, all "
        "valid; %d schemas were refused",
        len(own),
        len(real),
        len(ended),
        len(answered),
        len(refused),
    )
    assert len(answered) >= 60
    assert len(answered - set(OWN)) >= 15
    # The very largest are refused for their size before they are looked at.
    assert set(refused.values()) <= {"response_format.json_schema.schema", "response_format"}


async def test_a_stream_says_what_a_whole_answer_says(server: ServerProcess) -> None:
    """At the same seed both are the same text with the same end, cut or not."""
    names = ["object", "nested", "recursive", "any of", "emoji", "optional properties", "pattern"]
    async with client_of(server) as client:
        for limit in (8, 200):
            fields = [
                {"response_format": form(OWN[name]), "seed": seed, "max_tokens": limit}
                for seed, name in enumerate(names)
            ]
            whole = await asyncio.gather(*(ask(client, **each) for each in fields))
            streamed = await asyncio.gather(*(stream(client, **each) for each in fields))
            assert whole == streamed
            assert {reason for _, reason in whole} <= {"stop", "length"}
        assert {reason for _, reason in whole} == {"stop"}


async def test_other_forms_are_kept_too(server: ServerProcess) -> None:
    """Regular expressions, choices, grammars and any object, over chats and plain prompts."""
    async with client_of(server) as client:
        for seed in range(2):
            common: dict[str, Any] = {"seed": seed, "max_tokens": 60}
            text, _ = await ask(client, extra_body={"guided_choice": ["yes", "no"]}, **common)
            assert text in ("yes", "no")
            pattern = {"structured_outputs": {"regex": r"\d{3}-[a-f]{2,4}"}}
            text, _ = await ask(client, extra_body=pattern, **common)
            assert len(text) in range(6, 9)
            assert text[:3].isdigit()
            gbnf = 'root ::= "<" [a-z]+ ">"'
            text, reason = await ask(client, extra_body={"guided_grammar": gbnf}, **common)
            assert reason == "length" or (text[0], text[-1]) == ("<", ">")
            any_object = {"type": "json_object"}
            text, reason = await ask(client, response_format=any_object, **common)
            assert reason == "length" or isinstance(json.loads(text), dict)
            answer = await client.completions.create(
                model="demo",
                prompt="Is water wet?",
                temperature=1,
                extra_body={"guided_choice": ["certainly", "never"]},
                n=2,
                **common,
            )
            assert {choice.text for choice in answer.choices} <= {"certainly", "never"}


async def test_plain_rows_do_not_notice(server: ServerProcess) -> None:
    """A greedy and a seeded chat say the same alone and beside rows that follow schemas."""
    plain: list[dict[str, Any]] = [
        {"temperature": 0, "max_tokens": 40},
        {"seed": 5, "max_tokens": 40, "extra_body": {"ignore_eos": True}},
    ]
    async with client_of(server) as client:
        alone = await asyncio.gather(*(ask(client, **fields) for fields in plain))
        together = await asyncio.gather(
            *(ask(client, **fields) for fields in plain),
            *(ask(client, response_format=form(schema)) for schema in list(OWN.values())[:8]),
        )
    assert together[:2] == alone


async def test_a_new_engine_follows_forms_again(server: ServerProcess) -> None:
    """An answer whose engine dies ends with an error; the next one is valid, in a new engine."""
    numbers = {"type": "array", "items": {"type": "integer"}, "minItems": 1000}
    pid = server.status()["engine"]["pid"]

    async def read_and_kill(stream: Any) -> None:
        async for _ in stream:
            if is_running(pid):
                os.kill(pid, signal.SIGKILL)

    async with client_of(server) as client:
        stream = await client.chat.completions.create(
            model="demo",
            messages=QUESTION,
            response_format=form(numbers),
            max_tokens=2000,
            stream=True,
        )
        with pytest.raises(openai.APIError, match="engine"):
            await read_and_kill(stream)
        while server.status()["engine"]["phase"] != "ready":
            await asyncio.sleep(0.2)
        text, _ = await ask(client, response_format=form(OWN["object"]))
    check(OWN["object"], text)
    assert server.status()["engine"]["pid"] != pid


def test_the_guides_examples_run(server: ServerProcess) -> None:
    """The guide's request and programs run as they stand, against this server."""
    guide = Path("docs/guides/structured-output.md").read_text(encoding="utf-8")
    guide = guide.replace("http://127.0.0.1:8000", server.url)
    requests = re.findall(r"curl -s (\S+) .*? -d '(.*?)'\n", guide, re.DOTALL)
    programs = re.findall(r"```python\n(.*?)```", guide, re.DOTALL)
    assert (len(requests), len(programs)) == (1, 2)
    url, body = requests[0]
    answer = httpx.post(url, content=body, headers={"content-type": "application/json"}, timeout=60)
    person = json.loads(answer.json()["choices"][0]["message"]["content"])
    assert set(person) == {"name", "age", "mood"}
    # The second goes on with the client of the first.
    command = [sys.executable, "-c", "\n".join(programs)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    parsed, choice = done.stdout.splitlines()
    assert re.fullmatch(r"name='.*' age=\d+ mood='(calm|cross)'|name=\".*", parsed)
    assert choice in ("yes", "no")
