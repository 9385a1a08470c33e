"""Render answers with the real chat templates and parse them with the formats found in these."""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jinja2
import pytest
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.sandbox import SandboxedEnvironment
from parsing.harness import parse
from parsing.test_templates import TABLE, fetch_templates

from vllm_mlx.engine.parsing import detect_parsers, make_reasoning

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "Where"},
                "days": {"type": "integer", "description": "How long"},
                "more": {"type": "object", "description": "Anything"},
            },
            "required": ["city"],
        },
    },
}
ARGUMENTS = {"city": 'Paris "x" <b>\nline', "days": 3, "more": {"a": [1, True, "q"]}}

#: Templates that write no call, or not the one that a model would write.
SILENT = {
    "CohereForAI-c4ai-command-r-plus-tool_use": "asks for a schema of its own",
    "HuggingFaceTB-SmolLM3-3B": "writes no calls",
    "LFM2-8B-A1B": "writes no calls",
    "LFM2.5-Instruct": "writes no calls",
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B": "leaves calls out beside content",
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": "writes content behind calls",
    "google-gemma-2-2b-it": "knows no tools",
    "ibm-granite-granite-3.3-2B-Instruct": "writes no calls",
    "llama-cpp-deepseek-r1": "leaves calls out beside content",
    "llama-cpp-rwkv-world": "knows no tools",
    "microsoft-Phi-3.5-mini-instruct": "knows no tools",
    "muse-glimmer": "has no parser",
}

#: Tokens between and behind messages, on which a model ends its answer.
ENDS = re.compile(
    r"<EOS>|<\|(im_end|eot_id|eom_id|end_of_text|END_OF_TURN_TOKEN|role_end|observation|end|call"
    r"|tool_response|message_sep|start_header_id\|>assistant<\|end_header_id|CHATBOT_TOKEN"
    r"|START_OF_TURN_TOKEN)\|?>|<seed:eos>|\[e~\[|<end_of_sentence>|<｜end▁of▁sentence｜>|<turn\|>"
    r"|<｜hy_eos:opensource｜>|<SPECIAL_1[12]>(Assistant)?|<sep>|</assistant>"
)


class _Generation(Extension):
    """Read the tag that marks what a model generates, as plain text around it."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> list[nodes.Node]:
        """Keep the inside of the block."""
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


@pytest.fixture(scope="module")
def templates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Give the templates' texts by name; `CHAT_TEMPLATES` may name a folder of them."""
    folder = os.environ.get("CHAT_TEMPLATES")
    paths = (
        Path(folder).glob("*.jinja") if folder else fetch_templates(tmp_path_factory.mktemp("t"))
    )
    return {path.stem: path.read_bytes().decode() for path in paths}


def test_rendered_answers_are_parsed_back(templates: dict[str, str]) -> None:
    """A call, the text before it and the reasoning come back as they were given."""
    wrong = {
        name: problem
        for name, text in sorted(templates.items())
        if name not in SILENT
        if (problem := _problem(name, text)) is not None
    }
    assert wrong == {}
    assert len(templates) == len(TABLE)


def _problem(name: str, template: str) -> str | None:
    """Return what is wrong with the parsed answer of one template, None if nothing is."""
    tools, reasoning, _ = detect_parsers(template)
    prompt, answer = _render(template)
    found = make_reasoning(reasoning)
    is_open = found is not None and found.is_open(prompt)
    parsed = parse(
        [answer[at : at + 5] for at in range(0, len(answer), 5)],
        tools=tools,
        reasoning=reasoning,
        tool_schemas=[TOOL],
        in_reasoning=is_open,
    )
    calls = [(c.name, c.is_complete and json.loads(c.arguments)) for c in parsed.calls]
    if calls != [("get_weather", ARGUMENTS)]:
        return f"calls {parsed.calls} in {answer!r}"
    texts = ENDS.sub("", parsed.content + parsed.reasoning)
    return None if re.fullmatch(r"[\sRC]*", texts) else f"text {texts!r} in {answer!r}"


def _render(template: str) -> tuple[str, str]:
    """Return a prompt and the answer to it, in the first form of messages that is taken."""
    environment = SandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(raise_exception=_refuse, strftime_now=lambda _: "2025")
    compiled = environment.from_string(template)
    values = {
        "tools": [TOOL],
        "functions": json.dumps([TOOL]),
        "eos_token": "<EOS>",
        "bos_token": "",
        "enable_thinking": True,
        "thinking": True,
        "tools_in_user_message": False,
        "reasoning_effort": "high",
        "datetime": "now",
    }
    for messages in _conversations():
        try:
            whole = compiled.render(messages=messages, add_generation_prompt=False, **values)
        except (jinja2.TemplateError, TypeError):
            continue
        asked = compiled.render(messages=messages[:1], add_generation_prompt=True, **values)
        same = (one == other for one, other in zip(whole, asked, strict=False))
        prompt = whole[: sum(itertools.takewhile(bool, same))]
        # A marker that prompt and answer have the beginning of in common is the answer's.
        prompt = prompt.removesuffix("<") if not asked.endswith(prompt) else prompt
        return prompt, whole[len(prompt) :]
    raise AssertionError("no form of messages is taken")


def _conversations() -> Iterator[list[dict[str, Any]]]:
    """Yield a question and an answer with a call, as templates want their messages."""
    for arguments in (ARGUMENTS, json.dumps(ARGUMENTS)):
        for content, thought in (("C", "R"), ("", "R"), ("C", None), ("", None)):
            function = {"name": "get_weather", "arguments": arguments}
            call = {"id": "call00001", "type": "function", "function": function}
            answer = {"role": "assistant", "content": content, "tool_calls": [call]}
            for key in ("reasoning_content", "reasoning", "thinking") if thought else ():
                answer[key] = thought  # type: ignore[assignment]
            yield [{"role": "user", "content": "QUESTION"}, answer]


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    plain = value if isinstance(value, dict | list | str | int | float | None) else list(value)
    return json.dumps(plain, ensure_ascii=ensure_ascii, **options)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)
