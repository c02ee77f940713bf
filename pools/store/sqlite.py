"""The log in SQLite: one database per log, in WAL mode, each turn one transaction. Format: the package
docstring.

Why it is safe: `synchronous=FULL` syncs the WAL at every commit (read back, since an unknown word is
ignored without an error); every transaction begins by taking the write lock and then reads the epoch, so
that a fenced writer can neither commit nor be in the middle of a commit when its successor's `open`
returns. Exclusive locking mode would be a little faster, but a successor could not fence, nor a reader
read.

What errors mean: until COMMIT everything can be rolled back. COMMIT writes the WAL's last frames and syncs.
A full disk shows while writing them, before the one that makes the turn valid, and is rolled back by
SQLite. Any other failure there may have come after that frame: SyncFailed. Checkpoints run after a commit
and can't fail it; what they could not move stays in the WAL.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from ray_pools.store.base import (
    AppendFailed,
    Batch,
    Corrupt,
    DamagedSnapshot,
    Fenced,
    ForeignStore,
    NoLog,
    Pruned,
    Reader,
    Run,
    SequenceGap,
    Snapshot,
    Store,
    StoreError,
    SyncFailed,
    UnsafeStore,
    cannot_prune,
    opened_epoch,
)
from ray_pools.store.chain import seal, stored, verified, verified_runs
from ray_pools.store.sqlite_file import (
    FORMAT_VERSION,
    create,
    database_path,
    meaning,
    read_only_uri,
    refuse_foreign,
)

SQLITE_BUSY, SQLITE_FULL = 5, 13  # the sqlite3 module names them from Python 3.11 on only
BUSY_WAIT_S = 10.0
"""How long a lock is waited for. A turn holds it for one sync, a pruning step for one of PRUNE_STEP_BATCHES."""
READ_MAX_BATCHES = 256
READ_MAX_BYTES = 2**20
"""What is fetched at once. In between no statement stays open: it would keep the WAL from being reset."""
PRUNE_STEP_BATCHES = 10_000
WAL_KEPT_BYTES = 16 * 2**20
"""A WAL that once grew larger is cut to this when it is used again from its start."""


class Head(NamedTuple):
    """The head table, and the last row's number."""

    epoch: int
    seq: int
    base_seq: int
    base_chain: bytes


class SqliteReader(Reader):
    """Reads a log through a read-only connection, also while a writer lives. Made lazily at the first use."""

    def __init__(
        self, directory: str, name: str, *, connection: type[sqlite3.Connection] = sqlite3.Connection
    ) -> None:
        """`connection` is for tests that make a disk fail."""
        self.name, self.where = name, database_path(directory, name)
        self._connection_class = connection
        self._db: sqlite3.Connection | None = None

    def read_batches(self, from_seq: int = 1) -> Iterator[Batch]:
        for before_seq, before, rows in self._pieces(from_seq):
            batches = verified(self.where, before_seq, before, rows)
            if before_seq < from_seq - 1:
                yield from (batch.rest(from_seq) for batch in batches)
            else:
                yield from batches

    def read_runs(self, from_seq: int = 1) -> Iterator[Run]:
        for before_seq, before, rows in self._pieces(from_seq):
            if before_seq < from_seq - 1:  # it begins in the middle of a batch
                batches = [batch.rest(from_seq) for batch in verified(self.where, before_seq, before, rows)]
                turns = [(batch.last_seq, batch.at) for batch in batches]
                yield Run(from_seq, turns[-1][0], turns, b"".join(batch.body for batch in batches))
            else:
                yield from verified_runs(self.where, before_seq, before, rows)

    def _pieces(self, from_seq: int) -> Iterator[tuple[int, bytes, list[tuple[Any, ...]]]]:
        """Some rows at a time, not verified yet, and (last row, chain) of what stands before them."""
        end, before_seq, before = self._start_of(from_seq)
        while before_seq < end:
            # the batch in whose middle it begins comes alone
            rows = self._fetch(before_seq, end, 1 if before_seq < from_seq - 1 else READ_MAX_BATCHES)
            if (not rows or rows[0][1] != before_seq + 1) and self._head().base_seq > before_seq:
                raise Pruned(self.where, before_seq + 1, self._head().base_seq + 1)
            yield before_seq, before, rows
            if not rows:
                raise Corrupt(self.where, before_seq + 1, "the row is missing, but later ones are there")
            before_seq, before = rows[-1][0], rows[-1][6]

    def _fetch(self, before_seq: int, end: int, limit: int = READ_MAX_BATCHES) -> list[tuple[Any, ...]]:
        """The next few batches after row `before_seq`, up to row `end`."""
        rows = []
        try:
            found = self._open_db().execute(
                "SELECT seq, first, epoch, at, sizes, body, chain FROM log WHERE seq > ? AND seq <= ?"
                " ORDER BY seq LIMIT ?",
                (before_seq, end, limit),
            )
            size = 0
            for row in found:
                rows.append(row)
                size += len(row[5]) if type(row[5]) is bytes else 0
                if size >= READ_MAX_BYTES:
                    break
            found.close()
        except (sqlite3.Error, UnicodeDecodeError, OverflowError) as error:
            if not rows:
                raise meaning(error, self.where, before_seq + 1) from None
        return rows

    def head(self) -> tuple[int, int]:
        head = self._head()
        return head.epoch, head.seq

    def first_seq(self) -> int:
        return self._head().base_seq + 1

    def latest_snapshot(self) -> Snapshot | None:
        found = self._query(
            "SELECT s.seq, s.epoch, s.chain, s.state, s.seal,"
            " (SELECT l.chain FROM log AS l WHERE l.seq >= s.seq ORDER BY l.seq LIMIT 1)"
            " FROM snapshot AS s ORDER BY s.seq DESC LIMIT 1"
        )
        if not found:
            return None
        seq, epoch, chain, state, sealed, log_chain = found[0]
        if not isinstance(state, bytes) or seal(seq, epoch, chain, state) != sealed:
            raise DamagedSnapshot(self.where, seq, "the snapshot after this row does not have its checksum")
        if log_chain != chain:
            raise Corrupt(self.where, seq, "a snapshot was made after this row, but the log does not have it")
        return Snapshot(seq, epoch, state)

    def close(self) -> None:
        db, self._db = self._db, None
        if db is not None:
            db.close()

    def _connect(self) -> sqlite3.Connection:
        if not os.path.exists(self.where):
            raise NoLog(self.where, "there is no such log")
        db = self._connection(read_only_uri(self.where), uri=True)
        try:
            db.execute("PRAGMA query_only = ON")
            refuse_foreign(db, self.where)
        except sqlite3.Error as error:
            db.close()
            raise meaning(error, self.where, 0) from None
        except StoreError:
            db.close()
            raise
        return db

    def _connection(self, database: str, uri: bool = False) -> sqlite3.Connection:
        """One connection; whoever uses the store may hand it from thread to thread."""
        try:
            return sqlite3.connect(
                database,
                timeout=BUSY_WAIT_S,
                isolation_level=None,
                check_same_thread=False,
                factory=self._connection_class,
                uri=uri,
            )
        except sqlite3.Error as error:  # nothing of it was read yet
            raise StoreError(self.where, f"it can't be opened: {error}") from None

    def _open_db(self) -> sqlite3.Connection:
        if self._db is None:
            self._db = self._connect()
        return self._db

    def _query(self, sql: str, values: Sequence[object] = (), at_row: int = 0) -> list[tuple[Any, ...]]:
        try:
            return self._open_db().execute(sql, values).fetchall()
        except (sqlite3.Error, UnicodeDecodeError, OverflowError) as error:
            raise meaning(error, self.where, at_row) from None

    def _head(self) -> Head:
        """Reads and verifies what stands before all rows, and where the last one stands."""
        found = self._query(
            "SELECT name, epoch, base_seq, base_chain, seal, (SELECT max(seq) FROM log) FROM head"
        )
        if len(found) != 1:
            raise Corrupt(self.where, 0, f"there are {len(found)} heads instead of one")
        name, epoch, base_seq, base_chain, sealed, seq = found[0]
        if (
            not isinstance(name, str)
            or not isinstance(epoch, int)
            or not isinstance(base_seq, int)
            or not isinstance(base_chain, bytes)
            or seal(name, epoch, base_seq, base_chain) != sealed
        ):
            raise Corrupt(self.where, 0, "the head does not have its checksum")
        if name != self.name:
            raise ForeignStore(self.where, f"this is the log of {name!r}, not of {self.name!r}")
        seq = base_seq if seq is None else seq
        if not isinstance(seq, int) or seq < base_seq:
            raise Corrupt(self.where, 0, f"rows up to {base_seq} are pruned, but the last row is {seq}")
        return Head(epoch, seq, base_seq, base_chain)

    def _start_of(self, from_seq: int) -> tuple[int, int, bytes]:
        """The last row's number, and (last row, chain) of what stands before the batch that holds `from_seq`."""
        head = self._head()
        if from_seq <= head.base_seq:
            raise Pruned(self.where, from_seq, head.base_seq + 1)
        if from_seq - 1 > head.seq:
            raise SequenceGap(self.where, from_seq - 1, head.seq)
        return head.seq, *self._before(from_seq, head)

    def _before(self, seq: int, head: Head) -> tuple[int, bytes]:
        """(last row, chain) of the last batch that ends below row `seq`, or of what is pruned."""
        found = self._query(
            "SELECT seq, chain FROM log WHERE seq < ? ORDER BY seq DESC LIMIT 1", (seq,), at_row=seq - 1
        )
        before_seq, chain = found[0] if found else (head.base_seq, head.base_chain)
        if not isinstance(chain, bytes):
            raise Corrupt(self.where, before_seq, "a column holds something else than it should")
        return before_seq, chain

    def _mark(self, seq: int) -> tuple[int, bytes]:
        """(epoch, chain) of the batch that holds row `seq`, which must be there."""
        found = self._query(
            "SELECT first, epoch, chain FROM log WHERE seq >= ? ORDER BY seq LIMIT 1", (seq,), at_row=seq
        )
        if not found or found[0][0] > seq:
            raise Corrupt(self.where, seq, "the row is missing, but later ones are there")
        _, epoch, chain = found[0]
        if not isinstance(epoch, int) or not isinstance(chain, bytes):
            raise Corrupt(self.where, seq, "a column holds something else than it should")
        return epoch, chain


class SqliteStore(SqliteReader, Store):
    """Writes a log. The only connection that may; see `Store`."""

    def __init__(
        self, directory: str, name: str, *, connection: type[sqlite3.Connection] = sqlite3.Connection
    ) -> None:
        super().__init__(directory, name, connection=connection)
        self._epoch = 0
        self._seq = 0
        self._chain = b""
        self._broken: StoreError | None = None

    def open(self, at_least: int = 0) -> int:
        self.close()
        self._broken = None
        if not os.path.exists(self.where):
            create(self.where, self.name)
        self._db = self._connect()
        try:
            with self._transaction():
                head = self._head()
                self._seq = head.seq
                epoch, self._chain = 0, head.base_chain
                if (
                    head.seq > head.base_seq
                ):  # what is to be appended hangs on the last batch: it must be sound
                    for last in verified(
                        self.where, *self._before(head.seq, head), self._fetch(head.seq - 1, head.seq)
                    ):
                        epoch = last.epoch
                    self._chain = self._mark(head.seq)[1]
                if epoch > head.epoch:
                    raise Corrupt(
                        self.where, head.seq, f"its epoch is {epoch}, the log's is only {head.epoch}"
                    )
                opened = opened_epoch(head.epoch, at_least)
                self._write_head(opened, head.base_seq, head.base_chain)
            self._epoch = opened
        except AppendFailed:
            self.close()
            raise
        except SyncFailed:
            raise
        except StoreError:
            self.close()
            raise
        return self._epoch

    def append(self, records: Sequence[tuple[float, bytes]], expected_seq: int) -> int:
        with self._turn() as db:
            if expected_seq != self._seq:
                raise SequenceGap(self.where, expected_seq, self._seq)
            batches = stored(self.where, self._seq, self._chain, self._epoch, records)
            db.executemany(
                "INSERT INTO log (seq, first, epoch, at, sizes, body, chain) VALUES (?, ?, ?, ?, ?, ?, ?)",
                batches,
            )
        if batches:
            self._seq, self._chain = batches[-1].seq, batches[-1].chain
        return self._seq

    def snapshot(self, seq: int, state: bytes) -> None:
        with self._turn() as db:
            if not self._head().base_seq < seq <= self._seq:
                raise SequenceGap(self.where, seq, self._seq)
            later = self._query("SELECT max(seq) FROM snapshot WHERE seq > ?", (seq,))[0][0]
            if later is not None:
                raise AppendFailed(self.where, f"there is a snapshot of row {later}, after row {seq}")
            epoch, chain = self._mark(seq)
            db.execute("DELETE FROM snapshot")
            db.execute(
                "INSERT INTO snapshot (seq, epoch, chain, state, seal) VALUES (?, ?, ?, ?, ?)",
                (seq, epoch, chain, state, seal(seq, epoch, chain, state)),
            )

    def prune(self, before_seq: int) -> int:
        removed = 0
        while True:
            with self._turn() as db:
                latest = self.latest_snapshot()
                if before_seq > (latest.seq if latest else 0):
                    raise AppendFailed(self.where, cannot_prune(before_seq, latest))
                head = self._head()
                step = self._query(
                    "SELECT seq, chain FROM log WHERE seq < ? ORDER BY seq LIMIT ?",
                    (before_seq, PRUNE_STEP_BATCHES),
                )
                if not step:
                    return removed
                last, base_chain = step[-1]
                db.execute("DELETE FROM log WHERE seq <= ?", (last,))
                self._write_head(self._epoch, last, base_chain)
            removed += last - head.base_seq

    def close(self) -> None:
        if isinstance(self._broken, SyncFailed):
            return  # closing may checkpoint, and nobody knows what that would move; the process is to end
        super().close()
        self._epoch = 0

    def _connect(self) -> sqlite3.Connection:
        db = self._connection(self.where)
        try:
            refuse_foreign(db, self.where)
            keep_promises(db, self.where)
        except sqlite3.Error as error:
            db.close()
            raise meaning(error, self.where, 0) from None
        except StoreError:
            db.close()
            raise
        return db

    def _open_db(self) -> sqlite3.Connection:
        if self._db is None:
            raise StoreError(self.where, "the store is not open")
        return self._db

    def _write_head(self, epoch: int, base_seq: int, base_chain: bytes) -> None:
        self._open_db().execute(
            "UPDATE head SET epoch = ?, base_seq = ?, base_chain = ?, seal = ?",
            (epoch, base_seq, base_chain, seal(self.name, epoch, base_seq, base_chain)),
        )

    @contextmanager
    def _turn(self) -> Iterator[sqlite3.Connection]:
        """A transaction of a writer that is not fenced, over a log that is as this writer left it."""
        if self._broken is not None:
            raise self._broken
        with self._transaction() as db:
            epoch, seq = db.execute(
                "SELECT epoch, (SELECT coalesce(max(seq), base_seq) FROM log) FROM head"
            ).fetchone() or (0, 0)
            if epoch != self._epoch:
                self._broken = Fenced(self.where, self._epoch, epoch)
                raise self._broken
            if seq != self._seq:
                raise Corrupt(
                    self.where, seq, f"this should not be the last row; row {self._seq} was written"
                )
            yield db

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        db = self._open_db()
        try:
            db.execute("BEGIN IMMEDIATE")
            yield db
        except sqlite3.Error as error:
            self._roll_back(db)
            raise AppendFailed(self.where, f"{error}; nothing was written") from error
        except BaseException:
            self._roll_back(db)
            raise
        try:
            db.execute("COMMIT")
        except sqlite3.Error as error:
            if not rolled_back(error):
                self._break(f"{error} at the commit")
            self._roll_back(db)
            raise AppendFailed(self.where, f"{error}; nothing was written") from error
        except (MemoryError, KeyboardInterrupt) as error:
            self._break(f"{error!r} at the commit")

    def _roll_back(self, db: sqlite3.Connection) -> None:
        try:
            if db.in_transaction:
                db.execute("ROLLBACK")
        except sqlite3.Error as error:
            self._break(f"{error} while rolling back")

    def _break(self, why: str) -> None:
        self._broken = SyncFailed(self.where, f"{why}; what is on disk is not known")
        raise self._broken


def rolled_back(error: sqlite3.Error) -> bool:
    """Whether a failed COMMIT is known to have left nothing behind: a full disk, or a missing lock."""
    code = getattr(error, "sqlite_errorcode", None)  # from Python 3.11 on
    if code is not None:
        return code & 0xFF in (SQLITE_FULL, SQLITE_BUSY)
    return "disk is full" in str(error) or "is locked" in str(error)


def keep_promises(db: sqlite3.Connection, where: str) -> None:
    """Sets what a durable commit needs and reads it back. UnsafeStore if it did not come to be."""
    mode = db.execute("PRAGMA journal_mode = WAL").fetchone()
    if mode is None or mode[0] != "wal":
        raise UnsafeStore(
            where, f"journal_mode is {mode and mode[0]}, not wal (is this a network file system?)"
        )
    db.execute("PRAGMA synchronous = FULL")
    db.execute("PRAGMA fullfsync = ON")  # macOS: without it a sync may stop in the drive's cache
    db.execute("PRAGMA cell_size_check = ON")
    db.execute(f"PRAGMA journal_size_limit = {WAL_KEPT_BYTES}")
    level = db.execute("PRAGMA synchronous").fetchone()
    if level is None or level[0] != 2:
        raise UnsafeStore(
            where, f"synchronous is {level and level[0]}, not 2 (FULL): commits would not be durable"
        )


__all__ = ["BUSY_WAIT_S", "FORMAT_VERSION", "SqliteReader", "SqliteStore", "keep_promises"]
