"""Hold the HTTP backend of `chat` against a real socket."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from vllm_mlx.cli.chat_backends import AnswerDelta, ChatSampling, Usage
from vllm_mlx.cli.chat_http import HttpBackend, base_url, event_data, open_http_backend
from vllm_mlx.cli.chat_session import Message
from vllm_mlx.engine.errors import (
    AuthenticationError,
    ContextLengthExceededError,
    EngineDiedError,
    EngineUnavailableError,
    InvalidRequestError,
    OverloadedError,
    UnreachableError,
    UsageError,
    VllmMlxError,
)

if TYPE_CHECKING:
    from tests.cli.conftest import ScriptedServer

QUESTION = [Message("system", "Be brief."), Message("user", "Hi")]


def connect(server: ScriptedServer, **options: Any) -> HttpBackend:
    """Return a backend of `server`, with a name and waits that take no time."""
    settings: dict[str, Any] = {
        "model": None,
        "api_key": None,
        "timeout_s": 5.0,
        "on_wait": lambda stage, fraction: None,
        "sleep": lambda seconds: None,
    }
    return open_http_backend(server.url, **{**settings, **options})


@pytest.fixture
def backend(server: ScriptedServer) -> Iterator[HttpBackend]:
    """Give a backend of the scripted server."""
    with contextlib.closing(connect(server)) as opened:
        yield opened


def test_an_answer_streams(server: ScriptedServer, backend: HttpBackend) -> None:
    """Deltas come as the server sends them; the last has the reason and the usage."""
    # U+2028 and U+0085 end lines for Python, and not for the protocol.
    server.words = ["a", "\u2028b", "c\x85", "\n"]
    deltas = list(backend.answer(QUESTION, ChatSampling()))
    assert deltas[:-1] == [AnswerDelta(text=word) for word in server.words]
    usage = Usage(prompt_tokens=7, completion_tokens=4)
    assert deltas[-1] == AnswerDelta(finish_reason="stop", usage=usage)


def test_the_request_carries_what_was_asked_and_no_more(
    server: ScriptedServer, backend: HttpBackend
) -> None:
    """Values that were left open are the server's to choose."""
    list(backend.answer(QUESTION, ChatSampling()))
    sampling = ChatSampling(temperature=0.0, top_k=5, seed=1, max_tokens=9, stop=("x", "y"))
    list(backend.answer(QUESTION, sampling))
    common = {
        "model": "scripted-model",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hi"},
        ],
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    wanted = {"temperature": 0.0, "top_k": 5, "seed": 1, "max_tokens": 9, "stop": ["x", "y"]}
    assert server.requests == [{**common, "max_tokens": 4096}, {**common, **wanted}]


def test_closing_the_answer_closes_the_stream(server: ScriptedServer, backend: HttpBackend) -> None:
    """An answer that is left early ends on the server, and the next question works."""
    server.words = ["word"] * 500
    server.delay_s = 0.005
    deltas = backend.answer(QUESTION, ChatSampling())
    assert next(deltas).text == "word"
    deltas.close()
    server.words = ["next"]
    assert [delta.text for delta in backend.answer(QUESTION, ChatSampling())] == ["next", ""]
    assert server.disconnected.wait(5)


def test_the_key_is_sent(server: ScriptedServer) -> None:
    """The right key opens, and a wrong one says which option to use."""
    server.api_key = "secret"
    with contextlib.closing(connect(server, api_key="secret")) as backend:
        assert len(list(backend.answer(QUESTION, ChatSampling()))) == 6
    with (
        contextlib.closing(connect(server, api_key="wrong")) as backend,
        pytest.raises(AuthenticationError, match=r"wrong key .*--api-key"),
    ):
        next(backend.answer(QUESTION, ChatSampling()))


@pytest.mark.parametrize(
    ("status", "error", "expected"),
    [
        (400, {"message": "bad", "code": None}, InvalidRequestError),
        (400, {"message": "long", "code": "context_length_exceeded"}, ContextLengthExceededError),
        (429, {"message": "full", "code": "queue_full"}, OverloadedError),
        (500, {"message": "broken"}, UnreachableError),
        (503, "text", EngineUnavailableError),
    ],
)
def test_refusals_become_errors_of_the_tree(
    server: ScriptedServer,
    backend: HttpBackend,
    status: int,
    error: object,
    expected: type[VllmMlxError],
) -> None:
    """The body's code decides, else the status."""
    server.failure = (status, {"error": error})
    with pytest.raises(expected) as caught:
        next(backend.answer(QUESTION, ChatSampling()))
    assert type(caught.value) is expected
    assert caught.value.message == (error if isinstance(error, str) else error["message"])  # type: ignore[index]


def test_an_error_in_the_middle_of_a_stream(server: ScriptedServer, backend: HttpBackend) -> None:
    """An error event ends the answer with that error, after the text that came before."""
    server.words = ["some"]
    server.error_event = {"error": {"message": "it died", "code": "engine_died"}}
    deltas = backend.answer(QUESTION, ChatSampling())
    assert next(deltas).text == "some"
    with pytest.raises(EngineDiedError, match="it died"):
        next(deltas)


def test_a_stream_without_an_end_is_an_error(server: ScriptedServer, backend: HttpBackend) -> None:
    """An answer that stops in the middle is not taken for a whole one."""
    server.is_cut_short = True
    with pytest.raises(UnreachableError, match="ended the stream too early"):
        list(backend.answer(QUESTION, ChatSampling()))


def test_a_server_that_loads_is_waited_for(server: ScriptedServer) -> None:
    """503 is asked again after the time that the server names, and shown meanwhile."""
    loading = {"error": {"message": "loading weights 40%", "code": "engine_unavailable"}}
    server.refusals = [(503, {"retry-after": "2"}, loading)] * 2
    shown: list[str] = []
    slept: list[float] = []
    backend = connect(
        server, on_wait=lambda stage, fraction: shown.append(stage), sleep=slept.append
    )
    backend.close()
    assert shown == ["the server is not ready: loading weights 40%"] * 2
    assert slept == [2.0, 2.0]


def test_waiting_has_an_end(server: ScriptedServer) -> None:
    """A server that never gets ready is an error once the timeout is over."""
    loading = {"error": {"message": "loading", "code": "engine_unavailable"}}
    server.refusals = [(503, {}, loading)] * 1000
    clock = iter([0.0, 1.0, 4.9, 5.0]).__next__
    with pytest.raises(EngineUnavailableError, match="loading"):
        connect(server, timeout_s=5.0, clock=clock)
    assert len(server.refusals) == 997


def test_a_server_that_says_nothing_is_given_up(
    server: ScriptedServer, backend: HttpBackend
) -> None:
    """Silence beyond the timeout names the option that allows more."""
    server.delay_s = 1.0
    with (
        contextlib.closing(connect(server, timeout_s=0.2)) as impatient,
        pytest.raises(UnreachableError, match="--timeout"),
    ):
        list(impatient.answer(QUESTION, ChatSampling()))


def test_a_given_name_is_used(server: ScriptedServer) -> None:
    """MODEL beside --url is the name that requests carry."""
    with contextlib.closing(connect(server, model="mine")) as backend:
        assert backend.model_name == "mine"


def test_a_server_without_a_list_of_models_is_asked_for_its_default(
    server: ScriptedServer,
) -> None:
    """Where `/v1/models` is missing, whatever is loaded answers."""
    server.refusals = [(404, {}, {"detail": "not found"})]
    with contextlib.closing(connect(server)) as backend:
        assert backend.model_name == "default"


def test_something_else_that_speaks_http(server: ScriptedServer) -> None:
    """A web server of another kind is said to be one."""
    server.refusals = [(200, {}, {"hello": "world"})]
    with pytest.raises(UnreachableError, match="does not answer as an OpenAI server"):
        connect(server)


@pytest.mark.parametrize(
    "given",
    ["http://host:1", "http://host:1/", "host:1", "http://host:1/v1", "http://host:1/v1/"],
)
def test_addresses_may_be_written_in_many_ways(given: str) -> None:
    """The address of the server or of its `/v1`, with or without a slash or a scheme."""
    assert base_url(given) == "http://host:1/v1"


@pytest.mark.parametrize("given", ["", "ftp://host", "http://", "http://host:port", "http://[::"])
def test_what_is_no_address_is_refused(given: str) -> None:
    """A wrong address is a usage error."""
    with pytest.raises(UsageError, match="not a server's address"):
        base_url(given)


def test_events_do_not_depend_on_how_the_bytes_were_cut() -> None:
    """One byte at a time or all at once: the same events."""
    stream = b': note\n\ndata: {"a":1}\r\n\r\nevent: x\ndata:one\ndata: two\n\ndata: [DONE]\n\n'
    expected = [b'{"a":1}', b"one\ntwo", b"[DONE]"]
    assert list(event_data([stream])) == expected
    assert list(event_data(stream[i : i + 1] for i in range(len(stream)))) == expected
