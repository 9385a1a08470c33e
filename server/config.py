"""The frozen configuration of the HTTP server; cheap to import, so that `--help` stays fast."""

from __future__ import annotations

import msgspec

from vllm_mlx.engine.errors import UsageError

#: Where sampling starts when neither the request, a flag nor the model says.
FALLBACK_TEMPERATURE = 0.7
FALLBACK_TOP_P = 0.9

#: What defaults may be, as a request may say.
_RANGES = {
    "temperature": (0, 2),
    "min_p": (0, 1),
    "repetition_penalty": (0.01, 100),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
}


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Say how one HTTP server listens, guards and limits; immutable for its life.

    Raises `UsageError` for a value that cannot work.
    """

    host: str = "127.0.0.1"
    #: 0 lets the system pick a free port.
    port: int = 8000
    #: Written as JSON (url, host, port, pid, model) once the model answers, removed at exit.
    ready_file: str | None = None
    #: Any of them opens every route but liveness, readiness and metrics; empty asks for none.
    api_keys: tuple[str, ...] = ()
    #: Requests a minute of one client (API key, or else address); 0 does not limit.
    rate_limit: int = 0
    #: Names that requests may be sent to; empty means every one, but for a server on a loopback
    #: address, which goes by its own only.
    allowed_hosts: tuple[str, ...] = ()
    #: Origins whose pages may read the answers, `*` for all; empty sends no CORS headers.
    allowed_origins: tuple[str, ...] = ()
    #: Seconds that a request may go without progress, its time in the queue included.
    timeout_s: float = 300.0
    #: Tokens to generate when a request does not say.
    default_max_tokens: int = 32768
    #: Most tokens that a request may ask for.
    max_request_tokens: int = 32768
    #: None falls back to the model's own default, then to `FALLBACK_TEMPERATURE`.
    default_temperature: float | None = None
    #: None falls back to the model's own default, then to `FALLBACK_TOP_P`.
    default_top_p: float | None = None
    #: None falls back to the model's own defaults, then to what changes nothing.
    default_top_k: int | None = None
    default_min_p: float | None = None
    default_repetition_penalty: float | None = None
    default_presence_penalty: float | None = None
    default_frequency_penalty: float | None = None
    #: Tokens gathered in one streamed chunk.
    stream_interval: int = 1
    #: Most prompts that wait for a row; one more is refused with 429.
    max_queue: int = 256
    #: Most prompt tokens that wait for their answer to begin; more are refused with 429.
    max_queue_tokens: int = 1_000_000
    #: The name that clients see; None shows the model as the user gave it.
    served_model_name: str | None = None
    #: Further names, and the one that each stands for; `*` in a name stands for anything.
    model_aliases: tuple[tuple[str, str], ...] = ()
    #: Take lines that change with each request out of system text on the Messages routes.
    normalize_prompts: bool = True
    #: Seconds that running requests get to finish after a signal.
    drain_timeout_s: float = 10.0
    #: Seconds without a token after which a stream gets a comment line.
    keep_alive_s: float = 10.0
    #: Largest request body.
    max_body_bytes: int = 32 * 1024 * 1024
    #: Most bytes of names and values of one request's headers.
    max_header_bytes: int = 32 * 1024
    #: Prompts whose prefixes are computed in the background once the model answers.
    warm_prompts: str | None = None
    #: Folder that accepted requests are written to; None records nothing.
    record_dir: str | None = None
    #: Answer `/metrics`.
    metrics: bool = False
    #: Log what requests ask.
    log_prompts: bool = False
    #: Threads that render templates and tokenize, each with a tokenizer of its own.
    tokenizer_threads: int = 2
    #: Refuse unknown request fields instead of ignoring them.
    strict_fields: bool = False
    #: Serve a chat model; without one there are only the engines of other kinds.
    serves_chat: bool = True
    #: Load engines of other kinds when a request first needs them, not at the start.
    loads_on_demand: bool = False
    #: Cut texts that are too long for the embedding model instead of refusing them.
    truncates_embeddings: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise UsageError(f"the port must be in 0..65535, not {self.port}")
        if any(not key for key in self.api_keys):
            raise UsageError("an API key must not be empty")
        if any(not key.isascii() or not key.isprintable() for key in self.api_keys):
            raise UsageError("an API key must be printable ASCII: it travels in an HTTP header")
        for name in ("timeout_s", "keep_alive_s"):
            if not getattr(self, name) > 0:
                raise UsageError(f"{name} must be above 0, not {getattr(self, name)}")
        for name in (
            "default_max_tokens",
            "max_request_tokens",
            "max_queue_tokens",
            "stream_interval",
        ):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name in ("max_body_bytes", "max_header_bytes", "tokenizer_threads"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name in ("max_queue", "drain_timeout_s", "rate_limit"):
            if getattr(self, name) < 0:
                raise UsageError(f"{name} must not be negative, but is {getattr(self, name)}")
        if self.default_max_tokens > self.max_request_tokens:
            raise UsageError(
                f"the default of {self.default_max_tokens} tokens is over the most that a "
                f"request may ask for, {self.max_request_tokens}"
            )
        self._check_sampling()
        self._check_access()

    def _check_access(self) -> None:
        for origin in self.allowed_origins:
            scheme, _, place = origin.partition("://")
            if origin != "*" and (not scheme or not place or "/" in place):
                raise UsageError(
                    f"an allowed origin is written like https://app.example.org, or is *, not "
                    f"{origin!r}"
                )
        for host in self.allowed_hosts:
            if not host or "/" in host:
                raise UsageError(f"an allowed host is a name without a port, not {host!r}")

    def _check_sampling(self) -> None:
        top_p = self.default_top_p
        if top_p is not None and not 0 < top_p <= 1:
            raise UsageError(f"the default top_p must be above 0 and at most 1, not {top_p}")
        if self.default_top_k is not None and self.default_top_k < 0:
            raise UsageError(f"the default top_k must not be negative: {self.default_top_k}")
        for name, (low, high) in _RANGES.items():
            value = getattr(self, f"default_{name}")
            if value is not None and not low <= value <= high:
                raise UsageError(f"the default {name} must be in {low}..{high}, not {value}")
