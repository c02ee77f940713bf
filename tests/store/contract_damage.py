"""What the contract of a log store says of batches and damage, and how a test reaches a store. See test_contract.py."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgpack
import pytest

from ray_pools.store import (
    Batch,
    Corrupt,
    Pruned,
    Reader,
    Row,
    Snapshot,
    Store,
    open_reader,
    open_store,
)
from ray_pools.store.base import BATCH_MAX_BYTES, BATCH_MAX_EVENTS, RUN_EVENTS

NAME = "pool/größe 1"
Turn = list[tuple[float, bytes]]


def turn(first: int, count: int) -> Turn:
    """Records that differ in everything and whose times need all of a double: each is a batch of its own."""
    return [(0.1 * number, b"body %d" % number) for number in range(first, first + count)]


def at_once(first: int, count: int) -> Turn:
    """Records of one time, as an actor's turn has them: they stand in one batch."""
    return [(0.1, body) for _, body in turn(first, count)]


def bodies(rows: Iterator[Row]) -> list[bytes]:
    return [row.body for row in rows]


class Reach:
    """How a store is reached and damaged; nothing here knows which store it is."""

    @pytest.fixture
    def address(self, tmp_path: Path) -> Iterator[str] | str:
        raise NotImplementedError

    def damage(self, address: str, seq: int, column: str, value: object) -> None:
        """Changes one column of a row, as no store would."""
        raise NotImplementedError

    def remove(self, address: str, first: int, last: int) -> None:
        raise NotImplementedError

    def swap(self, address: str, one: int, other: int) -> None:
        """Two batches, named by their last rows, change places and keep their sums."""
        raise NotImplementedError

    def chain(self, address: str, name: str, seq: int = 1) -> bytes:
        raise NotImplementedError

    def damage_snapshot(self, address: str, column: str, value: object) -> None:
        raise NotImplementedError

    @pytest.fixture
    def opened(self) -> Iterator[list[Reader]]:
        readers: list[Reader] = []
        yield readers
        for reader in readers:
            reader.close()

    @pytest.fixture
    def store(self, address: str, opened: list[Reader]) -> Store:
        store = open_store(address, NAME)
        opened.append(store)
        assert store.open() == 1
        return store

    @pytest.fixture
    def reader(self, store: Store, address: str, opened: list[Reader]) -> Reader:
        reader = open_reader(address, NAME)
        opened.append(reader)
        return reader


class Damage(Reach):
    """Batches, and everything that a disk may do to them."""

    def test_a_turn_stands_together(self, store: Store) -> None:
        store.append(at_once(1, 5), 0)
        store.append(at_once(6, 1), 5)
        store.append([*at_once(7, 2), *turn(9, 1), *at_once(10, 2)], 6)
        batches = list(store.read_batches())
        assert [(batch.first_seq, batch.last_seq) for batch in batches] == [
            (1, 5), (6, 6), (7, 8), (9, 9), (10, 11),
        ]  # fmt: skip
        assert batches[2] == Batch(7, 8, 1, 0.1, b"\6\0\0\0" * 2, b"body 7body 8")
        everything = list(store.read())
        assert [row.seq for row in everything] == list(range(1, 12))
        assert [row.body for row in everything] == [b"body %d" % number for number in range(1, 12)]
        for start in range(1, 13):
            assert list(store.read(start)) == everything[start - 1 :]
        assert next(store.read_batches(4)) == Batch(4, 5, 1, 0.1, b"\6\0\0\0" * 2, b"body 4body 5")
        assert next(store.read_batches(5)) == Batch(5, 5, 1, 0.1, b"", b"body 5")

    def test_a_run_is_the_same_batches_in_one_piece(self, store: Store) -> None:
        """From whichever row it begins: the same events, each with its time."""
        written = 0
        for number in range(300):
            size = number % 7 + 1
            written = store.append([(number / 8, body) for _, body in at_once(written + 1, size)], written)
        everything = [(row.seq, row.at, row.body) for row in store.read()]
        for start in [1, 2, 3, 127, 128, 129, written - 1, written, written + 1]:
            runs = list(store.read_runs(start))
            assert [run.first_seq for run in runs] == [
                start + sum(run.rows for run in runs[:index]) for index in range(len(runs))
            ]
            times = [at for run in runs for at in run.times()]
            assert times == [at for _, at, _ in everything[start - 1 :]]
            bodies = b"".join(body for _, _, body in everything[start - 1 :])
            assert b"".join(run.body for run in runs) == bodies
            assert all(run.rows < RUN_EVENTS + 7 for run in runs)

    def test_a_large_turn_is_kept_in_parts(self, store: Store) -> None:
        many = 2 * BATCH_MAX_EVENTS + 5
        store.append(at_once(1, many), 0)
        sizes = [len(batch.bodies) for batch in store.read_batches()]
        assert sizes == [BATCH_MAX_EVENTS, BATCH_MAX_EVENTS, 5]
        third = b"x" * (BATCH_MAX_BYTES // 3)
        store.append([(1.0, third)] * 7 + [(1.0, third * 4)] * 2 + [(1.0, b"")], many)
        batches = list(store.read_batches(many + 1))
        assert [len(batch.bodies) for batch in batches] == [3, 3, 1, 1, 1, 1]
        assert len(list(store.read())) == many + 10

    def test_an_event_may_look_like_a_batch(self, store: Store) -> None:
        """The store must never take what is inside an event for its own framing, nor the other way round."""
        odd = [msgpack.packb([b"a", b"b"]), b"", b"\xc1", msgpack.packb([])]
        for number, body in enumerate(odd):
            store.append([(1.0, body)], number)
        store.append([(1.0, body) for body in odd], 4)
        assert bodies(store.read()) == odd + odd

    @pytest.mark.parametrize(
        ("column", "value"),
        [
            ("seq", 5), ("seq", 7), ("first", 3), ("first", 5), ("first", "x"), ("epoch", 2), ("at", 0.2),
            ("body", b"body 4"), ("body", b""), ("body", 7), ("chain", b"\x00" * 16), ("chain", b""),
            ("sizes", b""), ("sizes", "text"), ("sizes", b"\6\0\0\0" * 2),
        ],
    )  # fmt: skip
    def test_a_changed_column_is_found_at_its_batch(
        self, store: Store, address: str, column: str, value: object
    ) -> None:
        for first, count in ((1, 3), (4, 3), (7, 2)):
            store.append(at_once(first, count), first - 1)
        before = list(store.read(1))[:3]
        self.damage(address, 6, column, value)
        read: list[Row] = []
        with pytest.raises(Corrupt) as caught:
            read.extend(store.read())
        assert caught.value.seq == 4
        assert read in (before, [])
        with pytest.raises(Corrupt):
            list(store.read(5))

    def test_any_flipped_byte_of_a_batch_is_found(self, store: Store, address: str) -> None:
        store.append(at_once(1, 3), 0)
        store.append(at_once(4, 3), 3)
        for column, data in (("body", b"body 4body 5body 6"), ("sizes", b"\6\0\0\0" * 3)):
            for place in range(len(data)):
                for flip in (0x01, 0x80, 0xFF):
                    changed = data[:place] + bytes([data[place] ^ flip]) + data[place + 1 :]
                    self.damage(address, 6, column, changed)
                    with pytest.raises(Corrupt, match="row 4"):
                        list(store.read())
            self.damage(address, 6, column, data)
        assert len(list(store.read())) == 6

    def test_turns_that_changed_places_are_found(self, store: Store, address: str) -> None:
        for number in range(4):
            store.append(at_once(3 * number + 1, 3), 3 * number)
        self.swap(address, 6, 9)
        with pytest.raises(Corrupt) as caught:
            list(store.read())
        assert caught.value.seq == 4

    def test_a_missing_turn_is_found(self, store: Store, address: str) -> None:
        for number in range(4):
            store.append(at_once(3 * number + 1, 3), 3 * number)
        self.remove(address, 4, 6)
        for start in (1, 4, 5, 6, 7):
            with pytest.raises(Corrupt) as caught:
                list(store.read(start))
            assert caught.value.seq == 4

    def test_snapshots_and_pruning_in_the_middle_of_a_turn(self, store: Store, address: str) -> None:
        for number in range(4):
            store.append(at_once(5 * number + 1, 5), 5 * number)
        store.snapshot(13, b"state")
        assert store.latest_snapshot() == Snapshot(13, 1, b"state")
        assert store.prune(13) == 10, "the turn that holds row 13 stays whole"
        assert store.first_seq() == 11
        assert [row.seq for row in store.read(14)] == list(range(14, 21))
        with pytest.raises(Pruned) as caught:
            list(store.read(10))
        assert caught.value.first == 11
        store.close()
        assert store.open() == 2
        assert store.append(at_once(21, 2), 20) == 22
        assert store.latest_snapshot() == Snapshot(13, 1, b"state")
        assert store.prune(11) == store.prune(13) == 0
        self.damage(address, 15, "body", b"x")
        with pytest.raises(Corrupt) as damaged:
            list(store.read(12))
        assert damaged.value.seq == 11

    def test_two_logs_of_the_same_events_are_not_the_same(self, store: Store, address: str) -> None:
        other = open_store(address, "another")
        other.open()
        store.append(turn(1, 1), 0)
        other.append(turn(1, 1), 0)
        assert self.chain(address, NAME) != self.chain(address, "another")
        other.close()

    @pytest.mark.parametrize("seq", [1, 300, 700])
    @pytest.mark.parametrize(
        ("column", "value"),
        [
            ("epoch", 2), ("epoch", 0), ("epoch", -1), ("epoch", 1.5), ("epoch", "x"),
            ("at", 0.25), ("at", "soon"),
            ("body", b"body 999"), ("body", b""), ("body", "body 1"), ("body", 7),
            ("chain", b"\x00" * 16), ("chain", b""), ("chain", "0" * 16), ("chain", 0),
        ],
    )  # fmt: skip
    def test_a_changed_column_is_found_at_its_row(
        self, store: Store, address: str, seq: int, column: str, value: object
    ) -> None:
        store.append(turn(1, 700), 0)
        self.damage(address, seq, column, value)
        read: list[int] = []
        with pytest.raises(Corrupt) as caught:
            read.extend(row.seq for row in store.read())
        assert caught.value.seq == seq
        assert caught.value.where == store.where
        assert str(seq) in str(caught.value)
        assert read == list(range(1, seq))
        read.clear()
        with pytest.raises(Corrupt) as again:
            read.extend(
                number for run in store.read_runs() for number in range(run.first_seq, run.last_seq + 1)
            )
        assert str(again.value) == str(caught.value)
        assert read == list(range(1, seq)), "what is before the damage is read"

    def test_any_flipped_byte_of_a_body_or_a_chain_is_found(self, store: Store, address: str) -> None:
        store.append(turn(1, 5), 0)
        chain = self.chain(address, NAME, 3)
        for column, data in (("body", list(store.read())[2].body), ("chain", chain)):
            for place in range(len(data)):
                for flip in (0x01, 0x80, 0xFF):
                    self.damage(
                        address, 3, column, data[:place] + bytes([data[place] ^ flip]) + data[place + 1 :]
                    )
                    with pytest.raises(Corrupt, match="row 3"):
                        list(store.read())
            self.damage(address, 3, column, data)
        assert len(list(store.read())) == 5

    @pytest.mark.parametrize(("first", "last"), [(1, 1), (2, 2), (255, 258), (2, 999), (1, 999)])
    def test_rows_missing_from_the_middle_are_found(
        self, store: Store, address: str, first: int, last: int
    ) -> None:
        store.append(turn(1, 1000), 0)
        self.remove(address, first, last)
        with pytest.raises(Corrupt) as caught:
            list(store.read())
        assert caught.value.seq == first
