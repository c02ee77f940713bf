"""Job traces: rows of .csv or .csv.gz files as jobs to replay.

Columns `submit_s,duration_s,gpus,requester` are needed; `priority`, `pool`, `mcpu` and `memory_mb` are read where
they are there and not blank, others are ignored. Rows stand in the order of their submission. A file is read row by
row: memory holds the jobs, never the file's text; rows, line length and amounts are limited (`pools.limits`).
"""

from __future__ import annotations

import csv
import gzip
import math
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

from .errors import MISSING, BadInput, shown
from .limits import (
    AMOUNT_MAX,
    PRIORITY_ABS_MAX,
    SECONDS_MAX,
    TRACE_LINE_MAX_CHARS,
    TRACE_MAX_ROWS,
    check_integer,
    check_name,
)

NEEDED = ("submit_s", "duration_s", "gpus", "requester")
OPTIONAL = ("priority", "pool", "mcpu", "memory_mb")

_DIGITS_MAX = 20


class TraceJob(NamedTuple):
    """One job. `id` is its row's number, from 1, the heading not counted."""

    id: str
    submit_s: float
    duration_s: float
    gpus: int
    requester: str
    priority: int = 0
    pool: str = ""
    mcpu: int = 0
    memory_mb: int = 0


def read_trace(path: str | Path, limit: int | None = None) -> list[TraceJob]:
    """The first `limit` jobs (all, if None) of one trace, by submission.

    Raises BadInput naming file, line, column, value and what would be right, also for a trace without rows and
    for one that is not sorted. Rows behind the limit are not looked at.
    """
    if limit is not None:
        check_integer("limit", limit, 1, TRACE_MAX_ROWS)
    name = str(path)
    jobs: list[TraceJob] = []
    try:
        with _opened(path) as text:
            for job in _rows(text, name):
                jobs.append(job)
                if len(jobs) == limit:
                    break
    except UnicodeDecodeError:
        raise BadInput("TRACE", name, "text in UTF-8", f"{name}, after {len(jobs)} rows") from None
    except (gzip.BadGzipFile, EOFError, zlib.error) as problem:
        raise BadInput("TRACE", name, f"a whole gzip file, as its name says: {problem}", name) from None
    except (OSError, ValueError) as problem:
        reason = getattr(problem, "strerror", None) or str(problem)
        raise BadInput("TRACE", name, f"a .csv or .csv.gz file that can be read: {reason}") from None
    if not jobs:
        raise BadInput("TRACE", name, "at least one row under the heading", name)
    return jobs


def _opened(path: str | Path) -> IO[str]:
    if str(path).endswith(".csv.gz"):
        return gzip.open(path, "rt", encoding="utf-8-sig", newline="")
    if str(path).endswith(".csv"):
        return open(path, encoding="utf-8-sig", newline="")
    raise BadInput("TRACE", str(path), "a file whose name ends in .csv or .csv.gz")


def _rows(text: IO[str], name: str) -> Iterator[TraceJob]:
    lines = _limited(text, name)
    reader = csv.reader(lines, strict=True)
    columns: _Columns | None = None
    width = 0
    row_count, submit_before_s = 0, 0.0
    names: set[str] = set()
    while True:
        try:
            cells = next(reader, None)
        except csv.Error as problem:
            where = f"{name}:{reader.line_num}"
            raise BadInput("TRACE", name, f"comma-separated values: {problem}", where) from None
        if cells is None:
            return
        where = f"{name}:{reader.line_num}"
        if columns is None:
            columns, width = _columns(cells, where), len(cells)
            continue
        if not cells:
            continue  # an empty line, such as the last one often is
        if len(cells) != width:
            raise BadInput(
                "row", ",".join(cells), f"{width} cells, as the heading has, and not {len(cells)}", where
            )
        row_count += 1
        if row_count > TRACE_MAX_ROWS:
            raise BadInput("TRACE", f"row {row_count}", f"at most {TRACE_MAX_ROWS} rows", where)
        job = _job(cells, columns, str(row_count), where, names)
        if job.submit_s < submit_before_s:
            expected = f"rows sorted by submit_s; the row before has {submit_before_s:g}"
            raise BadInput("submit_s", cells[columns.submit_s].strip(), expected, where)
        submit_before_s = job.submit_s
        yield job


def _limited(text: IO[str], name: str) -> Iterator[str]:
    """The lines; a file without line ends is not read into memory as one."""
    number = 0
    while line := text.readline(TRACE_LINE_MAX_CHARS + 1):
        number += 1
        if len(line) > TRACE_LINE_MAX_CHARS:
            raise BadInput(
                "TRACE", line, f"lines of at most {TRACE_LINE_MAX_CHARS} characters", f"{name}:{number}"
            )
        yield line


class _Columns(NamedTuple):
    """Where in a row each column stands; `more`: those that need not be there."""

    submit_s: int
    duration_s: int
    gpus: int
    requester: int
    more: tuple[tuple[str, int], ...]


def _columns(heading: list[str], where: str) -> _Columns:
    names = [cell.strip() for cell in heading]
    for column in (*NEEDED, *OPTIONAL):
        if names.count(column) > 1:
            raise BadInput(column, "twice in the heading", "each column once", where)
    for column in NEEDED:
        if column not in names:
            expected = f"a column of the heading, which has {shown(', '.join(names))}"
            raise BadInput(column, MISSING, expected, where)
    more = tuple((column, names.index(column)) for column in OPTIONAL if column in names)
    submit_s, duration_s, gpus, requester = (names.index(column) for column in NEEDED)
    return _Columns(submit_s, duration_s, gpus, requester, more)


def _job(cells: list[str], columns: _Columns, row: str, where: str, names: set[str]) -> TraceJob:
    requester = cells[columns.requester].strip()
    if requester not in names:  # each is looked at once: a trace has many rows of few
        names.add(check_name("requester", requester, where))
    more = {}
    for column, index in columns.more:
        if (text := cells[index]) and (text := text.strip()):
            more[column] = _more(column, text, where, names)
    return TraceJob(
        row,
        _seconds("submit_s", cells[columns.submit_s], where),
        _seconds("duration_s", cells[columns.duration_s], where),
        _integer("gpus", cells[columns.gpus].strip(), 0, AMOUNT_MAX, where),
        requester,
        **more,
    )


def _more(column: str, text: str, where: str, names: set[str]) -> Any:
    """What a column holds that need not be there."""
    if column == "pool":
        if text not in names:
            names.add(check_name("pool", text, where))
        return text
    low, high = (-PRIORITY_ABS_MAX, PRIORITY_ABS_MAX) if column == "priority" else (0, AMOUNT_MAX)
    return _integer(column, text, low, high, where)


def _seconds(column: str, text: str, where: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= SECONDS_MAX:
        raise BadInput(column, text.strip(), f"seconds, a number from 0 to {SECONDS_MAX}", where)
    return value


def _integer(column: str, text: str, low: int, high: int, where: str) -> int:
    digits = text[1:] if text[:1] in ("-", "+") else text
    if digits.isascii() and digits.isdigit() and len(text) <= _DIGITS_MAX:
        value = int(text)
        if low <= value <= high:
            return value
    raise BadInput(column, text, f"an integer from {low} to {high}", where)
