"""Job traces for `pools replay`: every malformed row is one error with file, line, column and value."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from conftest import BadInputReader

from ray_pools.limits import TRACE_LINE_MAX_CHARS
from ray_pools.trace import TraceJob, read_trace

HEADING = "submit_s,duration_s,gpus,requester,priority,pool\n"
ROWS = HEADING + "0,10.5,1,ml,2,big\n3,20,4,batch,,\n"


def _written(folder: Path, text: str, name: str = "jobs.csv") -> Path:
    path = folder / name
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return path


@pytest.mark.parametrize("name", ["jobs.csv", "jobs.csv.gz"])
def test_a_trace_is_read(tmp_path: Path, name: str) -> None:
    first, second = TraceJob("1", 0.0, 10.5, 1, "ml", 2, "big"), TraceJob("2", 3.0, 20.0, 4, "batch")
    assert read_trace(_written(tmp_path, ROWS, name)) == [first, second]
    assert read_trace(_written(tmp_path, ROWS, name), limit=1) == [first]


def test_columns_are_found_by_name_and_others_ignored(tmp_path: Path) -> None:
    text = '\ufeffcensor,requester,gpus,duration_s,submit_s\r\n0,"a, b",2,5,1\r\n\r\n'
    assert read_trace(_written(tmp_path, text)) == [TraceJob("1", 1.0, 5.0, 2, "a, b")]


@pytest.mark.parametrize(
    ("row", "field", "word"),
    [
        (",10,1,ml,,", "submit_s", "number"),
        ("x,10,1,ml,,", "submit_s", "number"),
        ("nan,10,1,ml,,", "submit_s", "number"),
        ("1,-10,1,ml,,", "duration_s", "number"),
        ("1,1e300,1,ml,,", "duration_s", "number"),
        ("1,10,,ml,,", "gpus", "integer"),
        ("1,10,1.5,ml,,", "gpus", "integer"),
        ("1,10,-1,ml,,", "gpus", "integer"),
        ("1,10,--1,ml,,", "gpus", "integer"),
        ("1,10," + "9" * 5000 + ",ml,,", "gpus", "integer"),
        ("1,10,1,,,", "requester", "name"),
        ("1,10,1,a\x07b,,", "requester", "name"),
        ("1,10,1," + "x" * 10_000 + ",,", "requester", "name"),
        ("1,10,1,ml,high,", "priority", "integer"),
        ("1,10,1,ml,,a\x1bb", "pool", "name"),
        ("1,10,1", "row", "6 cells, as the heading has, and not 3"),
        ("1,10,1,a,0,p,extra", "row", "6 cells, as the heading has, and not 7"),
        ('1,10,1,"ml"x,,', "TRACE", "comma-separated"),
        ("x" * (TRACE_LINE_MAX_CHARS + 1), "TRACE", "lines of at most"),
        ("0.5,10,1,ml,,\n0.25,10,1,ml,,", "submit_s", "sorted"),
    ],
)
def test_a_malformed_row(tmp_path: Path, row: str, field: str, word: str, refuses: BadInputReader) -> None:
    line = 3 + row.count("\n")
    path = _written(tmp_path, f"{HEADING}0,10,1,ml,,\n{row}\n")
    with refuses(field, word, where=f"jobs.csv:{line}"):
        read_trace(path)
    assert len(read_trace(path, limit=1)) == 1  # what is behind the limit is not looked at


@pytest.mark.parametrize(
    ("text", "field", "word"),
    [
        ("", "TRACE", "at least one row"),
        (HEADING, "TRACE", "at least one row"),
        ("submit_s,duration_s,gpus\n1,2,3\n", "requester", "column"),
        ("submit_s,duration_s,gpus,gpus,requester\n1,2,3,4,a\n", "gpus", "once"),
    ],
)
def test_a_file_without_jobs_or_columns(
    tmp_path: Path, text: str, field: str, word: str, refuses: BadInputReader
) -> None:
    with refuses(field, word):
        read_trace(_written(tmp_path, text))


def test_a_file_that_is_not_what_its_name_says(tmp_path: Path, refuses: BadInputReader) -> None:
    path = tmp_path / "jobs.csv.gz"
    path.write_text(ROWS)
    with refuses("TRACE", "gzip"):
        read_trace(path)
    path.write_bytes(gzip.compress(HEADING.encode() + b"0,10,1,ml,,\n" * 1000)[:-20])
    with refuses("TRACE", "gzip"):
        read_trace(path)
    path = tmp_path / "jobs.csv"
    path.write_bytes(HEADING.encode() + b"0,10,1,\xff\xfe,,\n")
    with refuses("TRACE", "UTF-8"):
        read_trace(path)
    with refuses("TRACE", ".csv or .csv.gz"):
        read_trace(tmp_path / "jobs.parquet")
    with refuses("TRACE", "No such file"):
        read_trace(tmp_path / "none.csv")
    for limit in (0, -1, True):
        with refuses("limit", "integer"):
            read_trace(_written(tmp_path, ROWS), limit)
