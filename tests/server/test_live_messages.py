"""The real `anthropic` client against a real server: answers, agents' turns, and who leaves."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import jsonschema
import pytest
from support.agent_session import AgentSession
from support.server_process import ServerProcess
from support.tiny_folder import write_tiny_folder

from vllm_mlx.cli.main import main

KEY = "test-key"
Messages = list[Any]
HELLO: Messages = [{"role": "user", "content": "Hello there"}]
BLOCK = 64


@pytest.fixture(scope="module")
def server(
    tmp_path_factory: pytest.TempPathFactory, demo_model_path: Path
) -> Iterator[ServerProcess]:
    """Return a ready server of a tiny model."""
    folder = write_tiny_folder(tmp_path_factory.mktemp("tiny"), demo_model_path, context=32768)
    options = ("--api-key", KEY, "--kv-memory-mb", "256", "--served-model-name", "tiny/model")
    with ServerProcess(str(folder), tmp_path_factory.mktemp("live"), *options) as process:
        yield process.wait_ready()


@pytest.fixture
def client(server: ServerProcess) -> Iterator[anthropic.Anthropic]:
    """Return a client that does not retry."""
    with anthropic.Anthropic(base_url=server.url, api_key=KEY, max_retries=0) as made:
        yield made


def prompt_tokens(usage: anthropic.types.Usage) -> int:
    """Add up what usage says of the prompt."""
    return (
        usage.input_tokens
        + (usage.cache_read_input_tokens or 0)
        + (usage.cache_creation_input_tokens or 0)
    )


def test_streamed_and_whole_answers_agree(client: anthropic.Anthropic) -> None:
    """Greedy, the stream's text is the whole answer's, and both count the prompt's tokens."""
    arguments: dict[str, Any] = {
        "model": "default",
        "messages": HELLO,
        "max_tokens": 24,
        "extra_body": {"temperature": 0},
    }
    whole = client.messages.create(**arguments)
    (block,) = whole.content
    assert block.type == "text"
    assert whole.stop_reason == "max_tokens"
    assert whole.usage.output_tokens == 24
    with client.messages.stream(**arguments) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == block.text
    assert (final.stop_reason, final.usage.output_tokens) == ("max_tokens", 24)
    counted = client.messages.count_tokens(model="default", messages=HELLO).input_tokens
    assert counted == prompt_tokens(whole.usage) == prompt_tokens(final.usage)

    word = block.text[8:14]
    stopped = client.messages.create(**arguments, stop_sequences=[word])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", word)
    before = "".join(block.text for block in stopped.content if block.type == "text")
    assert before == text.partition(word)[0]


def test_an_answer_follows_a_schema(client: anthropic.Anthropic) -> None:
    """Whatever the model would have said, streamed and whole."""
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}, "is_capital": {"type": "boolean"}},
        "required": ["city", "is_capital"],
        "additionalProperties": False,
    }
    arguments: dict[str, Any] = {
        "model": "default",
        "messages": HELLO,
        "max_tokens": 200,
        "output_config": {"format": {"type": "json_schema", "schema": schema}},
        "extra_body": {"temperature": 1},
    }
    (block,) = client.messages.create(**arguments).content
    assert block.type == "text"
    jsonschema.validate(json.loads(block.text), schema)
    with client.messages.stream(**arguments) as stream:
        jsonschema.validate(json.loads("".join(stream.text_stream)), schema)
        assert stream.get_final_message().stop_reason == "end_turn"


def take_turns(client: anthropic.Anthropic, session: AgentSession, num_turns: int) -> None:
    """Send a session's turns; each must compute what is new in it, and no more.

    What is stored ends with a whole block; behind it stand the new turn and the beginning of an
    answer, which the template writes.
    """
    earlier = 0
    for turn in range(num_turns):
        request = session.request()
        message = client.messages.create(**request)
        usage = message.usage
        total = client.messages.count_tokens(
            **{name: request[name] for name in ("model", "system", "tools", "messages")}
        ).input_tokens
        assert prompt_tokens(usage) == total
        assert message.model == request["model"]
        read, created = usage.cache_read_input_tokens or 0, usage.cache_creation_input_tokens or 0
        computed = total - read
        assert (total - 1) // BLOCK * BLOCK == read + created
        if turn:
            assert computed <= total - earlier + BLOCK + 16
        else:
            # An earlier session may have begun with the same few words.
            assert computed > total - 2 * BLOCK
        earlier = total
        session.use_tool(f"toolu_{turn}")


def test_an_agents_turns_compute_only_what_is_new(client: anthropic.Anthropic) -> None:
    """Though the first line and the budget change each time, and 15 tools are told."""
    take_turns(client, AgentSession(num_system_words=600), 3)


def test_what_was_recorded_is_warmed_for_the_next_session(
    client: anthropic.Anthropic, server: ServerProcess
) -> None:
    """System prompt and tools of one session are found by another's first request."""
    session = AgentSession(num_system_words=500)
    recorded = {"path": "/v1/messages", "body": session.request()}
    recorded["body"]["messages"] = recorded["body"]["messages"][1:]
    headers = {"x-api-key": KEY}
    warmed = httpx.post(
        f"{server.url}/v1/cache/warm", json={"prompts": [recorded]}, headers=headers, timeout=60
    ).json()
    assert (warmed["count"], warmed["failures"]) == (1, [])
    usage = client.messages.create(**session.request()).usage
    assert usage.cache_read_input_tokens == warmed["computed_tokens"] > 1000


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_whole_agents_prompt_is_computed_once(client: anthropic.Anthropic) -> None:
    """A system prompt of over 20,000 tokens."""
    session = AgentSession(num_system_words=20_000)
    system = session.request()["system"]
    counted = client.messages.count_tokens(model="default", messages=HELLO, system=system)
    assert counted.input_tokens > 20_000
    take_turns(client, session, 3)


@pytest.mark.parametrize("has_tools", [False, True])
def test_a_client_that_leaves_frees_its_row(
    client: anthropic.Anthropic, server: ServerProcess, has_tools: bool
) -> None:
    """The gauges are back at zero at once, in the middle of a call's arguments, too."""
    schema = {"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"]}
    arguments: dict[str, Any] = {}
    if has_tools:
        arguments["tools"] = [{"name": "look_up", "input_schema": schema, "strict": True}]
        arguments["tool_choice"] = {"type": "any"}
    kind = "input_json" if has_tools else "text"
    with client.messages.stream(
        model="default", messages=HELLO, max_tokens=30000, **arguments
    ) as stream:
        told = (event for event in stream if event.type == kind)
        for _, _ in zip(range(3), told, strict=False):
            pass
    deadline = time.monotonic() + 5
    while server.status(**{"x-api-key": KEY})["num_running"]:
        assert time.monotonic() < deadline, "the row is still there"
        time.sleep(0.01)


@pytest.mark.parametrize("agent", ["claude-code", "opencode", "qwen-code"])
def test_agents_are_pointed_at_it(
    server: ServerProcess, agent: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command finds the routes, the name and the context."""
    assert main(["env", agent, "--url", server.url, "--api-key", KEY]) == 0
    text = capsys.readouterr().out
    assert "tiny/model" in text
    assert agent == "qwen-code" or "32768" in text
