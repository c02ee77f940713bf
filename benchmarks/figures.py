"""What every benchmark gives: figures, each a ratio against something measured in the same run."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from rich.console import Console
from rich.table import Table


class Figure(NamedTuple):
    """One result. `spread` is (max - min) / median over the rounds; `met` None: reported without a verdict."""

    name: str
    value: float
    unit: str
    ratio: float | None
    target: str
    met: bool | None
    spread: float


def middle(values: Sequence[float]) -> tuple[float, float]:
    """The median and the spread of the rounds."""
    median = statistics.median(values)
    return median, (max(values) - min(values)) / median if median else 0.0


def rounds(count: int, *measures: Callable[[], float]) -> list[list[float]]:
    """Each measure `count` times, in turn (a b c a b c ...), so that a machine's drift hits all alike."""
    found: list[list[float]] = [[] for _ in measures]
    for _ in range(count):
        for values, measure in zip(found, measures, strict=True):
            values.append(measure())
    return found


def print_figures(figures: Iterable[Figure], as_json: bool) -> bool:
    """As JSON lines or a table; True if no target was missed."""
    figures = list(figures)
    if as_json:
        for figure in figures:
            shown = {k: round(v, 4) if isinstance(v, float) else v for k, v in figure._asdict().items()}
            print(json.dumps(shown))
            sys.stdout.flush()
    else:
        table = Table(box=None)
        for column in ("name", "value", "unit", "ratio", "target", "met", "spread"):
            table.add_column(
                column, justify="left" if column in ("name", "unit", "target", "met") else "right"
            )
        for f in figures:
            met = "" if f.met is None else "yes" if f.met else "NO"
            ratio = "" if f.ratio is None else f"{f.ratio:.2f}"
            table.add_row(f.name, f"{f.value:,.4g}", f.unit, ratio, f.target, met, f"{f.spread:.0%}")
        Console(width=100 if not sys.stdout.isatty() else None).print(table)
    return all(figure.met is not False for figure in figures)
