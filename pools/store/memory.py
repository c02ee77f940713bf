"""The log in memory: for simulation and tests. Lives as long as the process, over any number of openers.

Logs are known by (address, name) in this process, so that a restarted actor of a simulation finds its log,
and the zombie of one is fenced. Faults of a disk can be put into a log: see `MemoryLog.next_fault`.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ray_pools.store.base import (
    AppendFailed,
    Batch,
    Corrupt,
    DamagedSnapshot,
    Fenced,
    NoLog,
    Pruned,
    Reader,
    SequenceGap,
    Snapshot,
    Store,
    StoreError,
    SyncFailed,
    cannot_prune,
    opened_epoch,
)
from ray_pools.store.chain import Stored, genesis, seal, stored, verified

Fault = Literal["", "full", "sync_lost", "sync_kept"]


@dataclass
class MemoryLog:
    """What would be on disk."""

    base_chain: bytes
    base_seq: int = 0
    epoch: int = 0
    batches: list[Stored] = field(default_factory=list)
    snapshot: tuple[int, int, bytes, bytes, bytes] | None = None
    """seq, epoch, chain, state, seal."""
    next_fault: Fault = ""
    """What the next write meets: a full disk, or a failed sync after which the turn is lost or is there."""
    lock: threading.RLock = field(default_factory=threading.RLock)

    @property
    def seq(self) -> int:
        return self.batches[-1].seq if self.batches else self.base_seq

    def place(self, seq: int) -> int:
        """The place in `batches` of the one that holds row `seq`; behind all of them if none does."""
        return bisect_left(self.batches, seq, key=lambda batch: batch.seq)

    def before(self, place: int) -> tuple[int, bytes]:
        """(last row, chain) of what stands before this place."""
        batch = self.batches[place - 1] if place else None
        return (batch.seq, batch.chain) if batch else (self.base_seq, self.base_chain)


_logs: dict[tuple[str, str], MemoryLog] = {}
_logs_lock = threading.Lock()


def memory_log(address: str, name: str) -> MemoryLog | None:
    """The log itself, for tests and simulations that put faults into it."""
    return _logs.get((address, name))


def forget(address: str) -> None:
    """Drops all logs of an address."""
    with _logs_lock:
        for key in [key for key in _logs if key[0] == address]:
            del _logs[key]


class MemoryReader(Reader):
    """Reads a log of this process."""

    def __init__(self, address: str, name: str) -> None:
        self.where = f"{address} {name!r}"
        self._key = (address, name)

    def _log(self) -> MemoryLog:
        log = _logs.get(self._key)
        if log is None:
            raise NoLog(self.where, "there is no log of this name")
        return log

    def read_batches(self, from_seq: int = 1) -> Iterator[Batch]:
        log = self._log()
        with log.lock:
            if from_seq <= log.base_seq:
                raise Pruned(self.where, from_seq, log.base_seq + 1)
            if from_seq - 1 > log.seq:
                raise SequenceGap(self.where, from_seq - 1, log.seq)
            place = log.place(from_seq)
            before_seq, before = log.before(place)
            batches = log.batches[place:]
        for batch in verified(self.where, before_seq, before, batches):
            yield batch.rest(from_seq)

    def head(self) -> tuple[int, int]:
        log = self._log()
        with log.lock:
            return log.epoch, log.seq

    def first_seq(self) -> int:
        return self._log().base_seq + 1

    def latest_snapshot(self) -> Snapshot | None:
        log = self._log()
        with log.lock:
            kept = log.snapshot
            if kept is None:
                return None
            seq, epoch, chain, state, sealed = kept
            if seal(seq, epoch, chain, state) != sealed:
                raise DamagedSnapshot(
                    self.where, seq, "the snapshot after this row does not have its checksum"
                )
            if seq > log.seq or log.batches[log.place(seq)].chain != chain:
                raise Corrupt(
                    self.where, seq, "a snapshot was made after this row, but the log does not have it"
                )
            return Snapshot(seq, epoch, state)

    def close(self) -> None:
        pass


class MemoryStore(MemoryReader, Store):
    """Writes a log of this process."""

    _epoch = 0
    _broken: StoreError | None = None

    def open(self, at_least: int = 0) -> int:
        with _logs_lock:
            log = _logs.setdefault(self._key, MemoryLog(genesis(self._key[1])))
        with log.lock:
            self._meet_fault(log)
            log.epoch = opened_epoch(log.epoch, at_least)
            self._epoch, self._broken = log.epoch, None
            return log.epoch

    def append(self, records: Sequence[tuple[float, bytes]], expected_seq: int) -> int:
        log = self._log()
        with log.lock:
            self._check(log)
            if expected_seq != log.seq:
                raise SequenceGap(self.where, expected_seq, log.seq)
            batches = stored(self.where, *log.before(len(log.batches)), self._epoch, records)
            if batches:
                if log.next_fault == "sync_kept":
                    log.batches += batches
                self._meet_fault(log)
                log.batches += batches
            return log.seq

    def snapshot(self, seq: int, state: bytes) -> None:
        log = self._log()
        with log.lock:
            self._check(log)
            if not log.base_seq < seq <= log.seq:
                raise SequenceGap(self.where, seq, log.seq)
            if log.snapshot is not None and log.snapshot[0] > seq:
                raise AppendFailed(
                    self.where, f"there is a snapshot of row {log.snapshot[0]}, after row {seq}"
                )
            self._meet_fault(log)
            batch = log.batches[log.place(seq)]
            sealed = seal(seq, batch.epoch, batch.chain, state)
            log.snapshot = (seq, batch.epoch, batch.chain, state, sealed)

    def prune(self, before_seq: int) -> int:
        log = self._log()
        with log.lock:
            self._check(log)
            latest = self.latest_snapshot()
            if before_seq > (latest.seq if latest else 0):
                raise AppendFailed(self.where, cannot_prune(before_seq, latest))
            place = log.place(before_seq)
            if not place:
                return 0
            self._meet_fault(log)
            before_base = log.base_seq
            log.base_seq, log.base_chain = log.before(place)
            del log.batches[:place]
            return log.base_seq - before_base

    def close(self) -> None:
        self._broken = self._broken or StoreError(self.where, "the store is closed")

    def _check(self, log: MemoryLog) -> None:
        if self._broken is not None:
            raise self._broken
        if not self._epoch:
            raise StoreError(self.where, "the store is not open")
        if log.epoch != self._epoch:
            self._broken = Fenced(self.where, self._epoch, log.epoch)
            raise self._broken

    def _meet_fault(self, log: MemoryLog) -> None:
        fault, log.next_fault = log.next_fault, ""
        if fault == "full":
            raise AppendFailed(self.where, "database or disk is full (simulated)")
        if fault:
            self._broken = SyncFailed(self.where, "the sync failed (simulated)")
            raise self._broken
