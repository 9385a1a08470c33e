"""From the bytes of a request body to a checked schema, and from its faults to clear 400s."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec
from pydantic import ValidationError

from vllm_mlx.engine.errors import InvalidRequestError
from vllm_mlx.server.openai.body_limits import check_counts, check_marks
from vllm_mlx.server.openai.fields import POLICIES, Policies, check_fields
from vllm_mlx.server.openai.schemas import Body

BodyT = TypeVar("BodyT", bound=Body)

_decoder = msgspec.json.Decoder()

#: Some writers begin UTF-8 with it; JSON lets readers pass over it.
BYTE_ORDER_MARK = b"\xef\xbb\xbf"

#: A `\u` escape of half a character; which halves belong together is the decoder's to say.
_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")


def decode_object(raw: bytes) -> dict[str, Any]:
    """Decode a JSON object; raise `InvalidRequestError` for anything else.

    Strict JSON: no NaN, no infinities, valid UTF-8, no lone surrogates.
    """
    if not raw.strip():
        raise InvalidRequestError("the request body is empty; a JSON object is expected")
    check_marks(raw)
    try:
        decoded = _decoder.decode(raw)
    except RecursionError:
        raise InvalidRequestError("the request body is nested too deeply") from None
    except msgspec.MsgspecError as error:
        raise InvalidRequestError(
            f"the request body is not valid JSON: {error}{_surrogate_hint(raw)}"
        ) from None
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"the request body is not valid UTF-8: {error}") from None
    if not isinstance(decoded, dict):
        kind = "an array" if isinstance(decoded, list) else "a single value"
        raise InvalidRequestError(f"the request body must be a JSON object, not {kind}")
    check_counts(decoded)
    return decoded


def validate(schema: type[BodyT], fields: dict[str, Any], policies: Policies = POLICIES) -> BodyT:
    """Check `fields` against `schema` and the field policies of its API.

    Raises `InvalidRequestError` that names the first wrong or unsupported field.
    """
    try:
        body = schema.model_validate(fields)
    except ValidationError as error:
        raise _first_fault(error) from None
    except RecursionError:
        raise InvalidRequestError("the request body is nested too deeply") from None
    check_fields(body, policies)
    return body


def _surrogate_hint(raw: bytes) -> str:
    """Say what the decoder's words for half a character mean; nothing where there is none."""
    if _SURROGATE_ESCAPE.search(raw) is None:
        return ""
    return (
        " (it has a \\u escape between \\ud800 and \\udfff, which is half a character: check that "
        "each one is followed by its other half)"
    )


def _first_fault(error: ValidationError) -> InvalidRequestError:
    """Choose what to tell: of the branches of a union, the one that got deepest."""
    faults = error.errors(include_url=False, include_context=False, include_input=False)
    places = [(_path(fault["loc"]), fault["msg"]) for fault in faults]
    field = places[0][0][0] if places[0][0] else ""
    same_field = [place for place in places if place[0][:1] == (field,)]
    depth = max(len(path) for path, _ in same_field)
    path = next(path for path, _ in same_field if len(path) == depth)
    messages = list(dict.fromkeys(message for place, message in same_field if place == path))
    param = _dotted(path)
    return InvalidRequestError(f"{param}: {' or '.join(messages)}", param=param)


def _path(location: Sequence[int | str]) -> tuple[int | str, ...]:
    """Drop what pydantic adds to a location to tell the branches of a union apart."""
    return tuple(
        part
        for index, part in enumerate(location)
        if isinstance(part, int) or not (index and _is_branch(part))
    )


def _is_branch(part: str) -> bool:
    schemas = {schema.__name__ for schema in Body.__subclasses__()}
    return part in {"str", "int"} or "[" in part or part in schemas


def _dotted(path: Sequence[int | str]) -> str:
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += f".{part}" if text else part
    return text
