"""The one exception tree of the project; HTTP statuses and exit codes are mapped from it elsewhere.

VllmMlxError
├── UsageError                  the command line or a configuration is wrong
├── ModelLoadError              the model cannot be loaded
│   ├── BackendMissingError     no MLX backend on this machine
│   ├── ModelNotFoundError      no such path or repository
│   ├── HubUnreachableError     not on disk, and the hub does not answer
│   ├── UnsupportedModelError   its architecture or cache kind is not served
│   └── InsufficientMemoryError the weights do not fit
├── CacheError                  a stored prefix cache is unusable or damaged
│   ├── CacheDamagedError       a stored file is torn, cut off or has rotten bits
│   └── CacheVersionError       a stored file is of another format version
├── UnreachableError            a server cannot be reached or measured
└── RequestError                ends one request, and only that one
    ├── InvalidRequestError     a field is wrong; names it
    │   ├── ContextLengthExceededError   the prompt alone is over the context
    │   ├── FileTooLargeError            a file of too many bytes, or too much in it
    │   └── RequestTooLargeError         can never fit in the KV budget
    ├── ModelUnknownError       no such served model
    ├── AuthenticationError     key missing or wrong
    ├── HostNotAllowedError     sent to a name that this server does not go by
    ├── HeadersTooLargeError    more header than is read
    ├── RequestNotFoundError    no open request has this id
    ├── OverloadedError         the queue is full; try again later
    ├── OutOfMemoryError        the machine is short of memory; try again later
    ├── RateLimitedError        this client asks too often; try again later
    ├── EngineUnavailableError  loading, restarting or draining; try again later
    ├── EngineDiedError         the engine process ended while it held the request
    ├── RequestTimeoutError     no progress for too long
    ├── RequestAbortedError     cancelled by the client or by shutdown
    └── RowFailedError          computing this row raised
"""

from __future__ import annotations


class VllmMlxError(Exception):
    """Base of every error that the project raises on purpose."""

    #: Stable machine-readable name, the `code` of an error body.
    code = "internal_error"

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class UsageError(VllmMlxError):
    """Reject a command line or configuration."""

    code = "usage"


class ModelLoadError(VllmMlxError):
    """Report that a model cannot be loaded."""

    code = "model_load_failed"


class BackendMissingError(ModelLoadError):
    """Report that MLX has no backend on this machine."""

    code = "backend_missing"


class ModelNotFoundError(ModelLoadError):
    """Report a model path or repository that does not exist."""

    code = "model_files_not_found"


class HubUnreachableError(ModelLoadError):
    """Report that a model is not on disk and the hub does not answer."""

    code = "hub_unreachable"


class UnsupportedModelError(ModelLoadError):
    """Report an architecture or cache kind that the engine does not serve."""

    code = "model_unsupported"


class InsufficientMemoryError(ModelLoadError):
    """Report that weights or the smallest useful KV budget do not fit."""

    code = "insufficient_memory"


class CacheError(VllmMlxError):
    """Report an unusable or damaged prefix store."""

    code = "cache_unusable"


class CacheDamagedError(CacheError):
    """Report a stored file that is torn, cut off or has rotten bits."""

    code = "cache_damaged"


class CacheVersionError(CacheError):
    """Report a whole stored file of another format version."""

    code = "cache_version"


class UnreachableError(VllmMlxError):
    """Report a server that cannot be reached or measured."""

    code = "unreachable"


class RequestError(VllmMlxError):
    """End one request with an error; every other request goes on.

    `param` names the request field at fault, `retry_after_s` says when a retry may succeed.
    """

    code = "request_failed"

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.param = param
        self.retry_after_s = retry_after_s


class InvalidRequestError(RequestError):
    """Refuse a request whose field `param` is wrong."""

    code = "invalid_value"


class ContextLengthExceededError(InvalidRequestError):
    """Refuse a prompt that alone is longer than the context."""

    code = "context_length_exceeded"


class FileTooLargeError(InvalidRequestError):
    """Refuse a file of too many bytes, or with more in it than is worked on."""

    code = "file_too_large"


class RequestTooLargeError(InvalidRequestError):
    """Refuse a request that can never fit in the KV budget."""

    code = "request_too_large"


class ModelUnknownError(RequestError):
    """Refuse a model name that this server does not serve."""

    code = "model_not_found"


class AuthenticationError(RequestError):
    """Refuse a missing or wrong API key."""

    code = "invalid_api_key"


class HostNotAllowedError(RequestError):
    """Refuse a request that was sent to a name which this server does not go by."""

    code = "host_not_allowed"


class HeadersTooLargeError(RequestError):
    """Refuse a request with more header than is read."""

    code = "request_headers_too_large"


class RequestNotFoundError(RequestError):
    """Report that no open request, and no stored response or item, has the given id."""

    code = "request_not_found"


class OverloadedError(RequestError):
    """Refuse a request because the queue is full."""

    code = "queue_full"


class OutOfMemoryError(RequestError):
    """Refuse a request because the machine is short of memory."""

    code = "out_of_memory"


class RateLimitedError(RequestError):
    """Refuse a request of a client that asks too often."""

    code = "rate_limit_exceeded"


class EngineUnavailableError(RequestError):
    """Refuse a request because the engine is loading, restarting or draining."""

    code = "engine_unavailable"


class EngineDiedError(RequestError):
    """End a request whose engine process died."""

    code = "engine_died"


class RequestTimeoutError(RequestError):
    """End a request that made no progress for too long."""

    code = "timeout"


class RequestAbortedError(RequestError):
    """End a request cancelled by its client or by shutdown."""

    code = "aborted"


class RowFailedError(RequestError):
    """End a request whose own computation raised."""

    code = "row_failed"


def error_classes() -> dict[str, type[VllmMlxError]]:
    """Return every class of the tree by its `code`."""
    found: dict[str, type[VllmMlxError]] = {}
    pending: list[type[VllmMlxError]] = [VllmMlxError]
    while pending:
        cls = pending.pop()
        found[cls.code] = cls
        pending.extend(cls.__subclasses__())
    return found
