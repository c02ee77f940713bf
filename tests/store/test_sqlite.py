"""What is special to the sqlite store: its file, its settings, a full disk, a failed commit.

Stands for: another program's file, a newer format, a setting that was not taken, torn and cut files.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ray_pools.store import (
    AppendFailed,
    Corrupt,
    ForeignStore,
    StoreError,
    SyncFailed,
    UnsafeStore,
    open_reader,
)
from ray_pools.store.sqlite import READ_MAX_BATCHES, SqliteReader, SqliteStore
from ray_pools.store.sqlite_file import APPLICATION_ID, FORMAT_VERSION, database_path

NAME = "pool-a"
IO_ERROR_FSYNC = 10 | 4 << 8


def turn(first: int, count: int, size: int = 8) -> list[tuple[float, bytes]]:
    return [(float(number), b"%d" % number * size) for number in range(first, first + count)]


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(tmp_path / "logs")


@pytest.fixture
def store(folder: str) -> Iterator[SqliteStore]:
    store = SqliteStore(folder, NAME)
    store.open()
    yield store
    store.close()


def raw(path: str) -> sqlite3.Connection:
    return sqlite3.connect(path, isolation_level=None)


def pragma(store: SqliteStore, text: str) -> Any:
    assert store._db is not None
    return store._db.execute(f"PRAGMA {text}").fetchone()[0]


class Failing(sqlite3.Connection):
    """Fails at statements that start with a word, as a disk would."""

    at = ""
    error: Exception = sqlite3.OperationalError()

    def execute(self, sql: str, *values: Any) -> sqlite3.Cursor:
        if self.at and sql.startswith(self.at):
            raise self.error
        return super().execute(sql, *values)

    def executemany(self, sql: str, *values: Any) -> sqlite3.Cursor:
        if self.at and sql.startswith(self.at):
            raise self.error
        return super().executemany(sql, *values)


class FailingStore(SqliteStore):
    def __init__(self, folder: str) -> None:
        super().__init__(folder, NAME, connection=Failing)

    def fail(self, at: str, error: Exception) -> None:
        assert isinstance(self._db, Failing)
        self._db.at, self._db.error = at, error


def os_error(message: str, code: int | None = None) -> sqlite3.OperationalError:
    error = sqlite3.OperationalError(message)
    if code is not None:
        vars(error)["sqlite_errorcode"] = code  # as Python sets it from 3.11 on
    return error


# The file


def test_only_its_user_may_read_the_directory(tmp_path: Path) -> None:
    store = SqliteStore(str(tmp_path / "a" / "b"), NAME)
    store.open()
    store.close()
    for made in (tmp_path / "a", tmp_path / "a" / "b"):
        assert stat.S_IMODE(made.stat().st_mode) == 0o700
    assert os.listdir(tmp_path / "a" / "b") == ["pool-a.sqlite"]


def test_the_settings_that_make_a_commit_durable(store: SqliteStore) -> None:
    assert pragma(store, "journal_mode") == "wal"
    assert pragma(store, "synchronous") == 2
    assert pragma(store, "application_id") == APPLICATION_ID
    assert pragma(store, "user_version") == FORMAT_VERSION
    assert pragma(store, "wal_autocheckpoint") > 0


class IgnoresSynchronous(sqlite3.Connection):
    def execute(self, sql: str, *values: Any) -> sqlite3.Cursor:
        return super().execute(sql.replace("synchronous = FULL", "synchronous = NORMAL"), *values)


class IgnoresWal(sqlite3.Connection):
    def execute(self, sql: str, *values: Any) -> sqlite3.Cursor:
        return super().execute(sql.replace("journal_mode = WAL", "journal_mode = DELETE"), *values)


@pytest.mark.parametrize(
    ("connection", "setting"), [(IgnoresSynchronous, "synchronous"), (IgnoresWal, "journal_mode")]
)
def test_settings_that_do_not_keep_promises_are_refused(
    folder: str, connection: type[sqlite3.Connection], setting: str
) -> None:
    store = SqliteStore(folder, NAME, connection=connection)
    with pytest.raises(UnsafeStore, match=setting):
        store.open()
    proper = SqliteStore(folder, NAME)
    assert proper.open() == 1, "a refused opening must not raise the epoch"
    proper.close()


def test_names_map_to_distinct_safe_files() -> None:
    names = [
        "a",
        "A/b",
        "a%2Fb",
        "a/b",
        ".",
        "..",
        "~",
        "größe",
        "x" * 200,
        "x" * 199 + "y",
        "ü" * 200,
        "a b",
    ]
    paths = [database_path("/d", name) for name in names]
    assert len(set(paths)) == len(names)
    for path in paths:
        head, file = os.path.split(path)
        assert head == "/d"
        assert len(os.fsencode(file)) < 230
        assert not file.startswith((".", "~", "-"))


def test_another_application_s_file_is_refused_and_left_alone(folder: str) -> None:
    os.makedirs(folder)
    path = database_path(folder, NAME)
    with_tables = raw(path)
    with_tables.execute("CREATE TABLE log (x)")
    with_tables.close()
    before = Path(path).read_bytes()
    for log in (SqliteStore(folder, NAME).open, SqliteReader(folder, NAME).head):
        with pytest.raises(ForeignStore, match="application_id 0"):
            log()
    assert Path(path).read_bytes() == before
    Path(path).write_text("not a database at all, but a long enough text file" * 100)
    for log in (SqliteStore(folder, NAME).open, SqliteReader(folder, NAME).head):
        with pytest.raises(ForeignStore, match="not a SQLite database"):
            log()


@pytest.mark.parametrize(
    ("version", "words"), [(FORMAT_VERSION + 1, "newer ray-pools"), (0, "no program wrote")]
)
def test_another_format_version_is_refused(store: SqliteStore, folder: str, version: int, words: str) -> None:
    store.close()
    db = raw(store.where)
    db.execute(f"PRAGMA user_version = {version}")
    db.close()
    for log in (SqliteStore(folder, NAME).open, SqliteReader(folder, NAME).head):
        with pytest.raises(ForeignStore, match=words):
            log()


def test_a_log_of_before_the_first_release_is_called_old_and_not_damaged(folder: str) -> None:
    """Whose log's table had a row for each event, and whose format had the same number."""
    path = database_path(folder, NAME)
    os.makedirs(folder)
    db = raw(path)
    db.executescript(
        f"PRAGMA application_id = {APPLICATION_ID}; PRAGMA user_version = 1;"
        "CREATE TABLE head (one INTEGER PRIMARY KEY, name TEXT, epoch INTEGER, base_seq INTEGER, base_chain, seal);"
        "CREATE TABLE log (seq INTEGER PRIMARY KEY, epoch INTEGER, at REAL, chain BLOB, body BLOB);"
        "CREATE TABLE snapshot (seq INTEGER PRIMARY KEY, epoch INTEGER, chain BLOB, seal BLOB, state BLOB);"
    )
    db.close()
    before = Path(path).read_bytes()
    for log in (SqliteStore(folder, NAME).open, SqliteReader(folder, NAME).head):
        with pytest.raises(
            ForeignStore, match=r"it is of an older release.*use that release, or begin with a new"
        ):
            log()
    assert Path(path).read_bytes() == before


def test_a_log_under_another_name_is_refused(store: SqliteStore, folder: str) -> None:
    store.close()
    shutil.copy(store.where, database_path(folder, "pool-b"))
    for log in (SqliteStore(folder, "pool-b").open, SqliteReader(folder, "pool-b").head):
        with pytest.raises(ForeignStore, match="'pool-a', not of 'pool-b'"):
            log()


def test_an_emptied_file_is_damage_and_no_new_log(store: SqliteStore, folder: str) -> None:
    store.close()
    os.truncate(store.where, 0)
    for log in (SqliteStore(folder, NAME).open, SqliteReader(folder, NAME).head):
        with pytest.raises(Corrupt, match="empty"):
            log()
    assert os.path.getsize(store.where) == 0


def test_a_changed_head_is_found(store: SqliteStore, folder: str) -> None:
    store.append(turn(1, 3), 0)
    store.close()
    for column, value in (
        ("epoch", 0),
        ("epoch", "x"),
        ("base_seq", 1),
        ("base_chain", b"0" * 16),
        ("seal", b""),
    ):
        db = raw(store.where)
        (kept,) = db.execute(f"SELECT {column} FROM head").fetchone()
        db.execute(f"UPDATE head SET {column} = ?", (value,))
        for log in (SqliteStore(folder, NAME).open, SqliteReader(folder, NAME).head):
            with pytest.raises(Corrupt, match="head"):
                log()
        db.execute(f"UPDATE head SET {column} = ?", (kept,))
        db.close()
    assert store.open() == 2


def test_rows_that_somebody_else_wrote_stop_the_writer(store: SqliteStore) -> None:
    store.append(turn(1, 3), 0)
    db = raw(store.where)
    db.execute("DELETE FROM log WHERE seq = 3")
    db.close()
    with pytest.raises(Corrupt, match="row 3 was written"):
        store.append(turn(4, 1), 3)


def test_a_vacuum_by_hand_does_no_harm(store: SqliteStore) -> None:
    store.append(turn(1, 300), 0)
    store.snapshot(200, b"state")
    store.prune(100)
    store.close()
    db = raw(store.where)
    db.execute("VACUUM")
    db.close()
    assert store.open() == 2
    assert len(list(store.read(100))) == 201


# Writing


def test_a_full_disk_fails_the_turn_and_the_next_one_works(store: SqliteStore) -> None:
    store.append(turn(1, 3), 0)
    assert store._db is not None
    store._db.execute(f"PRAGMA max_page_count = {pragma(store, 'page_count') + 2}")
    with pytest.raises(AppendFailed, match="full"):
        store.append([*turn(4, 50), (1.0, b"x" * 100_000)], 3)
    with pytest.raises(AppendFailed, match="full"):
        store.snapshot(2, b"x" * 100_000)
    assert [row.seq for row in store.read()] == [1, 2, 3]
    assert store.latest_snapshot() is None
    assert store.append(turn(4, 1), 3) == 4, "what still fits is taken"
    store._db.execute("PRAGMA max_page_count = 1000000")
    assert store.append(turn(5, 50, size=1000), 4) == 54
    assert [row.seq for row in store.read()] == list(range(1, 55))


@pytest.mark.parametrize("code", [IO_ERROR_FSYNC, None])
@pytest.mark.parametrize("write", ["append", "snapshot"])
def test_a_failed_commit_leaves_the_store_unusable(folder: str, code: int | None, write: str) -> None:
    store = FailingStore(folder)
    store.open()
    store.append(turn(1, 3), 0)
    db = store._db
    assert db is not None
    store.fail("COMMIT", os_error("disk I/O error", code))
    with pytest.raises(SyncFailed, match="disk I/O error"):
        store.append(turn(4, 1), 3) if write == "append" else store.snapshot(3, b"")
    store.fail("", Exception())
    with pytest.raises(SyncFailed):
        store.append(turn(4, 1), 3)
    with pytest.raises(SyncFailed):
        store.append([], 3)
    with pytest.raises(SyncFailed):
        store.prune(1)
    store.close()
    db.close()  # what the end of the process does


@pytest.mark.parametrize("code", [13, None])
def test_a_disk_that_is_full_at_the_commit_is_rolled_back(folder: str, code: int | None) -> None:
    store = FailingStore(folder)
    store.open()
    store.append(turn(1, 3), 0)
    store.fail("COMMIT", os_error("database or disk is full", code))
    with pytest.raises(AppendFailed, match="nothing was written"):
        store.append(turn(4, 1), 3)
    store.fail("", Exception())
    assert store.head() == (1, 3)
    assert store.append(turn(4, 1), 3) == 4
    store.close()


@pytest.mark.parametrize("at", ["BEGIN", "SELECT epoch", "INSERT"])
def test_an_error_before_the_commit_is_rolled_back(folder: str, at: str) -> None:
    store = FailingStore(folder)
    store.open()
    store.fail(at, os_error("disk I/O error", 10))
    with pytest.raises(AppendFailed, match="disk I/O error"):
        store.append(turn(1, 3), 0)
    store.fail("", Exception())
    assert store.head() == (1, 0)
    assert store.append(turn(1, 3), 0) == 3
    store.close()


def test_a_failed_rollback_ends_it_too(folder: str) -> None:
    store = FailingStore(folder)
    store.open()
    db = store._db
    assert db is not None
    store.fail("ROLLBACK", os_error("disk I/O error"))
    with pytest.raises(SyncFailed, match="rolling back"):
        store.append(turn(1, 3), 5)
    db.close()


def test_pruning_goes_in_steps_and_its_effect_is_whole(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ray_pools.store.sqlite.PRUNE_STEP_BATCHES", 7)
    store.append(turn(1, 100), 0)
    store.snapshot(60, b"state")
    assert store.prune(60) == 59
    assert [row.seq for row in store.read(60)] == list(range(60, 101))


def test_rows_pruned_while_they_are_read(store: SqliteStore, folder: str) -> None:
    store.append(turn(1, 4 * READ_MAX_BATCHES), 0)
    reader = open_reader(folder, NAME)
    rows = reader.read()
    next(rows)
    store.snapshot(4 * READ_MAX_BATCHES, b"state")
    store.prune(3 * READ_MAX_BATCHES)
    with pytest.raises(StoreError, match="pruned"):
        list(rows)
    reader.close()


def test_a_slow_reader_does_not_keep_the_wal_growing(store: SqliteStore, folder: str) -> None:
    seq = store.append(turn(1, 2 * READ_MAX_BATCHES), 0)
    reader = open_reader(folder, NAME)
    rows = reader.read()
    next(rows)
    for _ in range(60):
        seq = store.append([(0.0, b"x" * 400_000)], seq)
    assert os.path.getsize(store.where + "-wal") < 12_000_000
    assert sum(1 for _ in rows) == 2 * READ_MAX_BATCHES - 1
    reader.close()
