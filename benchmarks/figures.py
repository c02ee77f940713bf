"""What every benchmark gives: figures, each a ratio against something measured in the same run."""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TextIO, TypeVar

from rich.console import Console
from rich.table import Table

T = TypeVar("T")


class Figure(NamedTuple):
    """One result. `name` begins with its benchmark's and a colon. `spread` is (max - min) / median over the rounds;
    `met` None: reported without a verdict.
    """

    name: str
    value: float
    unit: str
    ratio: float | None
    target: str
    met: bool | None
    spread: float

    @property
    def more_is_better(self) -> bool:
        """By its unit: of what happens in a second the more the better, of all else the less."""
        return self.unit.endswith(("/s", "% of capacity"))


QUICK_ENV = "RAY_POOLS_BENCH_QUICK"
"""Set by `--quick`; in the environment, so that processes of a benchmark know it too."""


def is_quick() -> bool:
    """This run is only to see that everything works."""
    return os.environ.get(QUICK_ENV) == "1"


def size(whole: T, quick: T) -> T:
    """How large a part of a benchmark is: as it is meant, or just enough to see that it works (`--quick`)."""
    return quick if is_quick() else whole


def verdict(met: bool) -> bool | None:
    """Of a target. A quick run has none: its figures mean nothing."""
    return None if is_quick() else met


def middle(values: Sequence[float]) -> tuple[float, float]:
    """The median and the spread of the rounds."""
    median = statistics.median(values)
    return median, (max(values) - min(values)) / median if median else 0.0


def ratios(values: Sequence[float], others: Sequence[float]) -> float:
    """The median of the rounds' ratios: each round has its own thing to compare with."""
    return statistics.median(a / b for a, b in zip(values, others, strict=True))


def rounds(count: int, *measures: Callable[[], float]) -> list[list[float]]:
    """Each measure `count` times, in turn (a b c a b c ...), so that a machine's drift hits all alike."""
    found: list[list[float]] = [[] for _ in measures]
    for _ in range(count):
        for values, measure in zip(found, measures, strict=True):
            values.append(measure())
    return found


def say(text: str) -> None:
    """What is no figure, such as why there is none."""
    print(text, file=sys.stderr, flush=True)


def show(figures: Iterable[Figure], as_json: bool, out: TextIO) -> list[Figure]:
    """Prints them to `out`, as JSON lines as they come or as a table; returns them."""
    found: list[Figure] = []
    for figure in figures:
        found.append(figure)
        if as_json:
            print(json_line(figure), file=out, flush=True)
    if not as_json:
        print_table(found, out)
    return found


def json_line(figure: Figure) -> str:
    """As `--json` shows it, and `--compare` reads it."""
    shown = {k: round(v, 4) if isinstance(v, float) else v for k, v in figure._asdict().items()}
    return json.dumps(shown)


def print_table(figures: Sequence[Figure], out: TextIO) -> None:
    """For people."""
    if not figures:
        return
    table = Table(box=None)
    for column in ("name", "value", "unit", "ratio", "target", "met", "spread"):
        table.add_column(column, justify="left" if column in ("name", "unit", "target", "met") else "right")
    for f in figures:
        met = "" if f.met is None else "yes" if f.met else "NO"
        ratio = "" if f.ratio is None else f"{f.ratio:.2f}"
        table.add_row(f.name, f"{f.value:,.4g}", f.unit, ratio, f.target, met, f"{f.spread:.0%}")
    Console(file=out, width=120 if not out.isatty() else None).print(table)
