"""The field policy: every field of every schema has its class, and the class holds."""

from __future__ import annotations

from typing import Any, get_type_hints

import openai.types.chat.completion_create_params as chat_params
import openai.types.completion_create_params as completion_params
import pytest
from pydantic import BaseModel

from vllm_mlx.engine.errors import InvalidRequestError
from vllm_mlx.server.openai import schemas
from vllm_mlx.server.openai.fields import POLICIES, FieldUse, check_fields, unknown_fields
from vllm_mlx.server.openai.schemas import Body, ChatCompletionBody, CompletionBody
from vllm_mlx.server.unknown_fields import UnknownFields

SCHEMAS = [
    cls
    for cls in vars(schemas).values()
    if isinstance(cls, type) and issubclass(cls, Body) and cls is not Body
]

MINIMAL: dict[type[Body], dict[str, Any]] = {
    ChatCompletionBody: {"messages": [{"role": "user", "content": "x"}]},
    CompletionBody: {"prompt": "x"},
}


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda cls: cls.__name__)
def test_every_field_is_classified(schema: type[Body]) -> None:
    """A field cannot be added to a schema without saying what becomes of it."""
    assert set(POLICIES[schema]) == set(schema.model_fields)


@pytest.mark.parametrize(
    ("schema", "params"),
    [
        (ChatCompletionBody, chat_params.CompletionCreateParamsBase),
        (CompletionBody, completion_params.CompletionCreateParamsBase),
    ],
)
def test_every_field_of_the_openai_client_is_known(schema: type[BaseModel], params: type) -> None:
    """What the real client can send is enforced, advisory or refused, never unknown."""
    assert set(get_type_hints(params)) - set(schema.model_fields) == set()


@pytest.mark.parametrize("schema", MINIMAL, ids=lambda cls: cls.__name__)
def test_what_a_refused_field_may_say_is_accepted(schema: type[Body]) -> None:
    """Null and the values that ask for nothing pass."""
    for name, policy in POLICIES[schema].items():
        if policy.use is FieldUse.REFUSED:
            for value in (None, *policy.no_ops):
                body = schema.model_validate({**MINIMAL[schema], name: value})
                check_fields(body)


#: One value for each refused field that would have an effect.
EFFECTIVE = {
    "best_of": 2,
    "length_penalty": 2.0,
    "use_beam_search": True,
    "echo": True,
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "include_stop_str_in_output": True,
    "truncate_prompt_tokens": 5,
    "return_token_ids": True,
    "return_tokens_as_token_ids": True,
    "add_special_tokens": True,
    "suffix": "x",
}


@pytest.mark.parametrize("schema", MINIMAL, ids=lambda cls: cls.__name__)
def test_refused_fields_are_refused_by_name(schema: type[Body]) -> None:
    """A value with an effect is an error that names the field."""
    for name, policy in POLICIES[schema].items():
        if policy.use is not FieldUse.REFUSED:
            continue
        value = EFFECTIVE.get(name, {"some": "value"})
        body = schema.model_validate({**MINIMAL[schema], name: value})
        with pytest.raises(InvalidRequestError, match="not supported in this build") as caught:
            check_fields(body)
        assert caught.value.param == name


@pytest.mark.parametrize(
    ("fields", "is_accepted"),
    [
        ({"best_of": 1}, True),
        ({"best_of": 3, "n": 3}, True),
        ({"best_of": 3}, False),
        ({"best_of": 1, "n": 3}, False),
    ],
)
def test_best_of_may_say_what_n_says(fields: dict[str, Any], is_accepted: bool) -> None:
    """As many candidates as choices leave nothing to choose; any other number is refused."""
    body = CompletionBody.model_validate({"prompt": "x", **fields})
    if is_accepted:
        check_fields(body)
        return
    with pytest.raises(
        InvalidRequestError, match=f"only {fields.get('n', 1)} is accepted"
    ) as caught:
        check_fields(body)
    assert caught.value.param == "best_of"


def test_refused_fields_are_found_inside_messages() -> None:
    """The path in the error leads to the part."""
    message = {"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}
    body = ChatCompletionBody.model_validate({"messages": [message]})
    with pytest.raises(InvalidRequestError) as caught:
        check_fields(body)
    assert caught.value.param == "messages[0].content[0].input_audio"


def test_unknown_fields_are_found_at_any_depth_and_once() -> None:
    """Free-form values are not looked into."""
    message = {"role": "user", "content": [{"type": "text", "text": "x", "b": 1}], "a": 1}
    body = ChatCompletionBody.model_validate(
        {"messages": [message, message], "metadata": {"k": "v"}, "c": {"d": 1}}
    )
    assert unknown_fields(body) == ["c", "messages[].a", "messages[].content[].b"]


def test_names_from_clients_cannot_break_a_header_or_fill_memory() -> None:
    """Names are cleaned, cut and bounded in number."""
    fields = UnknownFields()
    recorded = fields.record(["bad\r\nx-evil: 1", "é" * 500])
    assert recorded == ("bad??x-evil??1", "?" * 64)
    assert len(fields.record([f"f{n}" for n in range(3000)])) == 21
    assert len(fields.counts) <= 1001
    assert sum(fields.counts.values()) == 3002


def test_an_unknown_field_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """The log names it the first time only."""
    fields = UnknownFields()
    with caplog.at_level("INFO"):
        fields.record(["mood"])
        fields.record(["mood"])
    assert [record.getMessage() for record in caplog.records].count(
        "unknown request field ignored: mood (logged once)"
    ) == 1
