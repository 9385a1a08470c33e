"""The command `serve`: parse, say what will be loaded, and run the server."""

from __future__ import annotations

import dataclasses
from typing import Any

import click

from vllm_mlx.cli.config_file import config_lines, config_options
from vllm_mlx.cli.errors import ExitCode
from vllm_mlx.cli.model_options import model_argument
from vllm_mlx.cli.options import RunSettings, given, verbose_option
from vllm_mlx.cli.pending import RefusingCommand, pending_options
from vllm_mlx.cli.serve_options import (
    ServeOptions,
    build_configs,
    check_together,
    serve_options,
    service_plans,
)

LOOPBACK = ("127.0.0.1", "localhost", "::1")


@click.command(cls=RefusingCommand)
@model_argument
@serve_options
@config_options
@pending_options
@verbose_option
@click.pass_context
def serve(ctx: click.Context, /, *, print_config: bool, **values: Any) -> int:
    """Serve MODEL over the OpenAI and Anthropic APIs.

    MODEL is "demo" (the built-in model, and the default), a local folder, or a repository of the
    model hub. The server listens at once; until the model answers, its routes say 503 and how
    far loading is.

    \b
    Examples:
      vllm-mlx serve
      vllm-mlx serve mlx-community/Qwen3-0.6B-8bit --port 8080
      vllm-mlx serve ./my-model --api-key secret --host 0.0.0.0
      vllm-mlx serve --embedding-model mlx-community/multilingual-e5-small-mlx
      vllm-mlx serve --stt-model mlx-community/whisper-large-v3-turbo-asr-fp16
      vllm-mlx serve --config server.toml --print-config
    """
    given_names = given(ctx)
    options = check_together(ServeOptions(**values), given_names)
    configs = build_configs(options)
    services = service_plans(options, given_names)
    if print_config:
        click.echo("\n".join(config_lines(ctx, dataclasses.asdict(options))))
        return ExitCode.DONE
    verbose = ctx.ensure_object(RunSettings).verbose

    from vllm_mlx.cli.announce import announce_if_local
    from vllm_mlx.cli.logs import configure_logging, echoes_logged

    level = "debug" if verbose and "log_level" not in given_names else options.log_level
    configure_logging(level, options.log_format)
    if options.host not in LOOPBACK and not configs[0].api_keys:
        with echoes_logged(options.log_format):
            click.echo(
                f"Warning: {options.host} can be reached from other machines, and no --api-key "
                "is set: anyone there can use the model",
                err=True,
            )
    server_config, model_config, engine_config = configs

    from vllm_mlx.server.serving import run_server

    def announce() -> None:
        with echoes_logged(options.log_format):
            if options.no_chat_model:
                return
            announce_if_local(model_config, engine_config)

    # The server's address and files come first: what they lack is the whole answer then.
    return run_server(
        server_config, model_config, engine_config, announce=announce, services=services
    )
