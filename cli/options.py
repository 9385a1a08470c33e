"""The options that commands share, their types and their environment variables."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, TypeVar

import click

from vllm_mlx.cli.pending import env_name

Decorated = TypeVar("Decorated", bound=Callable[..., Any])
Decorator = Callable[[Decorated], Decorated]


@dataclasses.dataclass
class RunSettings:
    """Hold what concerns the whole run; written while the command line is parsed."""

    verbose: bool = False
    #: Threads of libraries are left that outlive the interpreter badly: end without taking it down.
    must_exit_at_once: bool = False


class FiniteRange(click.FloatRange):
    """Accept a finite number within a range; `nan` and `inf` compare with nothing."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Convert and check `value`; raise `BadParameter` when it is not in the range."""
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


def option(flag: str, *names: str, **attributes: Any) -> Decorator[Any]:
    """Declare an option that an environment variable can also set.

    `flag` is the long flag, or `--x/--no-x`; the variable is `VLLM_MLX_X`. `names` are click's
    further declarations.
    """
    attributes.setdefault("envvar", env_name(flag.partition("/")[0]))
    attributes.setdefault("show_envvar", True)
    attributes.setdefault("show_default", True)
    return click.option(flag, *names, **attributes)


def stacked(*decorators: Decorator[Any]) -> Decorator[Any]:
    """Combine option decorators into one that keeps their order on the help page."""

    def decorate(function: Decorated) -> Decorated:
        for decorator in reversed(decorators):
            decorator(function)
        return function

    return decorate


def _set_verbose(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    del param
    if value:
        ctx.ensure_object(RunSettings).verbose = True


verbose_option: Decorator[Any] = click.option(
    "-v",
    "--verbose",
    is_flag=True,
    expose_value=False,
    callback=_set_verbose,
    help="Log more, and show the traceback of an internal error.",
)


def given_on_command_line(ctx: click.Context) -> frozenset[str]:
    """Return the names of the parameters that the command line itself sets."""
    source = click.core.ParameterSource.COMMANDLINE
    return frozenset(name for name in ctx.params if ctx.get_parameter_source(name) is source)


def given(ctx: click.Context) -> frozenset[str]:
    """Return the names of the parameters that the user set, variables and files included."""
    defaults = (click.core.ParameterSource.DEFAULT, None)
    return frozenset(name for name in ctx.params if ctx.get_parameter_source(name) not in defaults)
