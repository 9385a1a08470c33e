"""The command group `vllm-mlx`, which imports a subcommand only when it is asked for."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import NoReturn

import click

from vllm_mlx.cli.errors import ExitCode, OutputClosedError, TerminatedError, report
from vllm_mlx.cli.options import RunSettings, verbose_option

PROGRAM = "vllm-mlx"

#: Subcommands and where they live; their modules import nothing heavy at the top.
COMMANDS = {
    "serve": "vllm_mlx.cli.serve:serve",
    "chat": "vllm_mlx.cli.chat:chat",
    "transcribe": "vllm_mlx.cli.transcribe:transcribe",
    "bench-serve": "vllm_mlx.cli.bench_serve:bench_serve",
    "warm": "vllm_mlx.cli.warm:warm",
    "cache": "vllm_mlx.cli.cache:cache",
    "env": "vllm_mlx.cli.env:env",
    "doctor": "vllm_mlx.cli.doctor:doctor",
    "completion": "vllm_mlx.cli.completion:completion",
}


class LazyGroup(click.Group):
    """Import a subcommand's module when the subcommand is named or listed."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all subcommands, in the order of the help page."""
        del ctx
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the subcommand `cmd_name`, importing it; None if there is none."""
        del ctx
        target = COMMANDS.get(cmd_name)
        if target is None:
            return None
        module_name, _, attribute = target.partition(":")
        command: click.Command = getattr(importlib.import_module(module_name), attribute)
        return command

    def invoke(self, ctx: click.Context) -> object:
        """Run the subcommand; a closed stdout becomes `OutputClosedError`."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError as error:
            # click would end the program with 1, which means that a gate failed.
            raise OutputClosedError from error


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(package_name=PROGRAM, message="%(prog)s %(version)s")
@verbose_option
def cli() -> None:
    """Serve and use MLX language models on this machine.

    \b
    Examples:
      vllm-mlx serve                      the built-in demo model on port 8000
      vllm-mlx chat                       talk to it without a server
      vllm-mlx chat -m "What is MLX?"     ask once, for scripts
    """


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line `args` (default: the process's own) and return the exit code."""
    settings = RunSettings()
    previous = signal.signal(signal.SIGTERM, _terminate)
    try:
        code = _run(args, settings)
    finally:
        signal.signal(signal.SIGTERM, previous)
    if settings.must_exit_at_once:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                stream.flush()
        os._exit(code)
    return code


def _run(args: Sequence[str] | None, settings: RunSettings) -> int:
    try:
        result = cli.main(
            args=None if args is None else list(args),
            prog_name=PROGRAM,
            standalone_mode=False,
            obj=settings,
        )
        sys.stdout.flush()
    except BrokenPipeError:
        return report(OutputClosedError(), verbose=settings.verbose)
    except (Exception, KeyboardInterrupt, TerminatedError) as error:  # noqa: BLE001
        # The last resort of the program: everything becomes one line and an exit code.
        return report(error, verbose=settings.verbose)
    return result if isinstance(result, int) else ExitCode.DONE


def _terminate(signum: int, frame: FrameType | None) -> NoReturn:
    del signum, frame
    raise TerminatedError
