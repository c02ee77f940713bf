"""What commands print: tables of at most the terminal's width, JSON instead, and progress to stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import IO, Any

import click

from ray_pools.errors import BadInput

WIDTH_OF_FILES = 240
"""Columns where stdout is no terminal: enough for two names."""


class Failed(click.ClickException):
    """An error as the terminal shows it."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code  # type: ignore[misc, unused-ignore]  # of the class only, says click

    def show(self, file: IO[Any] | None = None) -> None:
        click.echo(f"pools: error: {self.message}", file=file or sys.stderr)


class Interrupted(Failed):
    """Ctrl-C, or SIGTERM as `timeout` sends it; `note` says what is so all the same."""

    def __init__(self, interrupt: KeyboardInterrupt, note: str = "") -> None:
        by_user = type(interrupt) is KeyboardInterrupt
        said = "interrupted" if by_user else "terminated"
        super().__init__(f"{said}: {note}" if note else said, 130 if by_user else 143)


def progress(text: str) -> None:
    """What happens meanwhile; never on stdout."""
    click.echo(text, err=True)


def print_json(value: Any) -> None:
    """One JSON document on stdout; bytes, which no view should have, as text."""
    click.echo(json.dumps(value, indent=2, ensure_ascii=False, default=str))


def print_table(columns: Sequence[str], rows: Iterable[Sequence[Any]], title: str = "") -> None:
    """Names come from users: nothing in them is taken for markup. A column called `#name` is of numbers.

    Where stdout is no terminal, nothing is folded: programs read it.
    """
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, pad_edge=False, title_justify="left", show_edge=False, header_style="bold")
    for column in columns:
        table.add_column(
            column.removeprefix("#"),
            justify="right" if column.startswith("#") else "left",
            overflow="fold",
            no_wrap=column.startswith("#"),
        )
    for row in rows:
        table.add_row(*(Text(str(cell)) for cell in row))
    width = None if sys.stdout.isatty() else WIDTH_OF_FILES
    console = Console(file=sys.stdout, markup=False, highlight=False, emoji=False, width=width)
    if title:
        console.print(Text(title, style="bold"))
    console.print(table)


def amounts_text(amounts: Mapping[str, int], zeros: bool = False) -> str:
    """`gpu 2, mcpu 500`; without what is zero."""
    return ", ".join(f"{key} {amount}" for key, amount in amounts.items() if amount or zeros) or "-"


def asked_amounts(amounts: Mapping[str, int]) -> dict[str, int]:
    """Without its one slot of `step_run`, which every request has and which says nothing."""
    return {key: amount for key, amount in amounts.items() if key != "step_run"}


def moment_text(at: float) -> str:
    """Month, day and time of day, here."""
    return datetime.fromtimestamp(at).strftime("%m-%d %H:%M:%S")


def causes_text(causes: Mapping[str, str]) -> str:
    """`p: at_limit, q: no_policy`."""
    return ", ".join(f"{pool}: {cause}" for pool, cause in sorted(causes.items()))


def no_such_pool(name: str, known: Iterable[str], field: str = "POOL") -> BadInput:
    """The error for a pool that is not there; it names those that are."""
    return BadInput(field, name, f"one of {', '.join(known) or 'none, for there are no pools'}")


def pool_in(running: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A pool of the running configuration. BadInput if there is none of this name."""
    for pool in running["pools"]:
        if pool["name"] == name:
            return dict(pool)
    raise no_such_pool(name, [pool["name"] for pool in running["pools"]])
