"""The chat backend that asks a running server over the OpenAI protocol."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any
from urllib.parse import urlsplit

import httpx

from vllm_mlx.cli.chat_backends import AnswerDelta, ChatSampling, Usage
from vllm_mlx.cli.chat_session import Message
from vllm_mlx.engine.errors import (
    AuthenticationError,
    EngineUnavailableError,
    InvalidRequestError,
    ModelUnknownError,
    OverloadedError,
    RequestError,
    UnreachableError,
    UsageError,
    VllmMlxError,
    error_classes,
)

CONNECT_TIMEOUT_S = 5.0
#: The name that stands for whichever model a vllm-mlx server has loaded.
ANY_MODEL = "default"

ERRORS_BY_STATUS: dict[int, type[RequestError]] = {
    400: InvalidRequestError,
    401: AuthenticationError,
    403: AuthenticationError,
    404: ModelUnknownError,
    422: InvalidRequestError,
    429: OverloadedError,
    503: EngineUnavailableError,
}


def base_url(url: str) -> str:
    """Return the address of the server's `/v1`, whichever way the user wrote it.

    Raises `UsageError` for what is not an HTTP address.
    """
    text = url if "://" in url else f"http://{url}"
    try:
        parts = urlsplit(text)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname)
        valid = valid and (parts.port is None or parts.port > 0)
    except ValueError:
        valid = False
    if not valid:
        raise UsageError(f"'{url}' is not a server's address; write it as http://host:port")
    trimmed = text.rstrip("/")
    return trimmed if trimmed.endswith("/v1") else f"{trimmed}/v1"


class HttpBackend:
    """Ask one server; owns the connection to it. Made by `open_http_backend`."""

    def __init__(self, client: httpx.Client, url: str, model_name: str) -> None:
        self._client = client
        self._url = url
        self._model_name = model_name

    @property
    def model_name(self) -> str:
        """Return the name that requests carry."""
        return self._model_name

    def answer(
        self, messages: Sequence[Message], sampling: ChatSampling
    ) -> Generator[AnswerDelta, None, None]:
        """Yield the answer as it streams in; closing the generator closes the stream.

        Raises the server's own error where its body names one, `UnreachableError` otherwise.
        """
        body = request_body(self._model_name, messages, sampling)
        usage: Usage | None = None
        finish_reason: str | None = None
        with (
            connection_errors(self._url),
            self._client.stream("POST", f"{self._url}/chat/completions", json=body) as response,
        ):
            if response.status_code != httpx.codes.OK:
                response.read()
                raise error_of(response, self._url)
            for chunk in chunks(response.iter_bytes(), self._url):
                usage = usage_of(chunk) or usage
                choice: dict[str, Any] = next(iter(chunk.get("choices") or ()), {})
                finish_reason = choice.get("finish_reason") or finish_reason
                text = (choice.get("delta") or {}).get("content") or ""
                if text:
                    yield AnswerDelta(text=text, usage=usage)
        if finish_reason is None:
            raise UnreachableError(f"the server at {self._url} ended the stream too early")
        yield AnswerDelta(finish_reason=finish_reason, usage=usage)

    def close(self) -> None:
        """Close the connection."""
        self._client.close()


def open_http_backend(
    url: str,
    *,
    model: str | None,
    api_key: str | None,
    timeout_s: float,
    on_wait: Callable[[str, float | None], None],
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> HttpBackend:
    """Connect to the server at `url`, wait while it loads, and pick the model.

    Without `model`, a server that names one is asked for that one. `on_wait` gets a line while
    the server is loading. Raises `UnreachableError`, or the error that the server answers with.
    """
    root = base_url(url)
    # A proxy from the environment cannot reach this very machine.
    is_local = urlsplit(root).hostname in ("localhost", "127.0.0.1", "::1")
    client = httpx.Client(
        headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
        timeout=httpx.Timeout(timeout_s, connect=CONNECT_TIMEOUT_S),
        trust_env=not is_local,
    )
    try:
        deadline = clock() + timeout_s
        names = served_models(client, root, on_wait, sleep, lambda: clock() >= deadline)
    except BaseException:
        client.close()
        raise
    return HttpBackend(client, root, model or next(iter(names), ANY_MODEL))


def served_models(
    client: httpx.Client,
    url: str,
    on_wait: Callable[[str, float | None], None],
    sleep: Callable[[float], None],
    is_too_late: Callable[[], bool],
) -> list[str]:
    """Return the names of the server's models, waiting until it `is_too_late` while it loads."""
    while True:
        with connection_errors(url):
            response = client.get(f"{url}/models")
        if response.status_code == httpx.codes.NOT_FOUND:
            return []
        if response.status_code == httpx.codes.OK:
            break
        error = error_of(response, url)
        if not isinstance(error, EngineUnavailableError) or is_too_late():
            raise error
        on_wait(f"the server is not ready: {error.message}", None)
        sleep(min(error.retry_after_s or 1.0, 5.0))
    try:
        return [str(entry["id"]) for entry in response.json()["data"]]
    except (ValueError, KeyError, TypeError) as error:
        raise UnreachableError(f"{url}/models does not answer as an OpenAI server does") from error


def request_body(model: str, messages: Sequence[Message], sampling: ChatSampling) -> dict[str, Any]:
    """Return the body of a streamed chat completion; values left open are left out."""
    wanted = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "seed": sampling.seed,
        "stop": list(sampling.stop) or None,
    }
    return {
        "model": model,
        "messages": [{"role": m.role, "content": m.content} for m in messages],
        "max_tokens": sampling.max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
        **{name: value for name, value in wanted.items() if value is not None},
    }


def chunks(blocks: Iterable[bytes], url: str) -> Iterator[dict[str, Any]]:
    """Yield the JSON of every event up to `[DONE]`; raise the error that an event carries."""
    for data in event_data(blocks):
        if data.startswith(b"[DONE]"):
            return
        try:
            chunk = json.loads(data)
        except ValueError as error:
            raise UnreachableError(f"{url} sent an event that is not JSON") from error
        if not isinstance(chunk, dict):
            raise UnreachableError(f"{url} sent an event that is not a completion chunk")
        if chunk.get("error"):
            raise error_from(chunk["error"], UnreachableError)
        yield chunk


def event_data(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the data of server-sent events, however the bytes were cut.

    Lines end at `\\n` only: JSON may hold U+2028 and others that `str.splitlines` cuts at.
    """
    pending = b""
    data: list[bytes] = []
    for block in blocks:
        *lines, pending = (pending + block).split(b"\n")
        for line in lines:
            field = line.rstrip(b"\r")
            if field.startswith(b"data:"):
                data.append(field[5:].removeprefix(b" "))
            elif not field and data:
                yield b"\n".join(data)
                data = []
    if data:
        yield b"\n".join(data)


def usage_of(chunk: dict[str, Any]) -> Usage | None:
    """Return the token counts of a chunk, None if it has none."""
    usage = chunk.get("usage")
    if not isinstance(usage, dict):
        return None
    return Usage(
        prompt_tokens=int(usage.get("prompt_tokens") or 0),
        completion_tokens=int(usage.get("completion_tokens") or 0),
        cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
    )


def error_of(response: httpx.Response, url: str) -> VllmMlxError:
    """Return the error that a refusing response means; its body must have been read."""
    status = response.status_code
    kind = ERRORS_BY_STATUS.get(status, UnreachableError)
    try:
        body = response.json()["error"]
    except (ValueError, KeyError, TypeError):
        body = f"the server at {url} answered {status} {response.reason_phrase}".rstrip()
    error = error_from(body, kind)
    if isinstance(error, RequestError) and error.retry_after_s is None:
        with contextlib.suppress(ValueError):
            error.retry_after_s = float(response.headers.get("retry-after", ""))
    if isinstance(error, AuthenticationError):
        return AuthenticationError(
            f"{error.message} (give the server's key with --api-key or VLLM_MLX_API_KEY)"
        )
    return error


def error_from(body: object, fallback: type[VllmMlxError]) -> VllmMlxError:
    """Return the error that an `error` object names by its code, else one of class `fallback`."""
    fields = body if isinstance(body, dict) else {"message": body}
    message = str(fields.get("message") or "the server gave no reason")
    kind = error_classes().get(str(fields.get("code")), fallback)
    return kind(message)


@contextlib.contextmanager
def connection_errors(url: str) -> Iterator[None]:
    """Turn httpx's errors into `UnreachableError` with what to do."""
    try:
        yield
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        raise UnreachableError(
            f"no server answers at {url}; start one with 'vllm-mlx serve', or check --url"
        ) from error
    except httpx.TimeoutException as error:
        raise UnreachableError(
            f"the server at {url} sent nothing for too long; allow more with --timeout"
        ) from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise UnreachableError(f"lost the server at {url}: {error}") from error
