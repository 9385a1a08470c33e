"""Request bodies that are no requests: each is a 4xx in OpenAI's shape, and the server goes on."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vllm_mlx.engine.errors import InvalidRequestError
from vllm_mlx.server.openai.schemas import ChatCompletionBody
from vllm_mlx.server.openai.validation import decode_object, validate

if TYPE_CHECKING:
    from tests.server.conftest import Served, ServerFactory

FAULTY_BODIES = [
    b"",
    b"   ",
    b"{",
    b"nonsense",
    b"[]",
    b'"text"',
    b"5",
    b"null",
    b'{"messages": [}',
    b'{"temperature": NaN, "messages": []}',
    b'{"temperature": Infinity}',
    b'{"temperature": 1e999}',
    b'{"a": "\xff\xfe"}',
    b'{"a": "\\ud800"}',
    b'{"a": "\\udc00 tail"}',
    b"\xef\xbb\xbf{}",
    b'{"a": 1} trailing',
    b"[" * 100_000,
    b'{"a":' * 100_000,
    b'{"messages": [{"role": "user", "content": "cut o',
]


@pytest.mark.parametrize("raw", FAULTY_BODIES, ids=range(len(FAULTY_BODIES)))
async def test_bodies_that_are_no_json_object_are_400s(served: Served, raw: bytes) -> None:
    """Both generating routes answer alike."""
    for path in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"):
        response = await served.client.post(path, data=raw)
        assert response.status_code == 400
        error = (await response.get_json())["error"]
        assert error["type"] == "invalid_request_error"
    assert (await served.chat()).status_code == 200


async def test_a_body_over_the_limit_is_a_413(make_server: ServerFactory) -> None:
    """The limit holds with and without a declared length."""
    server = await make_server(max_body_bytes=1000)
    response = await server.chat("x" * 2000)
    assert response.status_code == 413
    assert (await response.get_json())["error"]["code"] == "request_body_too_large"
    async with server.client.request("/v1/completions", method="POST") as connection:
        for _ in range(3):
            await connection.send(b"x" * 500)
    assert connection.status_code == 413
    assert (await server.chat("x")).status_code == 200


async def test_unknown_routes_and_methods_have_openais_shape(served: Served) -> None:
    """404 and 405 are told as every other error."""
    response = await served.client.get("/v1/nothing")
    assert response.status_code == 404
    assert (await response.get_json())["error"]["code"] == "unknown_url"
    response = await served.client.get("/v1/chat/completions")
    assert response.status_code == 405
    assert (await response.get_json())["error"]["code"] == "method_not_allowed"
    assert response.headers["x-request-id"].startswith("chatcmpl-")


async def test_a_defect_of_ours_is_a_500_that_names_only_the_request(
    served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The traceback goes to the log under the id that the client gets."""

    def broken(*arguments: Any) -> None:
        raise RuntimeError("a secret detail")

    monkeypatch.setattr(served.runtime.generations, "start", broken)
    response = await served.chat()
    assert response.status_code == 500
    text = await response.get_data(as_text=True)
    assert "secret detail" not in text
    assert response.headers["x-request-id"] in text
    assert "secret detail" in caplog.text


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)
CHAT_FIELDS = st.sampled_from([*ChatCompletionBody.model_fields, "unknown"])


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(fields=st.dictionaries(CHAT_FIELDS, JSON_VALUES, max_size=4), with_messages=st.booleans())
def test_any_fields_of_a_chat_are_taken_or_refused(
    fields: dict[str, Any], with_messages: bool
) -> None:
    """Validation never fails in any way but its own."""
    if with_messages:
        fields = {**fields, "messages": [{"role": "user", "content": "x"}]}
    with suppress(InvalidRequestError):
        validate(ChatCompletionBody, fields)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(raw=st.binary(max_size=40))
def test_any_bytes_are_decoded_or_refused(raw: bytes) -> None:
    """Decoding never fails in any way but its own."""
    with suppress(InvalidRequestError):
        assert isinstance(decode_object(raw), dict)
