"""The outermost ASGI layer: gives each request its id, closes what it opened, logs how it ended."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from vllm_mlx.server.request_context import SCOPE_KEY, RequestContext, new_request_id
from vllm_mlx.server.request_log import log_request
from vllm_mlx.server.request_record import RequestRecords

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
AsgiApp = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

_ID_HEADERS = (b"x-request-id", b"request-id")

#: How long an answer that needs no body waits for the end of the body.
_LATE_BODY_S = 0.1

#: How long an application gets to end after its client has left, before it is cancelled once more.
_INSIST_S = 0.25

#: What log and metrics call a client that left before its answer was complete.
CLIENT_CLOSED_REQUEST = 499

#: What the metrics call all paths that are no route's.
UNMATCHED_ROUTE = "unmatched"


class RequestLifecycle:
    """Wrap an ASGI application so that no request is nameless, leaks or ends unlogged.

    The wrapper and not the handler closes what a request opened: a client may leave between the
    handler's return and the first chunk, when no generator's `finally` has been entered yet.
    """

    def __init__(
        self,
        app: AsgiApp,
        records: RequestRecords,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._app = app
        self._records = records
        self._clock = clock

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Serve one connection scope; there is nothing here for those that are not HTTP."""
        if scope["type"] == "websocket":
            # Before it is accepted, the handshake is answered with 403.
            await send({"type": "websocket.close"})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        context = RequestContext(new_request_id(scope["path"]))
        context.record = self._records.open(context.id)
        scope[SCOPE_KEY] = context
        is_http1 = scope.get("http_version", "1.1").startswith("1")
        exchange = _Exchange(context, receive, send, is_http1=is_http1)
        started = self._clock()
        try:
            async with context.closing:
                await self._answer(scope, exchange)
        finally:
            self._end(scope, context, exchange.outcome(), self._clock() - started)

    def _end(
        self,
        scope: MutableMapping[str, Any],
        context: RequestContext,
        status: int,
        seconds: float,
    ) -> None:
        """Count and log a request that is over."""
        outcome = self._records.close(
            context.id,
            route=context.route or UNMATCHED_ROUTE,
            method=scope["method"],
            status=status,
            error_code=context.error_code,
        )
        log_request(scope, context, status=status, seconds=seconds, outcome=outcome)

    async def _answer(self, scope: MutableMapping[str, Any], exchange: _Exchange) -> None:
        """Run the application, and see to it that it ends when the client has left.

        It is cancelled by its framework then, once; and Python 3.11's `wait_for` swallows a
        cancellation that comes together with what was waited for, here the request's body.
        """
        task = asyncio.current_task()
        assert task is not None
        num_cancels = 0

        async def insist() -> None:
            nonlocal num_cancels
            await exchange.client_left.wait()
            while True:
                await asyncio.sleep(_INSIST_S)
                num_cancels += 1
                task.cancel()

        insisting = asyncio.create_task(insist(), name="insist")
        try:
            await self._app(scope, exchange.receive, exchange.send)
        except asyncio.CancelledError:
            for _ in range(num_cancels):
                task.uncancel()
            if not num_cancels or task.cancelling():
                raise
        finally:
            insisting.cancel()


class _Exchange:
    """Watch one request's messages: mark the response, and see who ended it."""

    def __init__(
        self, context: RequestContext, receive: Receive, send: Send, *, is_http1: bool
    ) -> None:
        self._context = context
        self._is_http1 = is_http1
        self._body_ended = asyncio.Event()
        self._receive = receive
        self._send = send
        self._status: int | None = None
        self._is_complete = False
        self.client_left = asyncio.Event()

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.disconnect" and not self._is_complete:
            self.client_left.set()
        if message["type"] != "http.request" or not message.get("more_body", False):
            self._body_ended.set()
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            headers = [*message.get("headers", ())]
            # By OpenAI's name and by Anthropic's: each one's clients look for their own.
            headers += [(name, self._context.id.encode()) for name in _ID_HEADERS]
            if self._context.ignored_fields:
                names = ", ".join(self._context.ignored_fields)
                headers.append((b"x-ignored-fields", names.encode("ascii")))
            if self._is_http1 and not await self._is_body_read():
                headers.append((b"connection", b"close"))
            message = {**message, "headers": headers}
        elif message["type"] == "http.response.body" and not message.get("more_body", False):
            self._is_complete = True
        await self._send(message)

    async def _is_body_read(self) -> bool:
        """Say whether all of the request's body is here, after waiting for it a moment.

        Who is refused early may still be sending. The connection cannot be used again then, and
        is closed: a client that is not told sends its next request into it, and loses that.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LATE_BODY_S):
                await self._body_ended.wait()
        return self._body_ended.is_set()

    def outcome(self) -> int:
        """Return the status to log."""
        if self.client_left.is_set() and not self._is_complete:
            return CLIENT_CLOSED_REQUEST
        return self._status if self._status is not None else 500
