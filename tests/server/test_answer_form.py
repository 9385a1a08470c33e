"""Every field that gives an answer its form, over both routes: enforced, or refused by name."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support.grammar_tokens import ByteTokens

from vllm_mlx.engine.core.grammar import GrammarCompiler
from vllm_mlx.engine.text.chat_formats import ChatFormats
from vllm_mlx.server.openai.answer_form import answer_form
from vllm_mlx.server.openai.schemas import CompletionBody

if TYPE_CHECKING:
    from tests.server.conftest import Served, ServerFactory

POINT = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
ROUTES = ["/v1/chat/completions", "/v1/completions"]

#: What asks for a form, with a part of the grammar that it becomes.
FORMS: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "json_object"}}, '%json {"type": "object"'),
    ({"response_format": {"type": "json_object", "schema": POINT}}, '"x": {"type": "integer"}'),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": POINT}}},
        '"x": {"type": "integer"}',
    ),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "p", "strict": True, "schema": POINT},
            }
        },
        '"x": {"type": "integer"}',
    ),
    ({"guided_json": POINT}, '"x": {"type": "integer"}'),
    ({"guided_json": '{"type": "null"}'}, '"null"'),
    ({"guided_json": POINT, "guided_whitespace_pattern": "!{0,2}"}, '"!{0,2}"'),
    ({"guided_regex": "[a-c]+"}, "/[a-c]+/"),
    ({"guided_choice": ["yes", "no"]}, "/yes/ | /no/"),
    ({"guided_grammar": 'root ::= "a"'}, 'start: "a"'),
    ({"guided_grammar": 'start: "a"'}, 'start: "a"'),
    ({"structured_outputs": {"json": POINT}}, '"x": {"type": "integer"}'),
    ({"structured_outputs": {"json": POINT, "disable_any_whitespace": True}}, "flexible"),
    ({"structured_outputs": {"json": POINT, "whitespace_pattern": "!"}}, '"!"'),
    ({"structured_outputs": {"json_object": True}}, '{"type": "object"'),
    ({"structured_outputs": {"regex": "[a-c]+", "json_object": False}}, "/[a-c]+/"),
    ({"structured_outputs": {"choice": ["yes"]}}, "/yes/"),
    ({"structured_outputs": {"grammar": 'start: "a"'}}, 'start: "a"'),
    ({"response_format": {"type": "text"}, "guided_choice": ["yes"]}, "/yes/"),
]

#: What is refused, with the field that the error names and a part of its message.
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": {"type": "xml"}}, "response_format.type", "json_schema"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "no schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "p"}}},
        "response_format.json_schema",
        "no schema",
    ),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "p", "schema": {"type": "strnig"}},
            }
        },
        "response_format.json_schema.schema",
        "strnig",
    ),
    ({"guided_json": {"not": {"type": "null"}}}, "guided_json", "Unimplemented keys"),
    ({"guided_json": "{"}, "guided_json", "is not JSON"),
    ({"guided_regex": "("}, "guided_regex", "unclosed group"),
    ({"guided_choice": []}, "guided_choice", "at least one"),
    ({"guided_grammar": "start: x"}, "guided_grammar", "unknown name"),
    ({"guided_json": POINT, "guided_choice": ["a"]}, "guided_choice", "exclude each other"),
    (
        {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
        "structured_outputs.regex",
        "exclude each other",
    ),
    ({"structured_outputs": {}}, "structured_outputs", "exactly one"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "exactly one"),
    (
        {"structured_outputs": {"structural_tag": "x"}},
        "structured_outputs.structural_tag",
        "not supported",
    ),
]


async def _post(served: Served, path: str, **fields: Any) -> Any:
    if path == "/v1/completions":
        return await served.post(path, prompt="x", **fields)
    return await served.chat("x", **fields)


async def test_the_guides_request_is_taken(make_server: ServerFactory) -> None:
    """The body of the guide's command asks for what the guide says."""
    guide = Path("docs/guides/structured-output.md").read_text(encoding="utf-8")
    body = re.findall(r"-d '(\{.*?\n\})'", guide, re.DOTALL)
    served = await make_server()
    response = await served.post("/v1/chat/completions", **json.loads(body[0]))
    assert response.status_code == 200
    assert '"maximum": 120' in (served.engine.requests[0].sampling.grammar or "")


TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {
            "type": "object",
            "properties": {"at": {"enum": ["sky", "sea"]}},
            "required": ["at"],
            "additionalProperties": False,
        },
    },
}
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "sky"}}\n</tool_call>'
THOUGHT = "<think>\nhm\n</think>\n\n"


@pytest.mark.parametrize(
    ("fields", "good", "bad"),
    [
        ({}, [THOUGHT + "yes", "yes"], [THOUGHT + CALL, CALL, "well"]),
        ({"tools": [TOOL]}, [THOUGHT + "yes", THOUGHT + CALL, CALL], [THOUGHT + "well"]),
        ({"tools": [TOOL], "tool_choice": "required"}, [THOUGHT + CALL, CALL], ["yes"]),
        ({"tools": [TOOL], "tool_choice": "none"}, [THOUGHT + "yes", "yes"], [CALL]),
    ],
)
async def test_a_form_goes_with_reasoning_and_tools(
    make_server: ServerFactory, fields: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    """The model may think first, and call where it may choose to; a forced call goes first."""
    served = await make_server(formats=ChatFormats(tools="hermes", reasoning="qwen3"))
    response = await served.chat("x", guided_choice=["yes", "no"], **fields)
    assert response.status_code == 200
    grammar = served.engine.requests[0].sampling.grammar
    assert grammar is not None
    tokens = ByteTokens()
    for texts, is_good in ((good, True), (bad, False)):
        for text in texts:
            matcher = GrammarCompiler(tokens).compile(grammar)
            encoded = tokens.encode(text)
            num_taken = matcher.try_consume_tokens(encoded)
            assert (num_taken == len(encoded) and matcher.is_accepting()) == is_good, text


def test_no_field_asks_for_no_form() -> None:
    """Null and `text` leave an answer free."""
    for fields in ({}, {"response_format": None}, {"response_format": {"type": "text"}}):
        assert answer_form(CompletionBody.model_validate({"prompt": "x", **fields})) is None


@pytest.mark.parametrize("path", ROUTES)
async def test_every_form_reaches_the_engine(make_server: ServerFactory, path: str) -> None:
    """The grammar of each field goes with the request, for every choice."""
    served = await make_server(max_num_seqs=8)
    for fields, part in FORMS:
        served.engine.requests.clear()
        await _post(served, path, **fields, n=2)
        grammars = [request.sampling.grammar for request in served.engine.requests]
        assert len(grammars) == 2
        assert part in (grammars[0] or ""), fields
        assert grammars[0] == grammars[1]


@pytest.mark.parametrize("path", ROUTES)
async def test_what_cannot_be_enforced_is_refused(make_server: ServerFactory, path: str) -> None:
    """The answer is a 400 in OpenAI's shape that names the field and says why."""
    served = await make_server()
    for fields, param, reason in REFUSED:
        response = await _post(served, path, **fields)
        error = (await response.get_json())["error"]
        assert response.status_code == 400, fields
        assert (error["type"], error["param"]) == ("invalid_request_error", param)
        assert reason in error["message"]
    assert not served.engine.requests
