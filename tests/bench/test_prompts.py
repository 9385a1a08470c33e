"""Hold the built-in prompts, prompt files, and how prompts are changed."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.scripted_server import Script, ServerScript

from vllm_mlx.bench.prompt import Prompt, first_turn, user_prompt
from vllm_mlx.bench.prompt_files import load_prompts, load_recording
from vllm_mlx.bench.prompt_sets import BUILTIN_SETS, builtin_set
from vllm_mlx.bench.vocabulary import (
    MEASURED_FIRST_WORDS,
    NUM_MARK_WORDS,
    THROWAWAY_FIRST_WORDS,
    beginnings,
)
from vllm_mlx.engine.errors import UsageError
from vllm_mlx.server.recording import open_recorder

if TYPE_CHECKING:
    from tests.bench.conftest import RunBench


@pytest.mark.parametrize(
    ("name", "shortest", "longest"),
    [("short", 5, 40), ("medium", 200, 450), ("long", 1200, 2500), ("thinking", 20, 60)],
)
def test_builtin_sets(name: str, shortest: int, longest: int) -> None:
    """Each set has a few different prompts of its size, the same each time."""
    prompts = builtin_set(name)
    texts = [prompt.messages[0]["content"] for prompt in prompts]
    assert len({text.split()[0] for text in texts}) == len(texts) >= 3
    assert all(shortest <= len(text.split()) <= longest for text in texts)
    assert builtin_set(name) == prompts
    assert name in BUILTIN_SETS


def test_first_words_are_apart() -> None:
    """What is thrown away begins with other words than what is measured."""
    assert set(MEASURED_FIRST_WORDS) & set(THROWAWAY_FIRST_WORDS) == set()
    assert len(set(MEASURED_FIRST_WORDS)) == len(MEASURED_FIRST_WORDS) > 150


def test_beginnings_never_repeat() -> None:
    """Beginnings differ in their first word while words last, and as a whole for ever."""
    texts = list(itertools.islice(beginnings(["a", "b", "c"], random.Random(0)), 300))
    assert len(set(texts)) == 300
    assert {text.split()[0] for text in texts[:3]} == {"a", "b", "c"}
    assert {len(text.split()) for text in texts} == {NUM_MARK_WORDS}


def test_prompts_are_changed_at_either_end() -> None:
    """Text goes before the first message's or after the last one's, parts or not."""
    parts = [{"type": "image_url", "image_url": {}}, {"type": "text", "text": "own"}]
    prompt = Prompt(id="p", messages=({"role": "user", "content": parts},))
    assert prompt.begins_with("new").messages[0]["content"][1]["text"] == "new own"
    assert prompt.ends_with("new").messages[0]["content"][1]["text"] == "own new"
    assert parts[1]["text"] == "own"
    plain = user_prompt("p", "own").with_system_prefix("shared")
    assert [m["content"] for m in plain.messages] == ["shared", "own"]
    again = plain.with_system_prefix("new").begins_with("first")
    assert [m["content"] for m in again.messages] == ["first new shared", "own"]


def test_conversations_are_cut_at_their_first_answer() -> None:
    """A recorded conversation is played turn by turn with its own user messages."""
    roles = ["system", "user", "assistant", "user", "assistant", "user"]
    messages = tuple({"role": role, "content": str(n)} for n, role in enumerate(roles))
    cut = first_turn(Prompt(id="p", messages=messages))
    assert [m["content"] for m in cut.messages] == ["0", "1"]
    assert [cut.follow_up(turn) for turn in (1, 2)] == ["3", "5"]
    assert cut.follow_up(3)


FILES = {
    "p.txt": "one\n\n  two words \n",
    "list.json": '["one", "two words"]',
    "pair.json": '[[{"role": "user", "content": "one"}],'
    '[{"role": "user", "content": "two words"}]]',
    "p.jsonl": '{"prompt": "one"}\n\n[{"role": "user", "content": "two words"}]\n',
    "bodies.jsonl": '{"messages": [{"role": "user", "content": "one"}]}\n"two words"\n',
    "recorded.json": '[{"id": "x", "body": {"messages": [{"role": "user", "content": "one"}]}}, '
    '"two words"]',
}


@pytest.mark.parametrize("name", FILES)
def test_prompt_files(tmp_path: Path, name: str) -> None:
    """Every shape of file gives its prompts."""
    (tmp_path / name).write_text(FILES[name])
    prompts = load_prompts(tmp_path / name)
    assert [prompt.messages[-1]["content"] for prompt in prompts] == ["one", "two words"]


def test_one_conversation_is_one_prompt(tmp_path: Path) -> None:
    """A list of messages is one conversation, and a single object one request."""
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    (tmp_path / "a.json").write_text(json.dumps(messages))
    (tmp_path / "b.json").write_text(json.dumps({"messages": messages}))
    for prompts in (load_prompts(tmp_path / "a.json"), load_recording(tmp_path)):
        assert all(prompt.messages == tuple(messages) for prompt in prompts)


def test_request_bodies_keep_their_fields(tmp_path: Path) -> None:
    """A body's tools, length and other fields are sent; what the run decides is not."""
    body = {
        "model": "other",
        "stream": False,
        "system": [{"type": "text", "text": "kind"}],
        "messages": [{"role": "user", "content": "u"}],
        "tools": [{"name": "f"}],
        "max_tokens": 9,
        "top_p": 0.5,
    }
    (tmp_path / "p.jsonl").write_text(json.dumps(body))
    (prompt,) = load_prompts(tmp_path / "p.jsonl")
    assert [m["role"] for m in prompt.messages] == ["system", "user"]
    assert prompt.messages[0]["content"] == "kind"
    assert (prompt.tools, prompt.max_tokens, prompt.extra) == (({"name": "f"},), 9, {"top_p": 0.5})


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("p.csv", "one", "are read from .txt"),
        ("p.txt", "\n\n", "holds no prompt"),
        ("p.json", "{", "is not JSON"),
        ("p.json", "[]", "holds no prompt"),
        ("p.json", "7", "not a list of prompts"),
        ("p.json", "[7]", "prompt 1: not a list of messages"),
        ("p.jsonl", '"a"\n{"messages": []}\n', "line 2: not a list of messages"),
        ("p.jsonl", '{"prompt": "a", "max_tokens": 0}', "max_tokens must be a positive"),
        ("p.jsonl", '{"prompt": "a", "tools": {}}', "tools must be a list"),
    ],
)
def test_files_that_hold_no_prompts(tmp_path: Path, name: str, text: str, complaint: str) -> None:
    """A file of another shape is refused, with the place that is wrong."""
    (tmp_path / name).write_text(text)
    with pytest.raises(UsageError, match=complaint):
        load_prompts(tmp_path / name)


def test_a_recording_is_replayed(run_bench: RunBench, tmp_path: Path) -> None:
    """Each recorded request is sent once, in order, with its own fields."""
    server = ServerScript(Script())
    bodies = [
        {
            "messages": [{"role": "user", "content": f"question {n}"}],
            "max_tokens": 3 + n,
            "top_p": 0.5,
        }
        for n in range(3)
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(body) for body in bodies))
    (row,) = run_bench(server, replay=tmp_path, concurrencies=(1,), repetitions=1, warmup=0).rows
    sent = [body for _, body in server.requests][1:]
    assert [body["messages"][0]["content"] for body in sent] == [f"question {n}" for n in range(3)]
    assert [body["max_tokens"] for body in sent] == [3, 4, 5]
    assert {body["top_p"] for body in sent} == {0.5}
    assert (row["requests"], row["prompt_set"]) == (3, tmp_path.name)


def test_what_serve_records_is_read(tmp_path: Path) -> None:
    """The file that a recording server writes gives the requests of every API."""
    bodies = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "q"}], "top_p": 0.5},
        "/v1/completions": {"prompt": ["q"]},
        "/v1/messages": {"system": "s", "messages": [{"role": "user", "content": "q"}]},
        "/v1/responses": {"instructions": "s", "input": "q", "max_output_tokens": 7},
    }
    recorder = open_recorder(tmp_path / "recorded")
    for path, body in bodies.items():
        recorder.record(path, json.dumps({"model": "m", "stream": True, **body}).encode())
    recorder.close()
    prompts = load_recording(tmp_path / "recorded")
    contents = [[message["content"] for message in prompt.messages] for prompt in prompts]
    assert contents == [["q"], ["q"], ["s", "q"], ["s", "q"]]
    assert [prompt.extra for prompt in prompts] == [{"top_p": 0.5}, {}, {}, {}]
    assert prompts[-1].max_tokens == 7


def test_recordings_are_read_in_order(tmp_path: Path) -> None:
    """A folder's files are read by name; anything else in it is left alone."""
    (tmp_path / "2.json").write_text('["c"]')
    (tmp_path / "1.jsonl").write_text('"a"\n"b"\n')
    (tmp_path / "notes.md").write_text("no prompt")
    texts = [prompt.messages[0]["content"] for prompt in load_recording(tmp_path)]
    assert texts == ["a", "b", "c"]
    with pytest.raises(UsageError, match="is not a folder"):
        load_recording(tmp_path / "1.jsonl")
