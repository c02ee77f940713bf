"""Reads a log on Redis streams; keys and what they hold: `redis.py`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote

from ray_pools.store.base import (
    Batch,
    Corrupt,
    DamagedSnapshot,
    ForeignStore,
    NoLog,
    Pruned,
    Reader,
    SequenceGap,
    Snapshot,
    StoreError,
)
from ray_pools.store.chain import seal, verified
from ray_pools.store.redis_wire import Lost, Place, Refusal, Wire, parse_place

FORMAT = "ray-pools log 1"
READ_MAX_BATCHES = 256
READ_MAX_BYTES = 2**20
"""What is fetched at once, about: how many entries that is goes by the size of those before."""

_HEAD = ("format", "name", "epoch", "base_seq", "base_chain", "seal", "seq", "chain")
_SNAPSHOT = ("seq", "epoch", "chain", "state", "seal")

_Answer = TypeVar("_Answer")


class Entry(NamedTuple):
    """An entry of the stream as a batch is verified; what is missing or can't be read is not of its type."""

    seq: int
    first: Any
    epoch: int
    at: Any
    sizes: Any
    body: Any
    chain: Any


class Head(NamedTuple):
    """The head, and the stream's last entry at the same moment."""

    epoch: int
    base_seq: int
    base_chain: bytes
    seal: bytes
    seq: int
    chain: bytes
    last: Entry | None


class RedisReader(Reader):
    """Reads a log, also while a writer lives. Connects at the first use, and again when that is lost."""

    def __init__(self, address: str, name: str) -> None:
        self.name = name
        self.place: Place = parse_place(address)
        self.where = f"{self.place.shown} {name!r}"
        start = f"{self.place.prefix}:{{{quote(name, safe='')}}}:"
        self._keys = (start + "head", start + "log", start + "snapshot")
        self._wire: Wire | None = None

    def read_batches(self, from_seq: int = 1) -> Iterator[Batch]:
        head = self._head()
        if from_seq <= head.base_seq:
            raise Pruned(self.where, from_seq, head.base_seq + 1)
        end = max(head.seq, head.last.seq if head.last else 0)
        if from_seq - 1 > end:
            raise SequenceGap(self.where, from_seq - 1, end)
        if from_seq > end:
            return
        place, before_seq, before = self._start_of(from_seq, head)
        count = READ_MAX_BATCHES // 8
        while before_seq < end:
            rows = self._range(place, "+", count)
            size = sum(len(row.body or b"") for row in rows)
            count = min(READ_MAX_BATCHES, 2 * count, max(1, count * READ_MAX_BYTES // max(size, 1)))
            rows = [row for row in rows if row.seq <= end]
            if not rows or rows[0].first != before_seq + 1:
                base_seq = self._head().base_seq
                if base_seq > before_seq:
                    raise Pruned(self.where, before_seq + 1, base_seq + 1)
            for batch in verified(self.where, before_seq, before, rows):
                yield batch if batch.first_seq >= from_seq else batch.rest(from_seq)
            if not rows:
                raise Corrupt(self.where, before_seq + 1, "the row is missing, but later ones were there")
            before_seq, before = rows[-1].seq, rows[-1].chain
            place = f"{rows[-1].epoch}-{before_seq + 1}"

    def head(self) -> tuple[int, int]:
        head = self._head()
        self._check_end(head)
        return head.epoch, head.seq

    def first_seq(self) -> int:
        return self._head().base_seq + 1

    def latest_snapshot(self) -> Snapshot | None:
        while True:
            found = self._snapshot_fields()
            if found is None:
                return None
            seq, epoch, chain, state, sealed = found
            if seal(seq, epoch, chain, state) != sealed:
                raise DamagedSnapshot(
                    self.where, seq, "the snapshot after this row does not have its checksum"
                )
            entry = self._find(seq)
            if entry is not None and entry.chain == chain:
                return Snapshot(seq, epoch, state)
            if (
                self._snapshot_fields() == found
            ):  # else a writer was quicker, and pruned what the first was of
                raise Corrupt(
                    self.where, seq, "a snapshot was made after this row, but the log does not have it"
                )

    def close(self) -> None:
        wire, self._wire = self._wire, None
        if wire is not None:
            wire.close()

    def _snapshot_fields(self) -> tuple[int, int, bytes, bytes, bytes] | None:
        found = self._ask(lambda wire: wire.call("HMGET", self._keys[2], *_SNAPSHOT))
        if found == [None] * len(_SNAPSHOT):
            return None
        try:
            return int(found[0]), int(found[1]), bytes(found[2]), bytes(found[3]), bytes(found[4])
        except (TypeError, ValueError):
            raise Corrupt(self.where, 0, "a field of the snapshot is missing or can't be read") from None

    def _connect(self) -> Wire:
        """Raises Lost, StoreError."""
        return Wire(self.place, self.where)

    def _ask(self, question: Callable[[Wire], _Answer]) -> _Answer:
        """The answer to what only reads, and so may be asked again after a broken connection."""
        for last_try in (False, True):
            try:
                if self._wire is None:
                    self._wire = self._connect()
                    last_try = True
                return question(self._wire)
            except Lost as error:
                self._drop()
                if last_try:
                    raise StoreError(self.where, f"the server can't be reached: {error}") from None
            except Refusal as error:
                if error.code == "WRONGTYPE":
                    raise ForeignStore(self.where, "its keys are of another application") from None
                raise StoreError(self.where, f"it can't be read: {error}") from None
        raise AssertionError

    def _drop(self) -> None:
        wire, self._wire = self._wire, None
        if wire is not None:
            wire.close()

    def _found(self) -> Head | None:
        """Reads and verifies what stands before all rows; None if there is no such log."""
        head_key, log_key, snapshot_key = self._keys
        found, last, left = self._ask(
            lambda wire: wire.together(
                [
                    ("HMGET", head_key, *_HEAD),
                    ("XREVRANGE", log_key, "+", "-", "COUNT", 1),
                    ("EXISTS", head_key, log_key, snapshot_key),
                ]
            )
        )
        if not left:
            return None
        if found == [None] * len(_HEAD):
            raise Corrupt(self.where, 0, "its head is missing, but other parts are there")
        form, name, epoch, base_seq, base_chain, sealed, seq, chain = found
        if form != FORMAT.encode():
            raise ForeignStore(self.where, f"its format is {form!r}, this program knows {FORMAT!r}")
        try:
            head = Head(
                int(epoch),
                int(base_seq),
                base_chain,
                sealed,
                int(seq),
                chain,
                _entry(last[0]) if last else None,
            )
            sound = seal(name.decode(), head.epoch, head.base_seq, base_chain) == sealed
        except (TypeError, ValueError, AttributeError):
            sound = False
        if not sound or not isinstance(chain, bytes):
            raise Corrupt(self.where, 0, "the head does not have its checksum")
        if name.decode() != self.name:
            raise ForeignStore(self.where, f"this is the log of {name.decode()!r}, not of {self.name!r}")
        return head

    def _head(self) -> Head:
        head = self._found()
        if head is None:
            raise NoLog(self.where, "there is no such log")
        return head

    def _check_end(self, head: Head) -> None:
        """The last row and the head must name each other: else rows are missing at the end."""
        last = head.last
        seq, chain = (last.seq, last.chain) if last else (head.base_seq, head.base_chain)
        if (seq, chain) != (head.seq, head.chain):
            raise Corrupt(
                self.where, min(seq, head.seq) + 1, f"the last row is {seq}, but {head.seq} was written"
            )
        if last and last.epoch > head.epoch:
            raise Corrupt(self.where, seq, f"its epoch is {last.epoch}, the log's is only {head.epoch}")

    def _start_of(self, from_seq: int, head: Head) -> tuple[str, int, bytes]:
        """The id to read from, and (last row, chain) of what stands before the batch that holds `from_seq`."""
        entry = self._find(from_seq) if from_seq > head.base_seq + 1 else None
        if entry is None:
            return "-", head.base_seq, head.base_chain
        before = self._before(entry)
        if before is None:
            return "-", head.base_seq, head.base_chain
        return (
            f"{entry.epoch}-{entry.seq}",
            before.seq,
            before.chain if isinstance(before.chain, bytes) else b"",
        )

    def _before(self, entry: Entry) -> Entry | None:
        """The entry before this one."""
        found = self._range(f"{entry.epoch}-{max(entry.seq - 1, 0)}", "-", 1, back=True)
        return found[0] if found and found[0] != entry else None

    def _find(self, seq: int) -> Entry | None:
        """The first entry that ends with row `seq` or after it; None if there is none.

        Ids are ordered by epoch first, so the epoch is looked for: the lowest whose entries, and those before,
        reach row `seq`. Usually it is the last or the only one.
        """
        first, last = self._range("-", "+", 1), self._range("+", "-", 1, back=True)
        if not first or not last or last[0].seq < seq:
            return None
        low, high = first[0].epoch, last[0].epoch
        while low < high:
            middle = (low + high) // 2
            reached = self._range(str(middle), "-", 1, back=True)
            if reached and reached[0].seq >= seq:
                high = reached[0].epoch
            else:
                low = middle + 1
        found = self._range(f"{high}-{max(seq, 0)}", "+", 1)
        return found[0] if found else None

    def _range(self, start: str, end: str, count: int, back: bool = False) -> list[Entry]:
        command = "XREVRANGE" if back else "XRANGE"
        found = self._ask(lambda wire: wire.call(command, self._keys[1], start, end, "COUNT", count))
        return [_entry(raw) for raw in found]


def _entry(raw: Sequence[Any]) -> Entry:
    """An entry of the stream; what was put in by no store is kept as it is, and is not verified then."""
    epoch, seq = raw[0].split(b"-")
    fields = dict(zip(raw[1][::2], raw[1][1::2], strict=True))
    first: Any = fields.get(b"first")
    at: Any = fields.get(b"at")
    with contextlib.suppress(TypeError, ValueError):
        first = int(first)
    with contextlib.suppress(TypeError, ValueError):
        at = float(at)
    others = (fields.get(name) for name in (b"sizes", b"body", b"chain"))
    return Entry(int(seq), first, int(epoch), at, *others)
