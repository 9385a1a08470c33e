"""The one mapping of errors to HTTP, complete and in each API's shape."""

from __future__ import annotations

import pytest

from vllm_mlx.engine.errors import (
    AuthenticationError,
    ContextLengthExceededError,
    EngineDiedError,
    EngineUnavailableError,
    InvalidRequestError,
    ModelUnknownError,
    OverloadedError,
    RequestNotFoundError,
    RequestTimeoutError,
    RowFailedError,
    VllmMlxError,
    error_classes,
)
from vllm_mlx.server.errors import RULES, internal_reply, reply_to, reply_to_http_fault


def test_every_error_is_mapped() -> None:
    """No class of the tree, present or future, is without its own rule."""
    assert set(RULES) == set(error_classes().values())


@pytest.mark.parametrize("error", error_classes().values(), ids=lambda cls: cls.__name__)
def test_every_error_makes_both_bodies(error: type[VllmMlxError]) -> None:
    """Each class yields a whole reply, and a retry hint that fits its rule."""
    reply = reply_to(error("what happened"))
    assert 400 <= reply.rule.status <= 599
    assert reply.openai_body()["error"].keys() == {"message", "type", "param", "code"}
    assert reply.openai_body()["error"]["code"] == error.code
    assert reply.anthropic_body("req-1")["type"] == "error"
    assert reply.anthropic_body("req-1")["error"]["message"] == "what happened"
    headers = reply.headers()
    assert ("retry-after" in headers) == reply.rule.can_retry
    assert ("x-should-retry" in headers) == (not reply.rule.can_retry)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (InvalidRequestError, 400),
        (ContextLengthExceededError, 400),
        (AuthenticationError, 401),
        (ModelUnknownError, 404),
        (RequestNotFoundError, 404),
        (OverloadedError, 429),
        (RowFailedError, 500),
        (EngineUnavailableError, 503),
        (EngineDiedError, 503),
        (RequestTimeoutError, 504),
    ],
)
def test_statuses_are_those_that_clients_know(error: type[VllmMlxError], status: int) -> None:
    """Clients pick their exception by the status."""
    assert reply_to(error("x")).rule.status == status


def test_retry_after_is_whole_seconds_and_never_zero() -> None:
    """The header is rounded up."""
    assert reply_to(OverloadedError("x", retry_after_s=1.2)).headers()["retry-after"] == "2"
    assert reply_to(OverloadedError("x", retry_after_s=0.0)).headers()["retry-after"] == "1"


def test_the_field_at_fault_is_named() -> None:
    """`param` travels into the body."""
    body = reply_to(InvalidRequestError("x", param="messages[0].role")).openai_body()
    assert body["error"]["param"] == "messages[0].role"


def test_faults_of_http_itself_have_the_same_shape() -> None:
    """An unknown route is told as any other error."""
    error = reply_to_http_fault(404, "no such route").openai_body()["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "unknown_url")
    assert reply_to_http_fault(500, "x").openai_body()["error"]["type"] == "server_error"


def test_a_defect_of_ours_says_nothing_of_its_inside() -> None:
    """Only the id leads from the answer to the log."""
    assert "req-1" in internal_reply("req-1").message
