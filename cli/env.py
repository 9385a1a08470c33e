"""The command `env`: print what points an agent at a server."""

from __future__ import annotations

import shlex

import click

from vllm_mlx.cli.env_agents import AGENTS, AgentSetup, ServedChoice
from vllm_mlx.cli.errors import ExitCode, printable
from vllm_mlx.cli.options import FiniteRange, option, verbose_option


@click.command()
@click.argument("agent", type=click.Choice(list(AGENTS)))
@option(
    "--url", default="http://127.0.0.1:8000", metavar="URL", help="The server that it is to use."
)
@click.option("--model", metavar="NAME", help="Name of the model; default: the one it serves.")
@option("--api-key", metavar="KEY", help="The server's key.")
@option(
    "--timeout",
    type=FiniteRange(min=0, min_open=True),
    default=10.0,
    metavar="SECONDS",
    help="Give up on a server that sends nothing for so long.",
)
@click.option(
    "--check/--no-check",
    default=True,
    show_default=True,
    help="Ask the server first whether it answers, and has what the agent needs.",
)
@click.option("--json", "as_json", is_flag=True, help="Print variables and files as one object.")
@verbose_option
def env(
    agent: str,
    url: str,
    model: str | None,
    api_key: str | None,
    timeout: float,
    check: bool,
    as_json: bool,
) -> int:
    """Print the variables, or the file, that point AGENT at a server.

    Variables are printed for the shell, a file as it is to be; where it belongs is said on stderr.
    A server that does not answer, or lacks what the agent needs, ends the command with 5.

    \b
    Examples:
      vars=$(vllm-mlx env claude-code) && eval "$vars" && claude
      vllm-mlx env codex
      vllm-mlx env opencode --url http://studio.local:8000 > opencode.json
      vllm-mlx env qwen-code --json
    """
    chosen = AGENTS[agent]
    if check:
        from vllm_mlx.cli.env_check import check_server

        choice = check_server(url, chosen, model=model, api_key=api_key, timeout_s=timeout)
    else:
        from vllm_mlx.cli.chat_http import ANY_MODEL, base_url

        choice = ServedChoice(base_url(url).removesuffix("/v1"), model or ANY_MODEL, api_key)
    setup = chosen.set_up(choice)
    if as_json:
        _print_json(setup)
    else:
        _print_plain(setup, chosen.name)
    return ExitCode.DONE


def _print_json(setup: AgentSetup) -> None:
    import json

    files = dict([setup.file]) if setup.file is not None else {}
    click.echo(json.dumps({"env": dict(setup.variables), "files": files}, ensure_ascii=False))


def _print_plain(setup: AgentSetup, name: str) -> None:
    if setup.file is None:
        for variable, value in setup.variables.items():
            click.echo(f"export {variable}={shlex.quote(printable(value))}")
        return
    place, text = setup.file
    click.echo(text, nl=False)
    click.echo(f"This is {place} for {name}.", err=True)
    for variable in setup.variables:
        # A key does not belong into a file, nor onto a terminal.
        click.echo(f"It also needs the variable {variable}, which holds the key.", err=True)
