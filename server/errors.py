"""Map the error tree to HTTP: status, headers and each API's own error body, in one place."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm_mlx.engine.errors import (
    AuthenticationError,
    BackendMissingError,
    CacheDamagedError,
    CacheError,
    CacheVersionError,
    ContextLengthExceededError,
    EngineDiedError,
    EngineUnavailableError,
    FileTooLargeError,
    HeadersTooLargeError,
    HostNotAllowedError,
    HubUnreachableError,
    InsufficientMemoryError,
    InvalidRequestError,
    ModelLoadError,
    ModelNotFoundError,
    ModelUnknownError,
    OutOfMemoryError,
    OverloadedError,
    RateLimitedError,
    RequestAbortedError,
    RequestError,
    RequestNotFoundError,
    RequestTimeoutError,
    RequestTooLargeError,
    RowFailedError,
    UnreachableError,
    UnsupportedModelError,
    UsageError,
    VllmMlxError,
)


@dataclass(frozen=True)
class ErrorRule:
    """Say how one class of the tree looks over HTTP.

    `can_retry` is false where the same request would only fail again; clients that retry by status
    are then told not to.
    """

    status: int
    openai_type: str
    anthropic_type: str
    can_retry: bool = False


_INTERNAL = ErrorRule(500, "server_error", "api_error")
_NOT_LOADED = ErrorRule(503, "server_error", "api_error")
_UNAVAILABLE = ErrorRule(503, "server_error", "overloaded_error", can_retry=True)
_INVALID = ErrorRule(400, "invalid_request_error", "invalid_request_error")
_TOO_MANY = ErrorRule(429, "rate_limit_error", "rate_limit_error", can_retry=True)
_NOT_FOUND = ErrorRule(404, "invalid_request_error", "not_found_error")

#: Every class has its own entry: nothing new is mapped by accident of its parent.
RULES: Mapping[type[VllmMlxError], ErrorRule] = {
    VllmMlxError: _INTERNAL,
    UsageError: _INTERNAL,
    ModelLoadError: _NOT_LOADED,
    BackendMissingError: _NOT_LOADED,
    ModelNotFoundError: _NOT_LOADED,
    HubUnreachableError: _NOT_LOADED,
    UnsupportedModelError: _NOT_LOADED,
    InsufficientMemoryError: _NOT_LOADED,
    CacheError: _INTERNAL,
    CacheDamagedError: _INTERNAL,
    CacheVersionError: _INTERNAL,
    UnreachableError: ErrorRule(502, "server_error", "api_error", can_retry=True),
    RequestError: _INTERNAL,
    InvalidRequestError: _INVALID,
    ContextLengthExceededError: _INVALID,
    RequestTooLargeError: _INVALID,
    FileTooLargeError: ErrorRule(413, "invalid_request_error", "request_too_large"),
    ModelUnknownError: _NOT_FOUND,
    AuthenticationError: ErrorRule(401, "invalid_request_error", "authentication_error"),
    HostNotAllowedError: ErrorRule(403, "invalid_request_error", "permission_error"),
    HeadersTooLargeError: ErrorRule(431, "invalid_request_error", "invalid_request_error"),
    RequestNotFoundError: _NOT_FOUND,
    OverloadedError: _TOO_MANY,
    OutOfMemoryError: _UNAVAILABLE,
    RateLimitedError: _TOO_MANY,
    EngineUnavailableError: _UNAVAILABLE,
    EngineDiedError: _UNAVAILABLE,
    RequestTimeoutError: ErrorRule(504, "server_error", "timeout_error"),
    RequestAbortedError: _UNAVAILABLE,
    RowFailedError: _INTERNAL,
}

#: Names of HTTP's own faults in OpenAI's and Anthropic's words; others go by their class of status.
HTTP_FAULTS: Mapping[int, tuple[str, str]] = {
    404: ("unknown_url", "not_found_error"),
    405: ("method_not_allowed", "invalid_request_error"),
    408: ("body_timeout", "timeout_error"),
    413: ("request_body_too_large", "request_too_large"),
}


@dataclass(frozen=True)
class ErrorReply:
    """Hold everything that an error answer needs, whichever API it is written for.

    `extra` is added to the error object: load progress, sizes.
    """

    rule: ErrorRule
    message: str
    code: str
    param: str | None = None
    retry_after_s: float | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    def openai_body(self) -> dict[str, Any]:
        """Return the body that OpenAI's clients read."""
        error = {
            "message": self.message,
            "type": self.rule.openai_type,
            "param": self.param,
            "code": self.code,
        }
        return {"error": error | dict(self.extra)}

    def anthropic_body(self, request_id: str) -> dict[str, Any]:
        """Return the body that Anthropic's clients read."""
        error = {"type": self.rule.anthropic_type, "message": self.message}
        return {"type": "error", "error": error | dict(self.extra), "request_id": request_id}

    def headers(self) -> dict[str, str]:
        """Return the headers that tell a client whether and when to try again."""
        headers: dict[str, str] = {}
        if self.rule.can_retry and self.retry_after_s is not None:
            headers["retry-after"] = str(retry_after_header(self.retry_after_s))
        if not self.rule.can_retry:
            headers["x-should-retry"] = "false"
        if self.rule.status == 401:
            headers["www-authenticate"] = "Bearer"
        return headers


def retry_after_header(seconds: float) -> int:
    """Round up to the whole seconds, at least one, that the header carries."""
    return max(1, math.ceil(seconds))


def reply_to(error: VllmMlxError, extra: Mapping[str, Any] | None = None) -> ErrorReply:
    """Describe an error of the tree; one that may be retried always says when."""
    rule = RULES[type(error)]
    param = retry_after_s = None
    if isinstance(error, RequestError):
        param, retry_after_s = error.param, error.retry_after_s
    if rule.can_retry and retry_after_s is None:
        retry_after_s = 1.0
    return ErrorReply(rule, error.message, error.code, param, retry_after_s, extra or {})


def reply_to_http_fault(status: int, message: str) -> ErrorReply:
    """Describe a fault of HTTP itself: an unknown route, a wrong method, a body too large."""
    is_clients = status < 500
    code, anthropic_type = HTTP_FAULTS.get(
        status,
        ("bad_request", "invalid_request_error") if is_clients else ("internal_error", "api_error"),
    )
    openai_type = "invalid_request_error" if is_clients else "server_error"
    return ErrorReply(ErrorRule(status, openai_type, anthropic_type), message, code)


def internal_reply(request_id: str) -> ErrorReply:
    """Describe a fault of ours, without its inner workings; the log has them under this id."""
    message = f"internal error; the server's log has it under request {request_id}"
    return ErrorReply(_INTERNAL, message, VllmMlxError.code)
