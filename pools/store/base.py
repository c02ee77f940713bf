"""The contract of a log store, and every error it raises. The words (row, turn, epoch) are in the package
docstring.

A store is used by one caller at a time (any thread, never two at once). What a caller may rely on:

- `append` returned: the whole turn is durable. It raised `AppendFailed`, `Fenced` or `SequenceGap`: nothing
  of the turn is, and with `AppendFailed` the same store may be tried again. It raised `SyncFailed`: nobody
  knows; the process must end (`os._exit`) before it answers anyone, and a successor reads what is there.
- A store that was fenced or whose sync failed stays so: every later write raises the same.
"""

from __future__ import annotations

import gc
import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import repeat
from struct import unpack
from typing import Any, NamedTuple

from ray_pools.errors import PoolsError

BODY_MAX_BYTES = 16 * 2**20
"""The largest event. SQLite could take more, but a turn of such events must fit into memory."""
SIZE_BYTES = 4
BATCH_MAX_EVENTS = 1_000
BATCH_MAX_BYTES = 2**20
"""A turn that is larger is kept in several batches (of one transaction), so that a reader needs little memory."""
RUN_EVENTS = 128
"""A run ends with the batch that reaches it: longer ones were slower to unpack."""


class Row(NamedTuple):
    """One event as it stands in the log."""

    seq: int
    epoch: int
    at: float
    """The core's time in seconds."""
    body: bytes


class Batch(NamedTuple):
    """Events that stand together in the log: a turn, or a part of one that is large or has several times."""

    first_seq: int
    last_seq: int
    epoch: int
    at: float
    sizes: bytes
    """Of the bodies, unsigned 32 bit, little-endian; empty if there is one body only."""
    body: bytes
    """All bodies, one after the other; a msgpack reader takes them all in one go."""

    @property
    def bodies(self) -> list[bytes]:
        """Of the rows `first_seq`, `first_seq + 1`, ... to `last_seq`."""
        if self.first_seq == self.last_seq:
            return [self.body]
        body, start, bodies = self.body, 0, []
        for size in unpack(f"<{len(self.sizes) // SIZE_BYTES}I", self.sizes):
            bodies.append(body[start : start + size])
            start += size
        return bodies

    def rest(self, from_seq: int) -> Batch:
        """The same without its rows below `from_seq`."""
        left_out = from_seq - self.first_seq
        if left_out <= 0:
            return self
        cut = left_out * SIZE_BYTES
        start = sum(unpack(f"<{left_out}I", self.sizes[:cut]))
        sizes = self.sizes[cut:] if from_seq < self.last_seq else b""
        return self._replace(first_seq=from_seq, sizes=sizes, body=self.body[start:])


class Run(NamedTuple):
    """Batches that follow one another, in one piece: the quickest way through a long log."""

    first_seq: int
    last_seq: int
    turns: list[tuple[int, float]]
    """Of each batch its last row's number, and the time of its rows."""
    body: bytes
    """All bodies, one after the other."""

    @property
    def rows(self) -> int:
        """How many rows."""
        return self.last_seq - self.first_seq + 1

    def times(self) -> Iterator[float]:
        """The time of each row."""
        seq = self.first_seq - 1
        for last_seq, at in self.turns:
            yield from repeat(at, last_seq - seq)
            seq = last_seq


@contextmanager
def reading_much() -> Iterator[None]:
    """While a long log is read: the cycle collector rests. Events have no cycles, and each run of them
    would be searched for some again.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


class Snapshot(NamedTuple):
    """The folded state after row `seq`; `epoch` is that row's."""

    seq: int
    epoch: int
    state: bytes


class StoreError(PoolsError):
    """What a store has to say; `where` names the log (a file, or an address and a name)."""

    def __init__(self, where: str, why: str) -> None:
        self.where, self.why = where, why
        super().__init__(f"{where}: {why}")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.where, self.why)


class AppendFailed(StoreError):
    """A write was rolled back as a whole (disk full, I/O error before the commit, a lock that never came)."""


class SyncFailed(StoreError):
    """The commit itself failed: the turn may or may not be on disk. The process must end."""


class UnsafeStore(StoreError):
    """The store's settings don't keep the contract's promises, so it was not opened."""


class ForeignStore(StoreError):
    """Some other application's file, another actor's log, or one of a newer version of this format."""


class NoLog(StoreError):
    """There is no log of this name at this address."""


class Fenced(StoreError):
    """Somebody opened this log after us: epoch `current` where ours is `mine`. Nothing was written."""

    def __init__(self, where: str, mine: int, current: int) -> None:
        self.mine, self.current = mine, current
        super().__init__(
            where,
            f"this writer opened epoch {mine}, a later one has opened epoch {current}; nothing was written",
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.where, self.mine, self.current)


class SequenceGap(StoreError):
    """The caller counts on row `expected` being the last, but `head` is."""

    def __init__(self, where: str, expected: int, head: int) -> None:
        self.expected, self.head = expected, head
        super().__init__(where, f"row {expected} should be the last, but the last row is {head}")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.where, self.expected, self.head)


class Corrupt(StoreError):
    """The log is damaged at row `seq` (0: not in a row, but in what stands before all rows)."""

    def __init__(self, where: str, seq: int, why: str) -> None:
        self.seq, self.detail = seq, why
        super().__init__(where, f"the log is damaged at row {seq}: {why}")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.where, self.seq, self.detail)


class DamagedSnapshot(Corrupt):
    """The snapshot after row `seq`, as far as that is known, is not as it was written. The rows may be sound."""


class Pruned(StoreError):
    """Rows from `wanted` on were asked for, but the first one kept is `first`."""

    def __init__(self, where: str, wanted: int, first: int) -> None:
        self.wanted, self.first = wanted, first
        super().__init__(where, f"row {wanted} is pruned; the first row kept is {first}")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.where, self.wanted, self.first)


class Reader(ABC):
    """Reads a log and changes nothing: neither the epoch nor, in sqlite, the file (it never checkpoints)."""

    where: str
    """Names the log in errors."""

    def read(self, from_seq: int = 1) -> Iterator[Row]:
        """The rows from `from_seq` to the one that is last now, in order; otherwise as `read_batches`."""
        for batch in self.read_batches(from_seq):
            for seq, body in enumerate(batch.bodies, batch.first_seq):
                yield Row(seq, batch.epoch, batch.at, body)

    @abstractmethod
    def read_batches(self, from_seq: int = 1) -> Iterator[Batch]:
        """The same rows as they stand together, which is the quicker way to go through a whole log.

        Each batch is verified before it is yielded; of the one that holds row `from_seq` the rest is yielded.
        Holds neither a lock nor many rows at a time. Call again with the last seq + 1 to follow a live log.
        Raises, while iterating: `Corrupt` at the first batch that is not as it was written, naming its first
        row; `Pruned`; `SequenceGap` if row `from_seq - 1` does not exist.
        """

    def read_runs(self, from_seq: int = 1) -> Iterator[Run]:
        """The same batches, several at a time; otherwise as `read_batches`."""
        turns: list[tuple[int, float]] = []
        bodies: list[bytes] = []
        first = from_seq
        try:
            for batch in self.read_batches(from_seq):
                turns.append((batch.last_seq, batch.at))
                bodies.append(batch.body)
                if batch.last_seq - first + 1 >= RUN_EVENTS:
                    yield Run(first, batch.last_seq, turns, b"".join(bodies))
                    first, turns, bodies = batch.last_seq + 1, [], []
        except StoreError:
            if turns:  # what is before the damage is sound
                yield Run(first, turns[-1][0], turns, b"".join(bodies))
            raise
        if turns:
            yield Run(first, turns[-1][0], turns, b"".join(bodies))

    @abstractmethod
    def head(self) -> tuple[int, int]:
        """(epoch, seq): the epoch of the latest opener, and the last row's number (0: none yet)."""

    @abstractmethod
    def first_seq(self) -> int:
        """The number of the first row that was not pruned: 1 until something was."""

    @abstractmethod
    def latest_snapshot(self) -> Snapshot | None:
        """The latest snapshot; None if there is none.

        Raises `DamagedSnapshot` if it is damaged, `Corrupt` if the log does not have the row that it was made after.
        """

    @abstractmethod
    def close(self) -> None:
        """Lets go of the store. May be called twice."""


EPOCH_LEAP = 1 << 20
"""In milliseconds about 17 minutes."""


def opened_epoch(last: int, at_least: int) -> int:
    """The epoch in which a log is opened whose last one is `last`. `at_least`: the time, where epochs hold it.

    A log that was put back from an old copy must not come back in an epoch that it had before: nobody could tell the
    two apart. With the time in it, it does not; and where the time is not above the last epoch, since a clock was
    set back, neither does one that leaps by a chance amount.
    """
    if at_least > last:
        return at_least
    return last + 1 + (secrets.randbelow(EPOCH_LEAP) if at_least else 0)


class Store(Reader):
    """A log to write to. Nothing is touched until `open`; every other method needs it."""

    @abstractmethod
    def open(self, at_least: int = 0) -> int:
        """Makes a missing log, raises its epoch durably, returns it; earlier openers are fenced.

        The epoch is `opened_epoch`: above every earlier one of this log, and not below `at_least`.
        """

    @abstractmethod
    def append(self, records: Sequence[tuple[float, bytes]], expected_seq: int) -> int:
        """Appends one turn of (at, body) and returns the last row's number, all of it durable.

        `expected_seq` is the number of the row that the caller takes to be the last (0: none). A turn without
        records writes nothing, but still checks that this writer is not fenced. Raises `Fenced`,
        `SequenceGap`, `AppendFailed`, `SyncFailed`, `Corrupt`.
        """

    @abstractmethod
    def snapshot(self, seq: int, state: bytes) -> None:
        """Keeps `state` as the state after row `seq`, durably, in place of the snapshot before.

        Raises as `append`; `SequenceGap` if there is no row `seq`, `AppendFailed` if a later one is snapshot.
        """

    @abstractmethod
    def prune(self, before_seq: int) -> int:
        """Removes the batches that end below row `before_seq`, and returns how many rows. Raises as `append`.

        A batch goes as a whole or stays as a whole, so that `first_seq` may stay a little below `before_seq`.
        Only rows below the latest snapshot's can go (`AppendFailed` otherwise): that row and all after it
        stay.
        """


def cannot_prune(before_seq: int, latest: Snapshot | None) -> str:
    """Why rows below `before_seq` must stay."""
    have = f"the latest snapshot is of row {latest.seq}" if latest else "there is no snapshot"
    return f"can't prune below row {before_seq}: {have}, and only rows before it can go"
