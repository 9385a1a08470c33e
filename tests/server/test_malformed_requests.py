"""Requests with wrong fields: each is a 400 that names the field, and starts nothing."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.server.conftest import Served

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"


def user(content: Any = "x", **fields: Any) -> dict[str, Any]:
    """Return one message."""
    return {"role": "user", "content": content, **fields}


def nested(depth: int) -> Any:
    """Return lists in lists."""
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


#: Wrong values of fields that chats and completions share.
SHARED = {
    "model": [5, [], {}, True, "no-such-model"],
    "temperature": ["hot", -0.1, 2.1, [1], {}, True, 10**400],
    "top_p": ["x", 0, -1, 1.01],
    "top_k": ["x", 1.5, -2, 2**31],
    "min_p": [-0.1, 1.1, "x"],
    "seed": ["x", 1.5, 2**63, -(2**63) - 1, True],
    "max_tokens": ["x", -1, 1.5, 10**30, True],
    "min_tokens": [-1, "x", 10**12],
    "stop": [5, "", [""], [5], ["x"] * 65, "x" * 1025, {}, [["x"]]],
    "stop_token_ids": ["x", [-1], [2**31], [2**70], ["x"], [1.5], [True], 0x110000],
    "stream": ["yes", 1, []],
    "stream_options": [{"include_usage": True}, 5, []],
    "n": [0, -1, 129, "x", 1.5],
    "frequency_penalty": [-2.1, 2.1, "x"],
    "presence_penalty": [-2.1, 2.1, "x"],
    "repetition_penalty": [0, -1, 101, "x"],
    "logit_bias": [[], {"x": 1}, {"-1": 1}, {"1": 101}, {"1": "x"}, {"99999999999": 1}, {"²": 1}],
    "priority": ["x", 1.5, 2**31, -(2**31)],
    "best_of": [2, "x"],
    "response_format": [{"type": "nothing"}, 5],
    "guided_regex": ["(", 5],
    "guided_json": ["{", 5, {"type": "nothing"}],
    "guided_choice": [[], [5], "x"],
    "guided_grammar": ["x", 5],
    "structured_outputs": [{}, {"regex": "("}, 5],
}

MESSAGES: list[Any] = [
    None,
    "x",
    5,
    {},
    [],
    [[]],
    ["x"],
    [None],
    [{}],
    [{"role": "user"}],
    [{"content": "x"}],
    [user(), {"role": "wizard", "content": "x"}],
    [{"role": None, "content": "x"}],
    [{"role": ["user"], "content": "x"}],
    [user(5)],
    [user({})],
    [user([5])],
    [user([{}])],
    [user([{"type": "text"}])],
    [user([{"type": "poem", "text": "x"}])],
    [user([{"type": "image_url", "image_url": {"url": "http://127.0.0.1/"}}])],
    [user([{"type": ["text"], "text": "x"}])],
    [user(nested(50))],
    [user("x" * 200)],
    [user("bad")],
    [{"role": "assistant", "content": None}],
    [{"role": "assistant", "tool_calls": [{"function": {}}]}],
    [{"role": "assistant", "tool_calls": [{"type": "spell", "function": {"name": "f"}}]}],
    [{"role": "assistant", "tool_calls": "x"}],
    [user(name=5)],
]

PROMPTS: list[Any] = [
    None,
    5,
    {},
    [],
    "x" * 200,
    [[]],
    ["x", 5],
    [1, "x"],
    [-1],
    [1.5],
    [True],
    [2**31],
    [2**70],
    [0x110000],
    [1] * 200,
    [["x"]],
    [[[1]]],
    ["x"] * 10_000,
    nested(50),
]

#: Route, body and the beginning of the field that the error names.
CASES: list[tuple[str, dict[str, Any], str]] = [
    *((CHAT, {"messages": [user()], k: v}, k) for k, vs in SHARED.items() for v in vs),
    *((COMPLETION, {"prompt": "x", k: v}, k) for k, vs in SHARED.items() for v in vs),
    *((CHAT, {"messages": value}, "messages") for value in MESSAGES),
    *((COMPLETION, {"prompt": value}, "prompt") for value in PROMPTS),
    (CHAT, {}, "messages"),
    (COMPLETION, {}, "prompt"),
    (CHAT, {"messages": [user()], "top_logprobs": 3}, "top_logprobs"),
    (CHAT, {"messages": [user()], "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    (CHAT, {"messages": [user()], "max_completion_tokens": 0}, "max_completion_tokens"),
    (CHAT, {"messages": [user()], "chat_template_kwargs": {"messages": []}}, "chat_template"),
    (COMPLETION, {"prompt": "x", "logprobs": 21}, "logprobs"),
    (COMPLETION, {"prompt": "x", "max_tokens": 0}, "max_tokens"),
    (COMPLETION, {"prompt": "x", "suffix": "y"}, "suffix"),
    (TOKENIZE, {}, "prompt"),
    (TOKENIZE, {"prompt": 5}, "prompt"),
    (TOKENIZE, {"prompt": "x", "messages": [user()]}, "prompt"),
    (TOKENIZE, {"messages": []}, "messages"),
    (DETOKENIZE, {}, "tokens"),
    (DETOKENIZE, {"tokens": "x"}, "tokens"),
    (DETOKENIZE, {"tokens": [-1]}, "tokens"),
    (DETOKENIZE, {"tokens": [0x110000]}, "tokens"),
    (DETOKENIZE, {"tokens": [2**70]}, "tokens"),
]


async def test_wrong_fields_are_named_and_start_nothing(served: Served) -> None:
    """Each of the table is a 400 (a 404 for a model) in OpenAI's shape, and the server goes on."""
    wrong = []
    for path, body, field in CASES:
        response = await served.client.post(path, data=json.dumps(body).encode())
        answer = (await response.get_json())["error"]
        as_it_should = (
            response.status_code == (404 if answer["code"] == "model_not_found" else 400)
            and answer["type"] == "invalid_request_error"
            and str(answer["param"]).startswith(field)
            and len(answer["message"]) < 1000
        )
        if not as_it_should:
            wrong.append((path, str(body)[:200], response.status_code, answer))
    assert wrong == []
    assert len(CASES) > 150
    assert served.engine.requests == []
    assert (await served.chat()).status_code == 200


@pytest.mark.parametrize("path", [CHAT, COMPLETION, TOKENIZE, DETOKENIZE])
async def test_content_types_do_not_matter_but_forms_are_no_json(served: Served, path: str) -> None:
    """A form is refused as what it is, whatever it is called."""
    for kind in ("application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "x/y"):
        headers = {"content-type": kind}
        response = await served.client.post(path, data=b"prompt=x", headers=headers)
        assert response.status_code == 400
        assert (await response.get_json())["error"]["type"] == "invalid_request_error"


async def test_surrogate_pairs_are_text_and_halves_are_not(served: Served) -> None:
    """An escaped pair is one character of the prompt."""
    whole = rb'{"prompt": "\ud83d\ude00"}'
    assert (await served.client.post(COMPLETION, data=whole)).status_code == 200
    assert served.engine.requests[-1].prompt[-4:] == (0x1F600).to_bytes(4, "little")
    for half in (rb'"\ud83d"', rb'"\ude00\ud83d"', rb'["\ud83d", "x"]'):
        response = await served.client.post(COMPLETION, data=b'{"prompt": ' + half + b"}")
        assert response.status_code == 400
