"""The command `completion`: print the script that completes `vllm-mlx` in a shell."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

SHELLS = ("bash", "zsh", "fish")


@click.command()
@click.argument("shell", type=click.Choice(SHELLS))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the completion script for SHELL.

    \b
    Examples:
      eval "$(vllm-mlx completion bash)"          in ~/.bashrc
      eval "$(vllm-mlx completion zsh)"           in ~/.zshrc
      vllm-mlx completion fish > ~/.config/fish/completions/vllm-mlx.fish
    """
    root = ctx.find_root()
    program = root.info_name or "vllm-mlx"
    variable = f"_{program.replace('-', '_').upper()}_COMPLETE"
    kind = get_completion_class(shell)
    if kind is None:
        raise click.UsageError(f"click knows no completion for {shell}", ctx)
    click.echo(kind(root.command, {}, program, variable).source())
