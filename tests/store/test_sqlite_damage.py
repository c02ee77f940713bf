"""Every byte: the WAL cut anywhere, any byte of either file flipped, the database cut, any write or sync failing.

Stands for: a torn write, a bad sector, a disk that is full or broken. In CI a part of the offsets, by make faults all.
What a shorter log lacks is found by the peers' memory of (epoch, seq): here its head must say how short it is.
"""

from __future__ import annotations

import os
import sqlite3
import struct
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from failing_disk import Disk, available, failing_disk

from ray_pools.core.link import Link, Message, ShorterLog
from ray_pools.store import AppendFailed, Corrupt, ForeignStore, Row, StoreError, SyncFailed, open_reader
from ray_pools.store.sqlite import SqliteStore
from ray_pools.store.sqlite_file import database_path

NAME = "pool-a"
TURNS, PER_TURN = 12, 3
FAULTS = pytest.param(1, marks=(pytest.mark.faults, pytest.mark.slow), id="every byte")


def turn(number: int, count: int = PER_TURN) -> list[tuple[float, bytes]]:
    """An actor's turn: one time."""
    return [(float(number), b"event %d of turn %d" % (place, number)) for place in range(count)]


class Files:
    """A log's database and WAL, to be damaged again and again in a folder of their own."""

    def __init__(self, folder: Path, database: bytes, wal: bytes) -> None:
        folder.mkdir()
        self.folder = str(folder)
        self.path = database_path(self.folder, NAME)
        self.good = {"": database, "-wal": wal}
        for suffix, data in self.good.items():
            if data:
                Path(self.path + suffix).write_bytes(data)

    def cut(self, suffix: str, length: int) -> None:
        """The file ends here; lengths must come from high to low."""
        os.truncate(self.path + suffix, length)

    def flip(self, suffix: str, place: int, mask: int) -> None:
        """A byte becomes its own value with these bits changed; with 0, what it was."""
        with open(self.path + suffix, "r+b", buffering=0) as file:
            file.seek(place)
            file.write(bytes([self.good[suffix][place] ^ mask]))

    def rows(self) -> tuple[int, list[Row]]:
        """(The head's seq, all rows), as a process after the crash finds them."""
        if os.path.exists(self.path + "-shm"):
            os.unlink(self.path + "-shm")
        reader = open_reader(self.folder, NAME)
        try:
            return reader.head()[1], list(reader.read())
        finally:
            reader.close()


class Written:
    """Twelve turns, all still in the WAL, or all in the database."""

    def __init__(self, folder: Path) -> None:
        store = SqliteStore(str(folder), NAME)
        store.open()
        seq = 0
        for number in range(TURNS):
            seq = store.append(turn(number), seq)
        self.rows = list(store.read())
        self.database = Path(store.where).read_bytes()
        self.wal = Path(store.where + "-wal").read_bytes()
        store.close()
        self.closed = Path(store.where).read_bytes()


@pytest.fixture
def written(tmp_path: Path) -> Written:
    return Written(tmp_path / "written")


def commits_end_at(wal: bytes) -> list[int]:
    """Where in a WAL each transaction's last frame ends. The first is the opening, which raises the epoch."""
    (page_bytes,) = struct.unpack_from(">I", wal, 8)
    ends = []
    for place in range(32, len(wal) - 23, 24 + page_bytes):
        (pages,) = struct.unpack_from(">I", wal, place + 4)
        if pages:
            ends.append(place + 24 + page_bytes)
    return ends


@pytest.mark.parametrize("stride", [131, FAULTS])
def test_a_wal_that_is_cut_anywhere_gives_the_whole_turns_before_the_cut(
    written: Written, tmp_path: Path, stride: int
) -> None:
    ends = commits_end_at(written.wal)
    assert len(ends) == TURNS + 1
    files = Files(tmp_path / "copy", written.database, written.wal)
    offsets = {*range(0, len(written.wal) + 1, stride), *ends, *(end - 1 for end in ends)}
    for length in sorted(offsets, reverse=True):
        files.cut("-wal", length)
        whole = max(0, sum(end <= length for end in ends) - 1)
        head, rows = files.rows()
        assert rows == written.rows[: whole * PER_TURN], f"cut at {length}"
        assert head == len(rows)


def judged(files: Files, expected: list[Row], what: str) -> str:
    """refused, same, or shorter by whole turns; anything else is a silent loss."""
    try:
        head, rows = files.rows()
    except StoreError:
        return "refused"
    assert rows == expected[: len(rows)], what
    assert len(rows) % PER_TURN == 0, what
    assert head == len(rows), f"{what}: the head does not say how many rows are there"
    if len(rows) == len(expected):
        return "same"
    is_found_by_the_other_side(head, len(expected))
    return "shorter"


def is_found_by_the_other_side(opened: int, seen: int) -> None:
    """By the check that each exchange makes (`test_lost_logs.py`: also where nothing else happens)."""
    coordinator = Link("coordinator", "pool:a", epoch=1, head=seen)
    hello = Message("pool:a", "", 2, opened, 0, 0, [], 0, [], 0, 0, 0, opened=opened)
    with pytest.raises(ShorterLog):
        coordinator.check(hello)


@pytest.mark.parametrize("stride", [173, FAULTS])
@pytest.mark.parametrize("file", ["database", "wal"])
def test_a_flipped_byte_never_changes_a_row_nor_hides_one_in_silence(
    written: Written, tmp_path: Path, file: str, stride: int
) -> None:
    suffix = "" if file == "database" else "-wal"
    files = Files(
        tmp_path / "copy", *((written.closed, b"") if file == "database" else (written.database, written.wal))
    )
    seen: Counter[str] = Counter()
    for place in range(0, len(files.good[suffix]), stride):
        files.flip(suffix, place, 0xFF)
        seen[judged(files, written.rows, f"byte {place} of the {file}")] += 1
        files.flip(suffix, place, 0)
    assert seen["refused"] if file == "database" else seen["shorter"], "the damage did nothing"


@pytest.mark.parametrize("stride", [61, FAULTS])
def test_a_database_that_is_cut_is_refused_or_says_how_short_it_is(
    written: Written, tmp_path: Path, stride: int
) -> None:
    files = Files(tmp_path / "copy", written.closed, b"")
    seen: Counter[str] = Counter()
    for length in range(len(written.closed) - 1, -1, -stride):
        files.cut("", length)
        seen[judged(files, written.rows, f"cut at {length}")] += 1
    assert seen["refused"] > 0


# --- writes and syncs that fail


class Checkpoints(sqlite3.Connection):
    """Moves the WAL into the database after every few pages, so that this is among the writes that fail."""

    def execute(self, sql: str, *values: Any) -> sqlite3.Cursor:
        found = super().execute(sql, *values)
        if sql.startswith("PRAGMA journal_size_limit"):
            super().execute("PRAGMA wal_autocheckpoint = 6").fetchone()
        return found


class Life:
    """A writer's life on a disk that fails once; what was acknowledged must be there, and nothing in part."""

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)
        self.store = SqliteStore(self.folder, NAME, connection=Checkpoints)
        self.acknowledged: list[bytes] = []
        self.maybe: list[bytes] = []
        self.errors: list[StoreError] = []

    def tried(self, work: Callable[[], object]) -> bool:
        """False once a sync failed: a process ends there."""
        try:
            work()
        except SyncFailed as error:
            self.errors.append(error)
            return False
        except AppendFailed as error:
            self.errors.append(error)
        return True

    def append(self, records: list[tuple[float, bytes]]) -> bool:
        bodies = [body for _, body in records]
        try:
            seq = self.store.append(records, len(self.acknowledged))
        except SyncFailed as error:
            self.errors.append(error)
            self.maybe = bodies
            return False
        except AppendFailed as error:
            self.errors.append(error)
            self.check()
            return True
        self.acknowledged += bodies
        assert seq == len(self.acknowledged)
        return True

    def check(self) -> None:
        """A reader sees what was acknowledged and nothing else."""
        reader = open_reader(self.folder, NAME)
        assert [row.body for row in reader.read(reader.first_seq())] == self.acknowledged[
            reader.first_seq() - 1 :
        ]
        reader.close()

    def lives(self) -> bool:
        """Until a sync fails, or to the end. The disk fails somewhere in here."""
        for number in range(8):
            if not self.append(turn(number, (1, 3, 60)[number % 3])):
                return False
            if number == 5:
                if self.acknowledged and not self.tried(self.snapshot):
                    return False
        snapshot = self.store.latest_snapshot()
        return snapshot is None or self.tried(lambda: self.store.prune(snapshot.seq))

    def snapshot(self) -> None:
        self.store.snapshot(len(self.acknowledged), b"state" * 2000)

    def is_served_again(self, disk: Disk) -> None:
        """The disk is well: the same store goes on, or its successor does; and all is there."""
        disk.heals()
        if any(isinstance(error, SyncFailed) for error in self.errors):
            with pytest.raises(SyncFailed):
                self.store.append(turn(99), len(self.acknowledged))
            self.store = SqliteStore(self.folder, NAME)
            self.store.open()
            if self.store.head()[1] > len(self.acknowledged):
                self.acknowledged += self.maybe
        assert self.append(turn(100, 5))
        self.check()
        self.store.close()


@pytest.fixture
def disk() -> Iterator[Disk]:
    if available():
        pytest.skip(available())
    with failing_disk() as disk:
        yield disk


@pytest.mark.parametrize("lasts", [1, 1_000_000], ids=["one", "all from there on"])
@pytest.mark.parametrize("kind", ["full", "write", "sync"])
def test_whichever_write_or_sync_fails_nothing_is_lost_and_nothing_is_there_in_part(
    disk: Disk, tmp_path: Path, kind: str, lasts: int
) -> None:
    """The first, the second, ... until a life is over before the disk fails. `full`: the disk has no room."""
    kinds: Counter[str] = Counter()
    for number in range(1, 1000):
        life = Life(tmp_path / str(number))
        life.store.open()
        disk.breaks(kind, number, lasts)
        life.lives()
        failed = disk.failed
        life.is_served_again(disk)
        kinds.update(type(error).__name__ for error in life.errors)
        if not failed:
            break
        if kind == "sync":
            assert not any(type(error) is AppendFailed for error in life.errors)
    else:
        pytest.fail("no life ends before the disk fails")
    assert not life.errors
    assert number > 5
    assert kinds["AppendFailed" if kind == "full" else "SyncFailed"] > 0, kinds


@pytest.mark.parametrize("kind", ["full", "write", "sync"])
def test_whichever_write_of_an_opening_fails_the_next_one_opens(
    disk: Disk, tmp_path: Path, kind: str
) -> None:
    seen: list[StoreError] = []
    for number in range(1, 200):
        folder = str(tmp_path / str(number))
        store = SqliteStore(folder, NAME)
        disk.breaks(kind, number)
        try:
            store.open()
        except StoreError as error:
            seen.append(error)
        failed = disk.failed
        disk.heals()
        successor = SqliteStore(folder, NAME)
        epoch = successor.open()
        assert 1 <= epoch <= 2
        assert successor.append(turn(1), 0) == PER_TURN
        successor.close()
        if not failed:
            assert seen
            assert not any(isinstance(error, (Corrupt, ForeignStore)) for error in seen), seen
            return
    pytest.fail("no opening ends before the disk fails")
