"""The contract of a log store, the same for every store: a subclass per store says how to reach and damage it.

Stands for: a second copy of an actor, a lost or changed row, a torn turn, a full disk, a failed sync, a bad snapshot.
"""

from __future__ import annotations

import pickle
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
from contract_damage import NAME, Damage, Turn, at_once, bodies, turn

from ray_pools.errors import PoolsError
from ray_pools.store import (
    AppendFailed,
    Corrupt,
    Fenced,
    NoLog,
    Pruned,
    Reader,
    SequenceGap,
    Snapshot,
    Store,
    StoreError,
    SyncFailed,
    open_reader,
    open_store,
)
from ray_pools.store.base import BODY_MAX_BYTES, EPOCH_LEAP
from ray_pools.store.memory import forget, memory_log
from ray_pools.store.sqlite import SqliteStore

__all__ = ["NAME", "Contract", "at_once", "bodies", "turn"]  # for the suites of other stores


class Contract(Damage):
    """Subclassed below; nothing here knows which store it is."""

    def test_rows_come_back_as_they_were_given(self, store: Store) -> None:
        given: Turn = [
            (0.0, b""),
            (-0.0, b"\x00"),
            (5, b"x" * 100_000),
            (1e300, b"\xff"),
            (1753.0000000001, b"'"),
        ]
        assert store.append(given, 0) == 5
        rows = list(store.read())
        assert [(row.at, row.body) for row in rows] == given
        assert [row.seq for row in rows] == [1, 2, 3, 4, 5]
        assert {row.epoch for row in rows} == {1}
        assert all(type(row.at) is float and type(row.body) is bytes for row in rows)

    def test_a_new_log_is_empty(self, store: Store) -> None:
        assert store.head() == (1, 0)
        assert store.first_seq() == 1
        assert list(store.read()) == []
        assert store.latest_snapshot() is None

    def test_each_opening_raises_the_epoch(self, store: Store, address: str) -> None:
        store.append(turn(1, 2), 0)
        store.close()
        for epoch in (2, 3, 4):
            again = open_store(address, NAME)
            assert again.open() == epoch
            seq = again.append(turn(epoch, 1), epoch)
            assert again.head() == (epoch, seq)
            again.close()
        assert store.open() == 5
        assert [row.epoch for row in store.read()] == [1, 1, 2, 3, 4]

    def test_an_opening_holds_the_time_and_leaps_where_that_was_set_back(
        self, store: Store, address: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Fault: a log that was put back from an old copy comes back in an epoch that it had before."""
        monkeypatch.setattr("ray_pools.store.base.secrets.randbelow", lambda leap: leap - 1)
        store.close()
        opened = []
        for now in (1_000, 900, 1_000 + EPOCH_LEAP + 5):
            again = open_store(address, NAME)
            opened.append(again.open(at_least=now))
            again.close()
        assert opened == [1_000, 1_000 + EPOCH_LEAP, 1_000 + EPOCH_LEAP + 5]

    def test_a_fenced_writer_writes_nothing_more(
        self, store: Store, address: str, opened: list[Reader]
    ) -> None:
        store.append(turn(1, 1), 0)
        store.snapshot(1, b"state")
        successor = open_store(address, NAME)
        opened.append(successor)
        successor.open()
        for write in (
            lambda: store.append(turn(2, 1), 1),
            lambda: store.append([], 1),
            lambda: store.append(turn(2, 1), 7),
            lambda: store.snapshot(1, b"zombie"),
            lambda: store.prune(1),
        ):
            with pytest.raises(Fenced) as caught:
                write()
            assert (caught.value.mine, caught.value.current) == (1, 2)
        assert successor.append(turn(2, 1), 1) == 2
        with pytest.raises(Fenced):
            store.append(turn(3, 1), 2)
        assert bodies(successor.read()) == [b"body 1", b"body 2"]
        snapshot = successor.latest_snapshot()
        assert snapshot is not None
        assert snapshot.state == b"state"

    def test_every_one_of_many_openers_fences_the_one_before(self, store: Store, address: str) -> None:
        before = store
        for number in range(1, 101):
            successor = open_store(address, NAME)
            successor.open()
            with pytest.raises(Fenced):
                before.append(turn(0, 1), number - 1)
            successor.append(turn(number, 1), number - 1)
            before.close()
            before = successor
        assert bodies(before.read()) == [b"body %d" % number for number in range(1, 101)]
        before.close()

    @pytest.mark.parametrize("expected", [-1, 0, 2, 4, 100])
    def test_a_turn_must_follow_on_the_last_row(self, store: Store, expected: int) -> None:
        store.append(turn(1, 3), 0)
        for records in (turn(4, 1), []):
            with pytest.raises(SequenceGap) as caught:
                store.append(records, expected)
            assert (caught.value.expected, caught.value.head) == (expected, 3)
        assert store.append(turn(4, 1), 3) == 4

    def test_an_empty_turn_writes_nothing(self, store: Store) -> None:
        assert store.append([], 0) == 0
        store.append(turn(1, 2), 0)
        assert store.append([], 2) == 2
        assert store.head() == (1, 2)

    @pytest.mark.parametrize(
        "bad",
        [
            (float("nan"), b""),
            (float("inf"), b""),
            (1.0, "text"),
            (1.0, bytearray(b"x")),
            (1.0, b"x" * (BODY_MAX_BYTES + 1)),
        ],
        ids=["nan", "infinite", "text", "bytearray", "too long"],
    )
    def test_a_record_that_cannot_be_kept_fails_its_whole_turn(
        self, store: Store, bad: tuple[float, bytes]
    ) -> None:
        store.append(turn(1, 1), 0)
        with pytest.raises(AppendFailed):
            store.append([*turn(2, 3), bad, *turn(5, 1)], 1)
        assert store.append(turn(2, 1), 1) == 2
        assert bodies(store.read()) == [b"body 1", b"body 2"]

    def test_reading_from_anywhere_to_the_end(self, store: Store) -> None:
        store.append(turn(1, 600), 0)
        store.append(turn(601, 400), 600)
        everything = list(store.read())
        assert [row.seq for row in everything] == list(range(1, 1001))
        for start in (1, 2, 255, 256, 257, 258, 600, 601, 1000, 1001):
            assert list(store.read(start)) == everything[start - 1 :]
        with pytest.raises(SequenceGap) as caught:
            list(store.read(1002))
        assert (caught.value.expected, caught.value.head) == (1001, 1000)

    def test_a_snapshot_comes_back(self, store: Store, reader: Reader) -> None:
        store.append(turn(1, 10), 0)
        store.snapshot(4, b"first")
        store.snapshot(4, b"first again")
        assert reader.latest_snapshot() == Snapshot(4, 1, b"first again")
        state = bytes(range(256)) * 4000
        store.snapshot(10, state)
        assert reader.latest_snapshot() == store.latest_snapshot() == Snapshot(10, 1, state)
        assert len(list(store.read())) == 10

    def test_a_snapshot_is_of_a_row_that_exists_and_never_older_than_the_last(self, store: Store) -> None:
        store.append(turn(1, 10), 0)
        for seq in (-1, 0, 11):
            with pytest.raises(SequenceGap):
                store.snapshot(seq, b"state")
        store.snapshot(7, b"seven")
        with pytest.raises(AppendFailed, match="row 7"):
            store.snapshot(6, b"six")
        assert store.latest_snapshot() == Snapshot(7, 1, b"seven")

    @pytest.mark.parametrize(
        ("column", "value"),
        [
            ("state", b"stAte"), ("state", b""), ("state", "state"), ("seal", b"\x00" * 16), ("seq", 4),
            ("epoch", 2), ("chain", b"\x00" * 16),
        ],
    )  # fmt: skip
    def test_a_damaged_snapshot_is_found(
        self, store: Store, address: str, column: str, value: object
    ) -> None:
        store.append(turn(1, 5), 0)
        store.snapshot(5, b"state")
        self.damage_snapshot(address, column, value)
        with pytest.raises(Corrupt, match="snapshot"):
            store.latest_snapshot()

    def test_a_log_that_ends_before_its_snapshot_is_found(self, store: Store, address: str) -> None:
        store.append(turn(1, 5), 0)
        store.snapshot(5, b"state")
        self.remove(address, 5, 5)
        with pytest.raises(Corrupt, match="the log does not have it"):
            store.latest_snapshot()

    def test_pruning_removes_only_what_is_below_the_latest_snapshot(
        self, store: Store, reader: Reader
    ) -> None:
        store.append(turn(1, 20), 0)
        with pytest.raises(AppendFailed, match="no snapshot"):
            store.prune(2)
        store.snapshot(12, b"state")
        with pytest.raises(AppendFailed, match="row 12"):
            store.prune(13)
        assert reader.first_seq() == 1
        assert store.prune(5) == 4
        assert store.prune(5) == store.prune(1) == store.prune(-3) == 0
        assert store.prune(12) == 7
        for log in (store, reader):
            assert log.first_seq() == 12
            assert log.head() == (1, 20)
            assert [row.seq for row in log.read(12)] == list(range(12, 21))
            assert [row.seq for row in log.read(13)] == list(range(13, 21))
            for wanted in (1, 11):
                with pytest.raises(Pruned) as caught:
                    list(log.read(wanted))
                assert (caught.value.wanted, caught.value.first) == (wanted, 12)
        assert store.append(turn(21, 1), 20) == 21

    def test_what_is_left_after_pruning_still_hangs_on_what_is_gone(self, store: Store, address: str) -> None:
        store.append(turn(1, 20), 0)
        store.snapshot(12, b"state")
        store.prune(12)
        store.close()
        assert store.open() == 2
        assert store.append(turn(21, 1), 20) == 21
        assert [row.seq for row in store.read(12)] == list(range(12, 22))
        self.damage(address, 12, "body", b"x")
        with pytest.raises(Corrupt) as caught:
            list(store.read(12))
        assert caught.value.seq == 12

    def test_a_reader_sees_whole_turns_of_a_live_writer(self, store: Store, reader: Reader) -> None:
        seen, seq = 0, 0
        for number in range(1, 30):
            seq = store.append(turn(seq + 1, number), seq)
            new = list(reader.read(seen + 1))
            assert [row.seq for row in new] == list(range(seen + 1, seq + 1))
            seen = seq
        assert reader.head() == (1, seq)

    def test_reading_ends_where_the_log_ended_when_it_began(self, store: Store, reader: Reader) -> None:
        store.append(turn(1, 300), 0)
        rows = reader.read()
        first = next(rows)
        store.append(turn(301, 300), 300)
        assert [first.seq, *(row.seq for row in rows)] == list(range(1, 301))

    def test_a_reader_changes_nothing(self, store: Store, reader: Reader) -> None:
        store.append(turn(1, 3), 0)
        list(reader.read())
        reader.close()
        reader.close()
        assert store.append(turn(4, 1), 3) == 4
        assert store.head() == (1, 4)

    def test_there_is_nothing_to_read_before_the_first_opening(self, address: str) -> None:
        with pytest.raises(NoLog):
            open_reader(address, NAME)
        with pytest.raises(NoLog):
            open_reader(address, "never")

    def test_a_store_must_be_open(self, address: str, store: Store) -> None:
        unopened = open_store(address, NAME)
        for closed in (unopened, store):
            store.close()
            with pytest.raises(StoreError, match=r"open|closed"):
                closed.append(turn(1, 1), 0)
            closed.close()


class TestMemory(Contract):
    """The log in memory, for simulation; its faults are put in by hand."""

    @pytest.fixture
    def address(self, tmp_path: Path) -> Iterator[str]:
        address = f"memory:{tmp_path}"
        yield address
        forget(address)

    def damage(self, address: str, seq: int, column: str, value: object) -> None:
        log = memory_log(address, NAME)
        assert log is not None
        place = [batch.seq for batch in log.batches].index(seq)
        log.batches[place] = log.batches[place]._replace(**{column: value})  # type: ignore[arg-type]

    def remove(self, address: str, first: int, last: int) -> None:
        log = memory_log(address, NAME)
        assert log is not None
        log.batches = [batch for batch in log.batches if not first <= batch.seq <= last]

    def swap(self, address: str, one: int, other: int) -> None:
        log = memory_log(address, NAME)
        assert log is not None
        places = [[batch.seq for batch in log.batches].index(seq) for seq in (one, other)]
        first, second = (log.batches[place] for place in places)
        log.batches[places[0]] = second._replace(seq=first.seq, first=first.first)
        log.batches[places[1]] = first._replace(seq=second.seq, first=second.first)

    def chain(self, address: str, name: str, seq: int = 1) -> bytes:
        log = memory_log(address, name)
        assert log is not None
        return log.batches[seq - 1].chain

    def damage_snapshot(self, address: str, column: str, value: object) -> None:
        log = memory_log(address, NAME)
        assert log is not None
        assert log.snapshot is not None
        fields = ["seq", "epoch", "chain", "state", "seal"]
        changed = dict(zip(fields, log.snapshot, strict=True)) | {column: value}
        log.snapshot = tuple(changed[name] for name in fields)  # type: ignore[assignment]

    def test_a_full_disk_fails_one_turn(self, address: str, store: Store) -> None:
        log = memory_log(address, NAME)
        assert log is not None
        log.next_fault = "full"
        with pytest.raises(AppendFailed):
            store.append(turn(1, 3), 0)
        assert list(store.read()) == []
        assert store.append(turn(1, 3), 0) == 3

    @pytest.mark.parametrize(("fault", "left"), [("sync_lost", 1), ("sync_kept", 4)])
    def test_after_a_failed_sync_only_a_successor_knows(
        self, address: str, store: Store, fault: str, left: int
    ) -> None:
        store.append(turn(1, 1), 0)
        log = memory_log(address, NAME)
        assert log is not None
        log.next_fault = fault  # type: ignore[assignment]
        for _ in range(2):
            with pytest.raises(SyncFailed):
                store.append(turn(2, 3), 1)
        successor = open_store(address, NAME)
        assert successor.open() == 2
        assert successor.head() == (2, left)
        assert successor.append(turn(9, 1), left) == left + 1


class TestSqlite(Contract):
    """The embedded default. What is special to its file is in test_sqlite.py."""

    @pytest.fixture
    def address(self, tmp_path: Path) -> str:
        return f"sqlite://{tmp_path}/logs"

    def edit(self, address: str, sql: str, *values: object) -> None:
        path = SqliteStore(address.removeprefix("sqlite://"), NAME).where
        db = sqlite3.connect(path, isolation_level=None)
        db.execute("PRAGMA ignore_check_constraints = ON")
        assert db.execute(sql, values).rowcount > 0
        db.close()

    def damage(self, address: str, seq: int, column: str, value: object) -> None:
        self.edit(address, f"UPDATE log SET {column} = ? WHERE seq = ?", value, seq)

    def remove(self, address: str, first: int, last: int) -> None:
        path = SqliteStore(address.removeprefix("sqlite://"), NAME).where
        db = sqlite3.connect(path, isolation_level=None)
        count = db.execute("SELECT max(seq) FROM log").fetchone()[0]
        db.execute("DELETE FROM log WHERE seq BETWEEN ? AND ?", (first, last))
        assert first != 1 or last != count
        db.close()

    def swap(self, address: str, one: int, other: int) -> None:
        path = SqliteStore(address.removeprefix("sqlite://"), NAME).where
        db = sqlite3.connect(path, isolation_level=None)
        columns = "epoch, at, body, chain"
        first, second = (
            db.execute(f"SELECT {columns} FROM log WHERE seq = ?", (seq,)).fetchone() for seq in (one, other)
        )
        for seq, values in ((one, second), (other, first)):
            db.execute(f"UPDATE log SET ({columns}) = (?, ?, ?, ?) WHERE seq = ?", (*values, seq))
        db.close()

    def chain(self, address: str, name: str, seq: int = 1) -> bytes:
        path = SqliteStore(address.removeprefix("sqlite://"), name).where
        db = sqlite3.connect(path)
        (found,) = db.execute("SELECT chain FROM log WHERE seq = ?", (seq,)).fetchone()
        db.close()
        assert isinstance(found, bytes)
        return found

    def damage_snapshot(self, address: str, column: str, value: object) -> None:
        self.edit(address, f"UPDATE snapshot SET {column} = ?", value)


@pytest.mark.parametrize(
    "error",
    [
        StoreError("f", "why"), AppendFailed("f", "why"), SyncFailed("f", "why"), Fenced("f", 1, 2),
        SequenceGap("f", 3, 4), Corrupt("f", 5, "why"), Pruned("f", 1, 9),
    ],
)  # fmt: skip
def test_errors_survive_pickling(error: PoolsError) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert vars(again) == vars(error)
