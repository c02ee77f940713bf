"""`--compare FILE`: this run's figures against a stored run's, and what got worse by more than the spread."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.figures import Figure
from ray_pools.errors import BadInput

EXPECTED = "a file of lines that `python -m benchmarks --json` printed"


class Worse(NamedTuple):
    """A figure that got worse. By its ratio, where both runs have one; else by its value. `by`: a share of before."""

    name: str
    what: str
    before: float
    now: float
    by: float
    spread: float

    def line(self) -> str:
        """For people."""
        return (
            f"worse: {self.name}: {self.what} {self.now:.4g}, was {self.before:.4g}: {self.by:.0%} worse,"
            f" and the spread is {self.spread:.0%}"
        )


def read(file: Path) -> dict[str, Figure]:
    """The figures of a stored run, by name.

    Raises:
        BadInput: there is no such file, or it is none of these; names the line.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise BadInput("--compare", str(file), f"{EXPECTED} ({problem})") from None
    found: dict[str, Figure] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            figure = _figure(line, f"{file}, line {number}")
            if figure.name in found:
                raise BadInput(
                    "name", figure.name, "once in a file: it has two runs", f"{file}, line {number}"
                )
            found[figure.name] = figure
    if not found:
        raise BadInput("--compare", str(file), f"{EXPECTED}; it has none")
    return found


def _figure(line: str, where: str) -> Figure:
    try:
        given = json.loads(line)
    except ValueError:
        raise BadInput("--compare", line[:80], EXPECTED, where) from None
    if not isinstance(given, Mapping):
        raise BadInput("--compare", given, EXPECTED, where)
    for name in Figure._fields:
        if name not in given:
            raise BadInput(name, None, f"in every line, as of {EXPECTED}", where)
    for name, types in _TYPES.items():
        value = given[name]
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            raise BadInput(name, value, _SHOWN[types], where)
    return Figure(**{name: given[name] for name in Figure._fields})


_NONE = type(None)
_TEXT, _NUMBER, _MAYBE, _VERDICT = (str,), (int, float), (int, float, _NONE), (bool, _NONE)
_TYPES: dict[str, tuple[type[Any], ...]] = {
    "name": _TEXT,
    "value": _NUMBER,
    "unit": _TEXT,
    "ratio": _MAYBE,
    "target": _TEXT,
    "met": _VERDICT,
    "spread": _NUMBER,
}
_SHOWN = {
    _TEXT: "text",
    _NUMBER: "a number",
    _MAYBE: "a number, or null",
    _VERDICT: "true, false, or null",
}


def benchmarks_of(figures: Iterable[str]) -> list[str]:
    """The benchmarks that figures of these names belong to, once each and in order."""
    return list(dict.fromkeys(name.partition(":")[0] for name in figures))


def worse(before: Mapping[str, Figure], now: Sequence[Figure]) -> list[Worse]:
    """What got worse by more than the spread: the larger one of the two runs, for each may have been the lucky one."""
    found = []
    for figure in now:
        old = before.get(figure.name)
        if old is None:
            continue
        by_ratio = old.ratio is not None and figure.ratio is not None
        was, is_now = (old.ratio, figure.ratio) if by_ratio else (old.value, figure.value)
        assert was is not None
        assert is_now is not None
        more = (is_now - was) / abs(was) if was else float(is_now != was)
        by = -more if figure.more_is_better else more
        spread = max(old.spread, figure.spread)
        if by > spread:
            found.append(Worse(figure.name, "ratio" if by_ratio else figure.unit, was, is_now, by, spread))
    return found


def report(before: Mapping[str, Figure], now: Sequence[Figure]) -> tuple[list[str], bool]:
    """Lines for people, and whether nothing got worse. What only one of the runs has is said, and no verdict."""
    found = worse(before, now)
    names = {figure.name for figure in now}
    lines = [each.line() for each in found]
    lines += [f"not in this run: {name}" for name in before if name not in names]
    lines += [f"not in the file: {figure.name}" for figure in now if figure.name not in before]
    compared = len(names & set(before))
    lines.append(f"{compared} figures compared, {len(found)} worse by more than the spread")
    return lines, not found
