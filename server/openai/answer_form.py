"""Which form a request of OpenAI's API, or of vLLM's additions to it, gives its answer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vllm_mlx.engine.errors import InvalidRequestError
from vllm_mlx.engine.parsing.json_grammar import JSON_WHITE_SPACE
from vllm_mlx.server.openai.schemas import GenerationBody, ResponseFormat, StructuredOutputs
from vllm_mlx.server.runtime import ServerRuntime
from vllm_mlx.server.structured_output import (
    AnswerSpec,
    choice_spec,
    grammar_spec,
    json_spec,
    object_spec,
    regex_spec,
)

#: The fields that may give a form.
_FIELDS = (
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
)


async def form_of(runtime: ServerRuntime, body: GenerationBody) -> AnswerSpec | None:
    """Return the form that a body asks for, found on a thread: a schema may be long."""
    if all(getattr(body, name) is None for name in _FIELDS):
        return None
    return await runtime.run_aside(lambda: answer_form(body))


def answer_form(body: GenerationBody) -> AnswerSpec | None:
    """Return the form that a body asks for; None leaves the answer free.

    Raises `InvalidRequestError` for values that are no form, and for more than one.
    """
    found = list(_forms(body))
    if len(found) > 1:
        names = " and ".join(spec.param for spec in found)
        raise InvalidRequestError(
            f"{names} exclude each other: an answer has one form", param=found[1].param
        )
    return found[0] if found else None


def _forms(body: GenerationBody) -> Iterator[AnswerSpec]:
    if body.response_format is not None and body.response_format.type != "text":
        yield _of_response_format(body.response_format)
    if body.structured_outputs is not None:
        yield _of_structured_outputs(body.structured_outputs)
    space = body.guided_whitespace_pattern
    if body.guided_json is not None:
        yield json_spec(body.guided_json, param="guided_json", white_space=_white_space(space))
    if body.guided_regex is not None:
        yield regex_spec(body.guided_regex, param="guided_regex")
    if body.guided_choice is not None:
        yield choice_spec(body.guided_choice, param="guided_choice")
    if body.guided_grammar is not None:
        yield grammar_spec(body.guided_grammar, param="guided_grammar")


def _of_response_format(form: ResponseFormat) -> AnswerSpec:
    if form.type == "json_object":
        param = "response_format"
        if form.schema is None:
            return object_spec(param=param)
        return json_spec(form.schema, param=f"{param}.schema")
    param = "response_format.json_schema"
    if form.json_schema is None or form.json_schema.schema is None:
        raise InvalidRequestError(f"{param} has no schema", param=param)
    return json_spec(form.json_schema.schema, param=f"{param}.schema")


def _of_structured_outputs(form: StructuredOutputs) -> AnswerSpec:
    given: dict[str, Any] = {
        name: value
        for name in ("json", "regex", "choice", "grammar", "json_object")
        if (value := getattr(form, name)) not in (None, False)
    }
    if len(given) != 1:
        raise InvalidRequestError(
            "structured_outputs must have exactly one of json, regex, choice, grammar and "
            f"json_object, not {len(given)}",
            param="structured_outputs",
        )
    name, value = next(iter(given.items()))
    param = f"structured_outputs.{name}"
    space = None if form.disable_any_whitespace else _white_space(form.whitespace_pattern)
    if name == "regex":
        return regex_spec(value, param=param)
    if name == "choice":
        return choice_spec(value, param=param)
    if name == "grammar":
        return grammar_spec(value, param=param)
    schema = {"type": "object"} if name == "json_object" else value
    return json_spec(schema, param=param, white_space=space)


def _white_space(pattern: str | None) -> str:
    return JSON_WHITE_SPACE if pattern is None else pattern
