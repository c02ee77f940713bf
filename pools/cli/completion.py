"""`pools completion`: what a shell needs to complete commands and options."""

from __future__ import annotations

import os

import click
from click.shell_completion import get_completion_class

from ray_pools.errors import BadInput

SHELLS = ("bash", "zsh", "fish")


@click.command()
@click.argument("shell", type=click.Choice(SHELLS), required=False)
def completion(shell: str | None) -> None:
    """Print the completion script of a shell, by default of $SHELL.

    \b
    bash: pools completion bash > ~/.local/share/bash-completion/completions/pools
    zsh:  pools completion zsh > a folder of $fpath, as _pools
    fish: pools completion fish > ~/.config/fish/completions/pools.fish
    """
    chosen = shell or os.path.basename(os.environ.get("SHELL", ""))
    made = get_completion_class(chosen) if chosen in SHELLS else None
    if made is None:
        raise BadInput("SHELL", chosen, f"one of {', '.join(SHELLS)}")
    root = click.get_current_context().find_root()
    click.echo(made(root.command, {}, "pools", "_POOLS_COMPLETE").source())
