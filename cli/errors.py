"""Map every error to an exit code and one line on stderr; the only place that does.

0    done
1    a check or gate failed
2    the command line, a configuration or a request is wrong
3    the model or MLX's backend cannot load
4    a stored cache is unusable or damaged
5    a server cannot be reached, or does not answer as one
70   internal: a defect of ours
130  interrupted (Ctrl-C)
141  whoever read stdout went away
143  terminated (SIGTERM)
"""

from __future__ import annotations

import enum
import os
import sys
import traceback

import click

from vllm_mlx.engine import errors


class ExitCode(enum.IntEnum):
    """Name the exit codes of every command."""

    DONE = 0
    GATE_FAILED = 1
    USAGE = 2
    MODEL = 3
    CACHE = 4
    UNREACHABLE = 5
    INTERNAL = 70
    INTERRUPTED = 130
    OUTPUT_CLOSED = 141
    TERMINATED = 143


class TerminatedError(SystemExit):
    """Unwind the program after SIGTERM; asyncio, too, lets this kind of exception through."""


class OutputClosedError(Exception):
    """Unwind the program after whoever read stdout went away."""


#: Every class of the tree, by name: a new class must be given its exit code here.
EXIT_CODES: dict[type[errors.VllmMlxError], ExitCode] = {
    errors.VllmMlxError: ExitCode.INTERNAL,
    errors.UsageError: ExitCode.USAGE,
    errors.ModelLoadError: ExitCode.MODEL,
    errors.BackendMissingError: ExitCode.MODEL,
    errors.ModelNotFoundError: ExitCode.MODEL,
    errors.HubUnreachableError: ExitCode.MODEL,
    errors.UnsupportedModelError: ExitCode.MODEL,
    errors.InsufficientMemoryError: ExitCode.MODEL,
    errors.CacheError: ExitCode.CACHE,
    errors.CacheDamagedError: ExitCode.CACHE,
    errors.CacheVersionError: ExitCode.CACHE,
    errors.UnreachableError: ExitCode.UNREACHABLE,
    errors.RequestError: ExitCode.INTERNAL,
    errors.InvalidRequestError: ExitCode.USAGE,
    errors.ContextLengthExceededError: ExitCode.USAGE,
    errors.RequestTooLargeError: ExitCode.USAGE,
    errors.FileTooLargeError: ExitCode.USAGE,
    errors.ModelUnknownError: ExitCode.USAGE,
    errors.AuthenticationError: ExitCode.USAGE,
    errors.HostNotAllowedError: ExitCode.USAGE,
    errors.HeadersTooLargeError: ExitCode.USAGE,
    errors.RequestNotFoundError: ExitCode.USAGE,
    errors.OverloadedError: ExitCode.UNREACHABLE,
    errors.OutOfMemoryError: ExitCode.UNREACHABLE,
    errors.RateLimitedError: ExitCode.UNREACHABLE,
    errors.EngineUnavailableError: ExitCode.UNREACHABLE,
    errors.EngineDiedError: ExitCode.UNREACHABLE,
    errors.RequestTimeoutError: ExitCode.UNREACHABLE,
    errors.RequestAbortedError: ExitCode.INTERRUPTED,
    errors.RowFailedError: ExitCode.INTERNAL,
}


#: All of C0 and C1 but tab and newline, and DEL.
_CONTROL_CHARACTERS = dict.fromkeys({*range(0x20), *range(0x7F, 0xA0)} - {0x09, 0x0A})


def exit_code(error: BaseException) -> ExitCode:
    """Return the exit code that `error` ends the program with."""
    if isinstance(error, errors.VllmMlxError):
        return next(EXIT_CODES[cls] for cls in type(error).__mro__ if cls in EXIT_CODES)
    if isinstance(error, (KeyboardInterrupt, click.Abort)):
        return ExitCode.INTERRUPTED
    if isinstance(error, TerminatedError):
        return ExitCode.TERMINATED
    if isinstance(error, OutputClosedError):
        return ExitCode.OUTPUT_CLOSED
    if isinstance(error, click.ClickException):
        return ExitCode.USAGE
    return ExitCode.INTERNAL


def error_line(error: BaseException) -> str:
    """Return the one line that says what went wrong and what to do."""
    if isinstance(error, click.ClickException):
        text = error.format_message()
        context = error.ctx if isinstance(error, click.UsageError) else None
        if context is not None:
            text = f"{_sentence(text)} See '{context.command_path} --help'."
    elif isinstance(error, errors.VllmMlxError):
        text = error.message
    elif isinstance(error, (KeyboardInterrupt, click.Abort)):
        text = "interrupted"
    elif isinstance(error, TerminatedError):
        text = "terminated"
    else:
        text = f"internal error: {type(error).__name__}: {error}. Run again with -v for the details"
    return "Error: " + printable(" ".join(text.split()))


def printable(text: str) -> str:
    """Return `text` without the control characters that could drive a terminal."""
    return text.translate(_CONTROL_CHARACTERS)


def report(error: BaseException, *, verbose: bool) -> ExitCode:
    """Print `error` on stderr and return its exit code.

    The traceback follows the line only with `verbose`, and only for errors that are not ours.
    """
    code = exit_code(error)
    if code is ExitCode.OUTPUT_CLOSED:
        silence_stdout()
        return code
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        error.show()
        return code
    if verbose and code is ExitCode.INTERNAL:
        click.echo("".join(traceback.format_exception(error)), err=True, nl=False)
    click.echo(error_line(error), err=True)
    return code


def silence_stdout() -> None:
    """Point stdout at nothing, so that the interpreter's last flush does not fail."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)


def _sentence(text: str) -> str:
    return text if text.endswith((".", "?", "!", "?)")) else text + "."
