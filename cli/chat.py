"""The command `chat`: talk to a model in this process or to a running server."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from vllm_mlx.cli.model_options import ModelOptions, model_argument, model_options
from vllm_mlx.cli.options import (
    Decorator,
    FiniteRange,
    RunSettings,
    given_on_command_line,
    option,
    stacked,
    verbose_option,
)

if TYPE_CHECKING:
    from vllm_mlx.cli.chat_backends import ChatBackend, ChatSampling

#: Parameters that say how this process loads a model; a server has loaded its own.
LOADING = {
    "dtype": "--dtype",
    "load_format": "--load-format",
    "shape": "--shape",
    "moe_top_k": "--moe-top-k",
    "max_model_len": "--max-model-len",
    "kv_memory_mb": "--kv-memory-mb",
    "adapter_path": "--adapter-path",
    "trust_remote_code": "--trust-remote-code",
    "offline": "--offline",
    "chat_template": "--chat-template",
    "default_chat_template_kwargs": "--default-chat-template-kwargs",
}
#: Parameters that concern a server only.
REMOTE = {"api_key": "--api-key", "timeout": "--timeout"}

server_options: Decorator[Any] = stacked(
    option(
        "--url",
        metavar="URL",
        help="Ask the server there instead; MODEL is then the name it serves, and may be left out.",
    ),
    option("--api-key", metavar="KEY", help="The server's key."),
    option(
        "--timeout",
        type=FiniteRange(min=0, min_open=True),
        default=300.0,
        metavar="SECONDS",
        help="Give up on a server that sends nothing for so long.",
    ),
)

script_options: Decorator[Any] = stacked(
    click.option(
        "-m",
        "--message",
        "parts",
        multiple=True,
        metavar="TEXT",
        help="Ask this once and exit; - stands for stdin, several are joined by blank lines.",
    ),
    click.option("--json", "as_json", is_flag=True, help="Print the answer as one JSON object."),
)

sampling_options: Decorator[Any] = stacked(
    click.option("--system", metavar="TEXT", help="System message."),
    click.option(
        "--max-tokens",
        type=click.IntRange(min=1),
        default=4096,
        show_default=True,
        metavar="TOKENS",
        help="Longest answer.",
    ),
    click.option(
        "--temperature",
        type=FiniteRange(0, 2),
        help="0 always takes the likeliest token; default: the model's own.",
    ),
    click.option(
        "--top-p", type=FiniteRange(0, 1, min_open=True), help="Keep this share of probability."
    ),
    click.option("--top-k", type=click.IntRange(min=0), help="Keep so many tokens; 0 keeps all."),
    click.option(
        "--min-p", type=FiniteRange(0, 1), help="Drop tokens below this share of the likeliest's."
    ),
    click.option("--seed", type=click.IntRange(0, 2**63 - 1), help="Draw the same again."),
    click.option(
        "--stop", multiple=True, metavar="TEXT", help="End before this text; may be repeated."
    ),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatOptions(ModelOptions):
    """Hold the parsed options of `chat`, by the names of their flags."""

    url: str | None
    api_key: str | None
    timeout: float
    parts: tuple[str, ...]
    as_json: bool
    system: str | None
    max_tokens: int
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    seed: int | None
    stop: tuple[str, ...]


@click.command()
@model_argument
@server_options
@script_options
@sampling_options
@model_options
@verbose_option
@click.pass_context
def chat(ctx: click.Context, /, **values: Any) -> None:
    """Chat with MODEL in the terminal, or ask it one question.

    MODEL is "demo" (the built-in model, and the default), a local folder, or a repository of the
    model hub; it runs in this process. With --url a running server answers instead. Without a
    terminal, or with -m, one question is answered on stdout and everything else goes to stderr.

    \b
    Examples:
      vllm-mlx chat
      vllm-mlx chat mlx-community/Qwen3-0.6B-8bit --temperature 0.6
      vllm-mlx chat --url http://localhost:8000
      git diff | vllm-mlx chat -m "Summarise this change:" -m -
      vllm-mlx chat -m "What is MLX?" --json | jq -r .answer
    """
    options = ChatOptions(**values)
    given_names = given_on_command_line(ctx)
    _check_together(options, given_names)
    from vllm_mlx.cli.chat_once import read_question

    interactive = (
        not options.parts and not options.as_json and sys.stdin.isatty() and sys.stdout.isatty()
    )
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A terminal or a locale that cannot show a character must not end the answer.
        sys.stdout.reconfigure(errors="replace")
    # Before loading: a script with an empty question should not wait for a model.
    question = "" if interactive else read_question(options.parts)
    if options.url is not None:
        opened = _http(options, options.model if "model" in given_names else None)
    else:
        opened = _in_process(options, ctx.ensure_object(RunSettings))
    with opened as backend:
        if interactive:
            _talk(backend, options)
        else:
            _ask(backend, question, options)


def _check_together(options: ChatOptions, given_names: frozenset[str]) -> None:
    """Raise `UsageError` for options that would have no effect.

    Only the command line counts: a variable may be meant for other runs.
    """
    ineffective = LOADING if options.url is not None else REMOTE
    flags = [flag for name, flag in ineffective.items() if name in given_names]
    if flags and options.url is not None:
        raise click.UsageError(f"{', '.join(flags)} cannot be used with --url: the server decides")
    if flags:
        raise click.UsageError(f"{', '.join(flags)} needs --url")


def _sampling(options: ChatOptions) -> ChatSampling:
    from vllm_mlx.cli.chat_backends import ChatSampling

    return ChatSampling(
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        min_p=options.min_p,
        seed=options.seed,
        max_tokens=options.max_tokens,
        stop=options.stop,
    )


@contextlib.contextmanager
def _http(options: ChatOptions, named: str | None) -> Iterator[ChatBackend]:
    from vllm_mlx.cli.chat_http import open_http_backend
    from vllm_mlx.cli.loading import LoadingProgress

    assert options.url is not None
    with LoadingProgress() as progress:
        backend = open_http_backend(
            options.url,
            model=named,
            api_key=options.api_key,
            timeout_s=options.timeout,
            on_wait=progress,
        )
    with contextlib.closing(backend):
        yield backend


@contextlib.contextmanager
def _in_process(options: ChatOptions, settings: RunSettings) -> Iterator[ChatBackend]:
    from vllm_mlx.cli.announce import announce
    from vllm_mlx.cli.chat_engine import engine_thread, open_engine_backend
    from vllm_mlx.cli.loading import LoadingProgress
    from vllm_mlx.cli.logs import configure_logging
    from vllm_mlx.engine.config import EngineConfig
    from vllm_mlx.engine.models.resolve import resolve_model
    from vllm_mlx.engine.platform import require_backend
    from vllm_mlx.engine.text.chat_template_file import read_chat_template
    from vllm_mlx.engine.text.tokenizer import load_tokenizer

    configure_logging("debug" if settings.verbose else "warning")
    # Before anything is fetched that could not be used.
    require_backend()
    model = options.model_config()
    if options.chat_template is not None:
        read_chat_template(Path(options.chat_template))
    engine = EngineConfig(max_num_seqs=1, kv_memory_bytes=options.kv_memory_bytes)
    # Neither a download's threads nor MLX's own can be stopped, and one that asks for the
    # interpreter while it is being taken down aborts the process.
    settings.must_exit_at_once = True
    progress = LoadingProgress()
    with progress:
        folder = resolve_model(model, progress)
    announce(model, engine, folder)
    load_own = functools.partial(
        load_tokenizer, trust_remote_code=options.trust_remote_code, chat=model.chat
    )
    with progress:
        backend = open_engine_backend(engine_thread(model, engine), load_own, progress)
    with contextlib.closing(backend):
        yield backend


def _talk(backend: ChatBackend, options: ChatOptions) -> None:
    from vllm_mlx.cli.chat_commands import ChatState
    from vllm_mlx.cli.chat_prompt import LinePrompt, history_path, open_history
    from vllm_mlx.cli.chat_session import Conversation
    from vllm_mlx.cli.chat_terminal import ChatTerminal

    note = _note_writer()
    history, warning = open_history(history_path())
    if warning is not None:
        note(warning)
    note(f"{backend.model_name} is ready. /help lists the commands, Ctrl-D leaves.")
    ChatTerminal(
        backend,
        ChatState(Conversation(options.system), backend.model_name),
        _sampling(options),
        reader=LinePrompt(history),
        out=sys.stdout,
        note=note,
    ).run()


def _ask(backend: ChatBackend, question: str, options: ChatOptions) -> None:
    from vllm_mlx.cli.chat_once import answer_once

    answer_once(
        backend,
        question,
        system=options.system,
        sampling=_sampling(options),
        as_json=options.as_json,
        out=sys.stdout,
        note=_note_writer(),
    )


def _note_writer() -> Callable[[str], None]:
    """Return what writes remarks on stderr, dim in a terminal."""
    from rich.console import Console

    from vllm_mlx.cli.errors import printable

    console = Console(stderr=True)

    def note(text: str) -> None:
        console.print(printable(text), style="dim", markup=False, highlight=False, soft_wrap=True)

    return note
