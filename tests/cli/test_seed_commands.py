"""Hold every documented command line to parse, or to be refused by the name of what is missing."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest

from vllm_mlx.cli.main import cli

LINES = [
    line
    for line in (Path(__file__).parent / "seed_commands.txt").read_text().splitlines()
    if not line.startswith("#")
]
WAITING = [line for line in LINES if line.startswith("[")]


def parse(line: str) -> click.Context:
    """Parse a whole command line, running nothing."""
    program, *args = shlex.split(line)
    assert program == "vllm-mlx"
    # A command keeps the help option that its first context gives it.
    root = click.Context(cli, info_name=program, **cli.context_settings)
    name, command, rest = cli.resolve_command(root, args)
    assert command is not None
    context = command.make_context(name, rest, parent=root)
    if name is not None and command.hidden:
        command.invoke(context)
    return context


def test_the_fixture_is_read() -> None:
    """There are command lines of both kinds, each of this program."""
    assert len(LINES) > 25
    assert 0 < len(WAITING) < len(LINES)


@pytest.mark.parametrize("line", [line for line in LINES if line not in WAITING])
def test_documented_command_lines_parse(line: str) -> None:
    """A documented command line is accepted; one of `serve` names its model."""
    context = parse(line)
    command = shlex.split(line)[1]
    assert context.info_name == command
    if command == "serve":
        assert context.params["model"] == shlex.split(line)[2]


@pytest.mark.parametrize("line", WAITING)
def test_waiting_command_lines_say_what_is_missing(line: str) -> None:
    """A command line of later work is refused by name; once it parses, its mark must go."""
    match = re.fullmatch(r"\[(.*)\] (.*)", line)
    assert match is not None
    missing, command_line = match.groups()
    with pytest.raises(click.UsageError) as caught:
        parse(command_line)
    message = caught.value.format_message()
    assert message.endswith("not in this build yet")
    assert [name for name in missing.split() if name not in message] == []
