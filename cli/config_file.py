"""Options from a TOML file, and the options in effect as such a file.

A key is the name of a flag without its dashes, or `model`. The command line and the environment
win over the file; the file wins over defaults.
"""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from vllm_mlx.cli.options import Decorator, option, stacked

#: Options that are about the file itself, and so cannot be in it.
_OWN = frozenset({"config", "print_config", "help"})

#: Options whose values are not printed.
SECRETS = frozenset({"api_keys"})

_SOURCES = {
    click.core.ParameterSource.COMMANDLINE: "command line",
    click.core.ParameterSource.ENVIRONMENT: "environment",
    click.core.ParameterSource.DEFAULT_MAP: "file",
}


def _read_into_defaults(ctx: click.Context, param: click.Parameter, value: str | None) -> None:
    del param
    if value is not None and not ctx.resilient_parsing:
        ctx.default_map = {**(ctx.default_map or {}), **read_config(Path(value), ctx.command)}


config_options: Decorator[Any] = stacked(
    option(
        "--config",
        type=click.Path(dir_okay=False, exists=True),
        metavar="FILE",
        is_eager=True,
        expose_value=False,
        callback=_read_into_defaults,
        help="Take options from this TOML file; flags and variables win over it.",
    ),
    option(
        "--print-config",
        is_flag=True,
        help="Print the options in effect as such a file, keys left out, and do nothing else.",
    ),
)


def config_key(param: click.Parameter) -> str:
    """Return the name that an option or argument has in a file."""
    if isinstance(param, click.Argument):
        return param.name or ""
    flag = next(opt for opt in param.opts if opt.startswith("--"))
    return flag.removeprefix("--")


def configurable(command: click.Command) -> dict[str, click.Parameter]:
    """Return what a file may set of `command`, by key, what is refused by name included."""
    return {config_key(param): param for param in command.params if param.name not in _OWN}


def read_config(path: Path, command: click.Command) -> dict[str, Any]:
    """Return the values in a file by the names of the parameters of `command`.

    Raises `UsageError` for a file that is not TOML, for keys that are no options, and for values
    of a kind that their options do not take; the options themselves check the values.
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise click.UsageError(f"--config {path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise click.UsageError(f"--config {path} is not TOML: {error}") from error
    known = configurable(command)
    # Words may be divided as in a variable's name, too.
    given = {key.replace("_", "-"): (key, value) for key, value in table.items()}
    if unknown := [key for name, (key, _) in given.items() if name not in known]:
        raise click.UsageError(_unknown(path, unknown, known))
    return {
        str(known[name].name): _value(path, key, value, known[name])
        for name, (key, value) in given.items()
    }


def config_lines(ctx: click.Context, values: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of a file that says what is in effect, with where each value comes from."""
    for key, param in configurable(ctx.command).items():
        name = str(param.name)
        if name not in values:
            continue
        value = values[name]
        source = ctx.get_parameter_source(name)
        origin = _SOURCES.get(source, "default") if source is not None else "default"
        if name in SECRETS:
            if value:
                yield f"# {key}: {len(value)} from {origin}, not shown"
        elif value is None or value == ():
            yield f"# {key} is not set"
        else:
            yield f"{key} = {_toml(value)}  # {origin}"


def _unknown(path: Path, unknown: list[str], known: Mapping[str, click.Parameter]) -> str:
    visible = [key for key, param in known.items() if not getattr(param, "hidden", False)]
    parts = []
    for key in unknown:
        close = difflib.get_close_matches(key, visible, n=1)
        parts.append(f"{key} (did you mean {close[0]}?)" if close else key)
    return f"--config {path} has keys that are no options: {', '.join(parts)}"


def _value(path: Path, key: str, value: object, param: click.Parameter) -> object:
    """Return a value as the command line would have it, so that it is checked in the same way."""
    is_flag = isinstance(param, click.Option) and param.is_flag
    is_list = isinstance(param, click.Option) and param.multiple
    if is_flag:
        if isinstance(value, bool):
            return value
        raise _wrong(path, key, "true or false")
    if is_list:
        items = value if isinstance(value, list) else [value]
        if all(isinstance(item, str) for item in items):
            return items
        raise _wrong(path, key, "a string or a list of strings")
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise _wrong(path, key, "a string or a number")
    return str(value)


def _wrong(path: Path, key: str, wanted: str) -> click.UsageError:
    return click.UsageError(f"--config {path}: {key} must be {wanted}")


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, dict):
        value = json.dumps(value, ensure_ascii=False)
    # A JSON string is a TOML string but for DEL, which TOML wants escaped.
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
