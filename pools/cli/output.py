"""What commands print: tables of at most the terminal's width, JSON instead, and progress to stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import IO, Any

import click

from ray_pools.errors import BadInput, Refused

WIDTH_OF_FILES = 240
"""Columns where stdout is no terminal: enough for two names."""

_NAME_LEAST, _TEXT_LEAST, _GAP = 16, 6, 3
"""Columns that the first column keeps if it has as many, that other text keeps, and between two columns of a table."""


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


def print_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[Any]],
    title: str = "",
    width_of_files: int | None = None,
) -> None:
    """Names come from users: nothing in them is taken for markup. A column called `#name` is of numbers.

    Numbers are never cut and names never vanish: a table that is too wide for that is printed in parts, below each
    other, and each begins with the names. Where stdout is no terminal, nothing is folded: programs read it.
    """
    from rich.box import SIMPLE_HEAD
    from rich.cells import cell_len
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    width = None if sys.stdout.isatty() else width_of_files or WIDTH_OF_FILES
    console = Console(file=sys.stdout, markup=False, highlight=False, emoji=False, width=width)
    if title:
        console.print(Text(title, style="bold"))
    cells = [[str(cell) for cell in row] for row in rows]
    natural = [
        max(cell_len(text) for text in (column.removeprefix("#"), *(row[at] for row in cells)))
        for at, column in enumerate(columns)
    ]
    for part in _parts(columns, natural, console.width):
        table = Table(
            box=SIMPLE_HEAD, pad_edge=False, title_justify="left", show_edge=False, header_style="bold"
        )
        for at in part:
            table.add_column(
                columns[at].removeprefix("#"),
                justify="right" if columns[at].startswith("#") else "left",
                overflow="fold",
                no_wrap=columns[at].startswith("#"),
                min_width=_least(columns, natural, at),
            )
        for row in cells:
            table.add_row(*(Text(row[at]) for at in part))
        console.print(table)


def _least(columns: Sequence[str], natural: Sequence[int], at: int) -> int:
    """The narrowest that a column may become: a number is not cut, a name is folded."""
    return (
        natural[at]
        if columns[at].startswith("#")
        else min(natural[at], _NAME_LEAST if at == 0 else _TEXT_LEAST)
    )


def _parts(columns: Sequence[str], natural: Sequence[int], width: int) -> list[list[int]]:
    """Which columns stand beside each other: all of them if they fit, else in each part those that name the row, and as
    many of the others as fit.
    """
    least = [_least(columns, natural, at) for at in range(len(columns))]
    numbers = [at for at, column in enumerate(columns) if column.startswith("#") and at > 0]
    if not numbers or sum(least) + _GAP * (len(least) - 1) <= width:
        return [[*range(len(columns))]]
    names = [*range(numbers[0])]
    lead = sum(min(natural[at], _NAME_LEAST) + _GAP for at in names)
    parts: list[list[int]] = [[*names]]
    left = width - lead
    for at in range(len(names), len(columns)):
        if least[at] > left and len(parts[-1]) > len(names):
            parts.append([*names])
            left = width - lead
        parts[-1].append(at)
        left -= least[at] + _GAP
    return parts


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


def without_policy(requester: str) -> Refused:
    """The answer about a requester of whom nothing is known."""
    return Refused("no_policy", f"requester {requester!r} has no policy on any pool, and no requests")


def pool_in(running: Mapping[str, Any], name: str, field: str = "POOL") -> dict[str, Any]:
    """A pool of the running configuration. BadInput if there is none of this name."""
    for pool in running["pools"]:
        if pool["name"] == name:
            return dict(pool)
    raise no_such_pool(name, [pool["name"] for pool in running["pools"]], field)
