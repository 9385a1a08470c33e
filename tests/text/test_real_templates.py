"""The published templates of seventy models render whole chats, with nothing lost of them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from parsing.test_templates import fetch_templates

from vllm_mlx.engine.config import ChatConfig
from vllm_mlx.engine.text.tokenizer import load_tokenizer

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Find a word",
        "parameters": {
            "type": "object",
            "properties": {"word": {"type": "string", "description": "What to find"}},
            "required": ["word"],
        },
    },
}
CALL = {
    "id": "call12345",
    "type": "function",
    "function": {"name": "look_up", "arguments": {"word": "an argument"}},
}
CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "first rule"},
    {"role": "system", "content": "second rule"},
    {"role": "user", "content": "first question"},
    {"role": "user", "content": "second question"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call12345", "name": "look_up", "content": "a result"},
    {"role": "assistant", "content": "first answer"},
    {"role": "system", "content": "third rule"},
    {"role": "user", "content": "third question"},
]
#: Templates that need more than a chat and its tools: a variable of their own.
NEEDS_MORE = {"fireworks-ai-llama-3-firefunction-v2"}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_template_loses_a_message(tmp_path: Path, chat_folder: Path) -> None:
    """Rules, questions, calls, results and answers all reach the model, in their order."""
    folder = os.environ.get("CHAT_TEMPLATES")
    paths = sorted(Path(folder).glob("*.jinja")) if folder else fetch_templates(tmp_path)
    assert len(paths) == 70
    lost = {}
    for path in paths:
        if path.stem in NEEDS_MORE:
            continue
        config = ChatConfig(chat_template=str(path))
        text = load_tokenizer(chat_folder, chat=config).render_chat(CHAT, tools=[TOOL])
        wanted = [m["content"] for m in CHAT if m["content"]] + ["look_up", "an argument"]
        missing = [part for part in wanted if part not in text]
        places = [text.rfind(m["content"]) for m in CHAT[2:] if m["content"]]
        if missing or places != sorted(places):
            lost[path.stem] = missing or "order"
    assert lost == {}
