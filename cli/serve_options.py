"""The options of `serve`, and the three frozen configurations that they become."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import click

from vllm_mlx.cli.access_options import AccessOptions, access_options
from vllm_mlx.cli.cache_options import CacheOptions, cache_options
from vllm_mlx.cli.chat_config_options import AnswerOptions, answer_options
from vllm_mlx.cli.encoder_options import EncoderOptions, encoder_options
from vllm_mlx.cli.model_options import ModelOptions, model_options
from vllm_mlx.cli.operation_options import OperationOptions, operation_options
from vllm_mlx.cli.options import Decorator, FiniteRange, option, stacked
from vllm_mlx.cli.prefix_options import PrefixOptions, prefix_options
from vllm_mlx.cli.speech_options import SpeechOptions, speech_options

if TYPE_CHECKING:
    from vllm_mlx.engine.config import EngineConfig, ModelConfig
    from vllm_mlx.server.config import ServerConfig
    from vllm_mlx.server.services.plan import ServicePlan

# Written out for the same reason as in `model_options`, and held equal by the same test.
MAX_NUM_SEQS = 64
PREFILL_TOKENS_PER_STEP = 512
MAX_QUEUE = 256
MAX_QUEUE_TOKENS = 1_000_000
STEP_TIMEOUT_S = 300.0

network_options: Decorator[Any] = stacked(
    option("--host", default="127.0.0.1", help="Address to listen on; 0.0.0.0 is every one."),
    option(
        "--port",
        type=click.IntRange(0, 65535),
        default=8000,
        help="Port to listen on; 0 picks a free one.",
    ),
    option(
        "--ready-file",
        type=click.Path(dir_okay=False),
        metavar="FILE",
        help="Written as JSON (url, port, pid, model) once the model answers, removed at exit.",
    ),
    option(
        "--timeout",
        type=FiniteRange(min=0, min_open=True),
        default=300.0,
        metavar="SECONDS",
        help="End a request that makes no progress for so long, its time in the queue included.",
    ),
    option(
        "--drain-timeout",
        type=FiniteRange(min=0),
        default=10.0,
        metavar="SECONDS",
        help="How long running requests may go on after Ctrl-C or SIGTERM.",
    ),
)

request_options: Decorator[Any] = stacked(
    option(
        "--served-model-name", metavar="NAME", help="Name that clients see; default: MODEL itself."
    ),
    option(
        "--model-alias",
        multiple=True,
        metavar="NAME=TARGET",
        show_default=False,
        help="Another name for the model TARGET, in which * stands for anything; may be given "
        "several times.",
    ),
    option(
        "--max-tokens",
        type=click.IntRange(min=1),
        default=32768,
        metavar="TOKENS",
        help="Length of a completion when the request does not say.",
    ),
    option(
        "--max-request-tokens",
        type=click.IntRange(min=1),
        default=32768,
        metavar="TOKENS",
        help="Longest completion that a request may ask for.",
    ),
    option(
        "--default-temperature",
        type=FiniteRange(0, 2),
        help="Temperature when the request does not say; default: the model's own.",
    ),
    option(
        "--default-top-p",
        type=FiniteRange(0, 1, min_open=True),
        help="top_p when the request does not say; default: the model's own.",
    ),
    option(
        "--default-top-k",
        type=click.IntRange(min=0),
        help="top_k when the request does not say, 0 for all tokens; default: the model's own.",
    ),
    option(
        "--default-min-p",
        type=FiniteRange(0, 1),
        help="min_p when the request does not say; default: the model's own.",
    ),
    option(
        "--default-repetition-penalty",
        type=FiniteRange(0.01, 100),
        help="repetition_penalty when the request does not say; default: the model's own.",
    ),
    option(
        "--default-presence-penalty",
        type=FiniteRange(-2, 2),
        help="presence_penalty when the request does not say; default: none.",
    ),
    option(
        "--default-frequency-penalty",
        type=FiniteRange(-2, 2),
        help="frequency_penalty when the request does not say; default: none.",
    ),
    option(
        "--stream-interval",
        type=click.IntRange(min=1),
        default=1,
        metavar="TOKENS",
        help="Tokens gathered in one streamed chunk.",
    ),
    option(
        "--strict-fields",
        is_flag=True,
        help="Refuse requests with unknown fields, which are ignored and named otherwise.",
    ),
)

batching_options: Decorator[Any] = stacked(
    option(
        "--max-num-seqs",
        type=click.IntRange(min=1),
        default=MAX_NUM_SEQS,
        metavar="ROWS",
        help="Most requests that compute at once.",
    ),
    option(
        "--max-queue",
        type=click.IntRange(min=0),
        default=MAX_QUEUE,
        metavar="REQUESTS",
        help="Most requests that wait; one more is refused with 429.",
    ),
    option(
        "--max-queue-tokens",
        type=click.IntRange(min=1),
        default=MAX_QUEUE_TOKENS,
        metavar="TOKENS",
        help="Most prompt tokens that wait; a request with more is refused with 429 unless it is "
        "the only one.",
    ),
    option(
        "--prefill-tokens-per-step",
        type=click.IntRange(min=1),
        default=PREFILL_TOKENS_PER_STEP,
        metavar="TOKENS",
        help="Most prompt tokens computed between two tokens of the running requests.",
    ),
    option(
        "--target-itl-ms",
        type=FiniteRange(min=0, min_open=True),
        metavar="MS",
        help="Cut prompts so that the tokens of running requests come about so far apart; a prompt "
        "beside them then takes longer. Default: only --prefill-tokens-per-step cuts.",
    ),
    option(
        "--step-timeout",
        type=FiniteRange(min=0),
        default=STEP_TIMEOUT_S,
        metavar="SECONDS",
        help="An engine whose step takes longer hangs, and is started again; 0 waits for ever.",
    ),
    option(
        "--memory-reserve-mb",
        type=click.IntRange(min=0),
        metavar="MIB",
        help="Free memory to leave to other programs: below it prefixes are evicted, then requests "
        "refused, then rows preempted; 0 does not look. Default: 2 % of the memory, at most 512.",
    ),
    option(
        "--continuous-batching/--no-continuous-batching",
        default=True,
        help="Always on; --no-continuous-batching serves one request at a time.",
    ),
)

serve_options: Decorator[Any] = stacked(
    network_options,
    access_options,
    request_options,
    batching_options,
    cache_options,
    prefix_options,
    answer_options,
    model_options,
    encoder_options,
    speech_options,
    operation_options,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServeOptions(
    ModelOptions,
    AnswerOptions,
    CacheOptions,
    AccessOptions,
    PrefixOptions,
    EncoderOptions,
    SpeechOptions,
    OperationOptions,
):
    """Hold the parsed options of `serve`, by the names of their flags."""

    host: str
    port: int
    ready_file: str | None
    timeout: float
    drain_timeout: float
    served_model_name: str | None
    model_alias: tuple[str, ...]
    max_tokens: int
    max_request_tokens: int
    default_temperature: float | None
    default_top_p: float | None
    default_top_k: int | None
    default_min_p: float | None
    default_repetition_penalty: float | None
    default_presence_penalty: float | None
    default_frequency_penalty: float | None
    stream_interval: int
    strict_fields: bool
    max_num_seqs: int
    max_queue: int
    max_queue_tokens: int
    prefill_tokens_per_step: int
    target_itl_ms: float | None
    step_timeout: float
    memory_reserve_mb: int | None
    continuous_batching: bool

    def chat_fields(self) -> dict[str, Any]:
        """Return the fields of `ChatConfig`: how chats are rendered, and how answers are read."""
        return {**super().chat_fields(), **self.answer_fields()}


def check_together(options: ServeOptions, given: frozenset[str]) -> ServeOptions:
    """Return `options` with defaults fitted to what was `given`; raise `UsageError` on conflict.

    A default gives way to a given value; two given values that contradict each other do not.
    """
    if not options.continuous_batching:
        if "max_num_seqs" in given and options.max_num_seqs > 1:
            raise click.UsageError(
                "--no-continuous-batching serves one request at a time, which contradicts "
                f"--max-num-seqs {options.max_num_seqs}; leave one of them out"
            )
        options = dataclasses.replace(options, max_num_seqs=1)
    if options.max_tokens > options.max_request_tokens:
        if {"max_tokens", "max_request_tokens"} <= given:
            raise click.UsageError(
                f"--max-tokens {options.max_tokens} is over "
                f"--max-request-tokens {options.max_request_tokens}; raise the latter"
            )
        if "max_tokens" in given:
            options = dataclasses.replace(options, max_request_tokens=options.max_tokens)
        else:
            options = dataclasses.replace(options, max_tokens=options.max_request_tokens)
    return options


def service_plans(options: ServeOptions, given: frozenset[str]) -> list[ServicePlan]:
    """Return the engines beside the chat model, or instead of it; raise `UsageError`."""
    plans = options.encoder_plans(
        offline=options.offline, trust_remote_code=options.trust_remote_code
    )
    plans += options.speech_plans(offline=options.offline)
    if not options.no_chat_model:
        return plans
    if not plans:
        raise click.UsageError(
            "--no-chat-model leaves nothing to serve: name a model with --embedding-model, "
            "--rerank-model or --stt-model"
        )
    unfit = [name for name in ("model", "warm_prompts") if name in given]
    if unfit:
        what = "MODEL" if unfit[0] == "model" else "--warm-prompts"
        raise click.UsageError(f"{what} is for a chat model, which --no-chat-model leaves out")
    return plans


def build_configs(options: ServeOptions) -> tuple[ServerConfig, ModelConfig, EngineConfig]:
    """Return the configurations of server, model and engine; raise `UsageError` if one refuses."""
    from vllm_mlx.engine.config import EngineConfig
    from vllm_mlx.server.config import ServerConfig

    server = ServerConfig(
        host=options.host,
        port=options.port,
        ready_file=options.ready_file,
        timeout_s=options.timeout,
        default_max_tokens=options.max_tokens,
        max_request_tokens=options.max_request_tokens,
        default_temperature=options.default_temperature,
        default_top_p=options.default_top_p,
        default_top_k=options.default_top_k,
        default_min_p=options.default_min_p,
        default_repetition_penalty=options.default_repetition_penalty,
        default_presence_penalty=options.default_presence_penalty,
        default_frequency_penalty=options.default_frequency_penalty,
        stream_interval=options.stream_interval,
        strict_fields=options.strict_fields,
        max_queue=options.max_queue,
        max_queue_tokens=options.max_queue_tokens,
        served_model_name=options.served_model_name,
        model_aliases=_aliases(options),
        drain_timeout_s=options.drain_timeout,
        **options.access_fields(),
        **options.prefix_fields(),
        **options.operation_fields(),
        **options.service_fields(),
    )
    engine = EngineConfig(
        max_num_seqs=options.max_num_seqs,
        prefill_tokens_per_step=options.prefill_tokens_per_step,
        target_itl_s=None if options.target_itl_ms is None else options.target_itl_ms / 1000,
        step_timeout_s=options.step_timeout,
        kv_memory_bytes=options.kv_memory_bytes,
        memory_reserve_bytes=_reserve_bytes(options),
        **options.cache_fields(),
    )
    return server, options.model_config(), engine


def _reserve_bytes(options: ServeOptions) -> int | None:
    return None if options.memory_reserve_mb is None else options.memory_reserve_mb * 1024 * 1024


def _aliases(options: ServeOptions) -> tuple[tuple[str, str], ...]:
    """Return the aliases; raise `UsageError` for one that stands for no model."""
    aliases = []
    for text in options.model_alias:
        name, _, target = text.partition("=")
        if not name or not target:
            raise click.UsageError(f"--model-alias is written NAME=TARGET, not {text!r}")
        if target not in ("default", options.model_name, options.served_model_name):
            served = options.served_model_name or options.model_name
            raise click.UsageError(
                f"--model-alias {text}: there is no model {target!r}; this server serves "
                f"{served!r} (also as 'default')"
            )
        aliases.append((name, target))
    return tuple(aliases)
