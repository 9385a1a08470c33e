"""Prompts to be warmed: every form they come in, and what is refused where."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from vllm_mlx.engine.errors import InvalidRequestError, UsageError
from vllm_mlx.server.warm_prompts import read_prompts, warm_prompt
from vllm_mlx.server.warm_tokens import prefix_tokens, warm_request, whole_blocks

SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "Hi"}
ANSWER = {"role": "assistant", "content": "Hello"}
ANTHROPIC_TOOL = {"name": "look_up", "input_schema": {"type": "object"}}
BILLING = "x-anthropic-billing-header: cch=71fea;"
TOOL = {"type": "function", "function": {"name": "look_up"}}
FLAT_TOOL = {"type": "function", "name": "look_up"}


class Characters:
    """Make each character a token, of chats the roles' first letters included."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return code points, after a 1 for the beginning."""
        return [1] * add_special_tokens + [ord(character) for character in text]

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """Spell tools, then messages, then whether an answer is to follow."""
        text = "".join(tool["function"]["name"] + ";" for tool in options.get("tools", ()))
        text += "".join(f"<{m['role'][0]}>{m['content']}" for m in messages)
        return self.encode(
            text + "<a>" * options["add_generation_prompt"], add_special_tokens=False
        )


def texts(entry: Any, **options: bool) -> list[str]:
    """Return the prefixes of one entry as text."""
    prompt = warm_prompt(entry, "here", **options)
    if prompt is None:
        return []
    return ["".join(map(chr, tokens)) for tokens in prefix_tokens(prompt, Characters())]


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        # What waits for the user ends before what the user says; the last token in common goes.
        ([SYSTEM], ["<s>Be brief.<u"]),
        ([SYSTEM, USER, ANSWER], ["<s>Be brief.<u>Hi<a>Hello<u"]),
        ({"messages": [SYSTEM], "tools": [TOOL]}, ["look_up;<s>Be brief.<u"]),
        # What waits for the model is a request as it is.
        ([SYSTEM, USER], ["<s>Be brief.<u>Hi<a>"]),
        ({"messages": [USER], "add_generation_prompt": False}, ["<u>Hi"]),
        (
            {"messages": [{"role": "developer", "content": "Be brief."}, USER]},
            ["<s>Be brief.<u>Hi<a>"],
        ),
        ({"prompt": "Once"}, ["\x01Once"]),
        ({"prompt": ["Once", "More"], "add_special_tokens": False}, ["Once", "More"]),
        ({"prompt": [72, 105]}, ["Hi"]),
        ({"path": "/v1/completions", "body": {"prompt": "Once", "temperature": 9}}, ["\x01Once"]),
        ({"at": "now", "path": "/v1/chat/completions", "body": {"messages": [USER]}}, ["<u>Hi<a>"]),
        # Of Anthropic's API, by its route or by what no other has.
        ({"path": "/v1/messages", "body": {"messages": [USER]}}, ["<u>Hi<a>"]),
        ({"system": f"{BILLING}\nBe brief.", "messages": [USER]}, ["<s>Be brief.<u>Hi<a>"]),
        ({"system": "Be brief."}, ["<s>Be brief.<u"]),
        (
            {"system": [{"type": "text", "text": "Be brief."}], "tools": [ANTHROPIC_TOOL]},
            ["look_up;<s>Be brief.<u"],
        ),
        (
            {"messages": [USER, ANSWER], "tools": [ANTHROPIC_TOOL], "max_tokens": 5},
            ["look_up;<u>Hi<a>Hello"],
        ),
        # Of the Responses API, likewise.
        ({"input": "Hi", "instructions": "Be brief."}, ["<s>Be brief.<u>Hi<a>"]),
        (
            {"path": "/v1/responses", "body": {"input": [USER, ANSWER], "tools": [FLAT_TOOL]}},
            ["look_up;<u>Hi<a>Hello<u"],
        ),
        ({"instructions": "Be brief.", "max_output_tokens": 0}, ["<s>Be brief.<u"]),
    ],
)
def test_every_form_gives_the_tokens_of_its_requests(entry: Any, expected: list[str]) -> None:
    """Lists of messages, bodies of both routes, and recorded requests."""
    assert texts(entry) == expected


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ([SYSTEM, USER, ANSWER, USER], ["<s>Be brief.<u"]),
        ({"messages": [SYSTEM, USER], "tools": [TOOL]}, ["look_up;<s>Be brief.<u"]),
        ([USER], []),
        ({"prompt": "Once"}, []),
        (
            {"path": "/v1/messages", "body": {"system": "Be brief.", "messages": [USER]}},
            ["<s>Be brief.<u"],
        ),
        ({"path": "/v1/messages", "body": {"messages": [USER]}}, []),
        ({"instructions": "Be brief.", "input": "Hi"}, ["<s>Be brief.<u"]),
        (
            {"input": [{"role": "developer", "content": "Be brief."}, USER]},
            ["<s>Be brief.<u"],
        ),
        ({"path": "/v1/responses", "body": {"input": [USER]}}, []),
    ],
)
def test_the_system_part_alone(entry: Any, expected: list[str]) -> None:
    """With `system_only` what users said is left out, and what has nothing else too."""
    assert texts(entry, system_only=True) == expected


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ("Once", "a prompt is a list of messages"),
        ({}, "has messages or a prompt"),
        ([], "messages"),
        ([{"role": "robot", "content": "x"}], "role"),
        ({"messages": [USER], "tools": "all"}, "tools: .* valid list"),
        ({"path": "/v1/embeddings", "body": {"input": "x"}}, "/v1/embeddings cannot be warmed"),
        ({"input": "x", "previous_response_id": "resp_1"}, "only the server has"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "only the server has"),
        ({"path": "/v1/responses", "body": {}}, "input holds no item"),
    ],
)
def test_what_no_request_could_hold_is_refused(entry: Any, reason: str) -> None:
    """The reason names what is wrong."""
    with pytest.raises(InvalidRequestError, match=reason):
        texts(entry)


def test_a_request_computes_whole_blocks_and_one_token_more() -> None:
    """Blocks are filled with the prompt's own tokens, and nothing is drawn at random."""
    blocks = whole_blocks(list(range(130)), 64)
    assert blocks == list(range(128))
    request = warm_request(blocks)
    assert len(request.prompt) == 4 * 129
    assert (request.is_warm, request.priority) == (True, -1)
    assert (request.sampling.max_tokens, request.sampling.temperature) == (1, 0.0)
    assert whole_blocks([1, 2], 64) == []


def test_files_of_both_kinds_and_folders(tmp_path: Path) -> None:
    """A folder gives its files in the order of their names, and other files are left alone."""
    (tmp_path / "b.json").write_text(json.dumps([[SYSTEM], {"messages": [USER]}]))
    (tmp_path / "a.jsonl").write_text(f"{json.dumps([USER])}\n\n{json.dumps({'prompt': 'x'})}\n")
    (tmp_path / "notes.txt").write_text("not a prompt")
    found = read_prompts(tmp_path)
    assert found.faults == []
    assert [prompt.where.removeprefix(f"{tmp_path}/") for prompt in found.prompts] == [
        *("a.jsonl, line 1", "a.jsonl, line 3", "b.json, prompt 1", "b.json, prompt 2"),
    ]


def test_one_conversation_may_stand_alone(tmp_path: Path) -> None:
    """A file that holds a list of messages, or one body, holds one prompt."""
    for document in ([SYSTEM, USER], {"messages": [SYSTEM, USER]}):
        (tmp_path / "one.json").write_text(json.dumps(document))
        assert len(read_prompts(tmp_path / "one.json").prompts) == 1


def test_a_torn_line_costs_itself(tmp_path: Path) -> None:
    """A line that is no JSON, and a prompt that is none, are faults that say where they stand."""
    file = tmp_path / "day.jsonl"
    file.write_text(f'{json.dumps([USER])}\n{{"messages": [\n["x"]\n')
    found = read_prompts(file)
    assert len(found.prompts) == 1
    assert [fault.partition(":")[0] for fault in found.faults] == [
        *(f"{file}, line 2", f"{file}, line 3"),
    ]


@pytest.mark.parametrize("text", ["", "{", "7", "[]", '"x"'])
def test_a_file_without_prompts_is_a_usage_error(tmp_path: Path, text: str) -> None:
    """So are a file that is not there and an empty folder."""
    file = tmp_path / "prompts.json"
    file.write_text(text)
    with pytest.raises(UsageError):
        read_prompts(file)
    file.unlink()
    for path in (file, tmp_path):
        with pytest.raises(UsageError):
            read_prompts(path)
