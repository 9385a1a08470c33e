"""The stored prefix of a chat is a true prefix of the requests that go on from it."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from vllm_mlx.engine.core.common_prefix import common_length
from vllm_mlx.engine.text.prefix_render import is_whole_request, open_prefix
from vllm_mlx.engine.text.tokenizer import Tokenizer

#: Small templates of the shapes that real ones have.
TEMPLATES = {
    "plain": (
        "{% if tools %}<|start|>system\n{{ tools | tojson }}<|end|>\n{% endif %}"
        "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
    ),
    # Trims what users say, and puts what the system says before the first of it.
    "folded": (
        "{% set first = '' %}{% for m in messages %}"
        "{% if m.role == 'system' %}{% set first = m.content + '\n\n' %}{% endif %}{% endfor %}"
        "{% set ns = namespace(first=messages[0].content + '\n\n'"
        " if messages[0].role == 'system' else '', expects='user') %}"
        "{% for m in messages if m.role != 'system' %}"
        "{% if m.role != ns.expects %}{{ raise_exception('roles must alternate') }}{% endif %}"
        "{% set ns.expects = 'assistant' if m.role == 'user' else 'user' %}"
        "<|start|>{{ m.role }} {{ ns.first }}{{ m.content | trim }}<|end|>{% set ns.first = '' %}"
        "{% endfor %}{% if add_generation_prompt %}<|start|>assistant {% endif %}"
    ),
    # Names the tools just before what the user said last.
    "late_tools": (
        "{% for m in messages %}{% if loop.last and tools %}[{{ tools | tojson }}]{% endif %}"
        "<|start|>{{ m.role }}\n{{ m.content }}<|end|>{% endfor %}"
    ),
    # Leaves the reasoning out of all answers before the last question.
    "forgetful": (
        "{% set ns = namespace(last=0) %}{% for m in messages if m.role == 'user' %}"
        "{% set ns.last = loop.index0 %}{% endfor %}"
        "{% for m in messages %}<|start|>{{ m.role }}\n"
        "{% if m.role == 'assistant' and loop.index0 < ns.last %}"
        "{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}<|end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n<think>\n{% endif %}"
    ),
}
SYSTEM = {"role": "system", "content": "The quick brown fox 42.\n\nAnswer in one line."}
TALK = [
    SYSTEM,
    {"role": "user", "content": "What is 1 + 1?"},
    {"role": "assistant", "content": "<think>It is 2.</think>2"},
]
TOOLS = [{"type": "function", "function": {"name": "look_up", "parameters": {"q": "string"}}}]
#: What users may go on with.
NEXT = ["Alphabet", "x", "\n", "\n\n\n", " leading", "  ", "", "42", "é", "日", "<|end|>", "Bravo!"]


@pytest.fixture(params=["byte_level", "gemma"])
def tokenizer(request: pytest.FixtureRequest, tokenizers_by_kind: Any) -> Tokenizer:
    """Return a tokenizer whose template a test may set."""
    shared = tokenizers_by_kind[request.param]
    return Tokenizer(copy.deepcopy(shared._tokenizer), shared.eos_token_ids)


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("messages", [[SYSTEM], TALK], ids=["system", "talk"])
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["no_tools", "tools"])
def test_it_is_a_token_prefix_of_every_later_request(
    tokenizer: Tokenizer,
    template: str,
    messages: list[dict[str, str]],
    tools: list[dict[str, Any]] | None,
) -> None:
    """Whatever the user says next, the request's tokens begin with the stored ones."""
    tokenizer._tokenizer.chat_template = TEMPLATES[template]

    def encode(chat: Sequence[Mapping[str, Any]]) -> list[int]:
        return tokenizer.encode_chat(chat, tools=tools)

    prefix = open_prefix(messages, encode)
    text = tokenizer.decode(prefix, skip_special_tokens=False)
    assert SYSTEM["content"].split("\n")[0] in text
    if tools and template != "folded" and template != "forgetful":
        assert "look_up" in text
    later = [encode([*messages, {"role": "user", "content": said}]) for said in NEXT]
    wrong = [said for said, r in zip(NEXT, later, strict=True) if r[: len(prefix)] != prefix]
    assert wrong == []
    # It is as long as it can be, but for what could have merged with another beginning.
    longest = min(common_length(later[0], request) for request in later[1:])
    assert longest - 3 <= len(prefix) <= longest


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([SYSTEM], False),
        (TALK, False),
        (TALK[:2], True),
        ([*TALK, {"role": "tool"}], True),
        ([], 0),
    ],
)
def test_a_chat_that_asks_is_a_request_of_its_own(
    messages: list[dict[str, str]], *, expected: bool
) -> None:
    """After a user's or a tool's message the model answers; otherwise the user goes on."""
    assert is_whole_request(messages) == expected
