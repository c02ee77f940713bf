"""The log in memory: for simulation and tests. Lives as long as the process, over any number of openers.

Logs are known by (address, name) in this process, so that a restarted actor of a simulation finds its log,
and the zombie of one is fenced. Faults of a disk can be put into a log: see `MemoryLog.next_fault`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ray_pools.store.base import (
    AppendFailed,
    Corrupt,
    Fenced,
    NoLog,
    Pruned,
    Reader,
    Row,
    SequenceGap,
    Snapshot,
    Store,
    StoreError,
    SyncFailed,
    cannot_prune,
)
from ray_pools.store.chain import chained, genesis, seal, verified

Fault = Literal["", "full", "sync_lost", "sync_kept"]


@dataclass
class MemoryLog:
    """What would be on disk."""

    base_chain: bytes
    base_seq: int = 0
    epoch: int = 0
    rows: list[Row] = field(default_factory=list)
    snapshot: tuple[int, int, bytes, bytes, bytes] | None = None
    """seq, epoch, chain, state, seal."""
    next_fault: Fault = ""
    """What the next write meets: a full disk, or a failed sync after which the turn is lost or is there."""
    lock: threading.RLock = field(default_factory=threading.RLock)

    @property
    def seq(self) -> int:
        return self.base_seq + len(self.rows)

    def chain_at(self, seq: int) -> bytes:
        """The chain of row `seq`, which is the last pruned one or a later one."""
        return self.base_chain if seq == self.base_seq else self.rows[seq - self.base_seq - 1].chain


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

    def read(self, from_seq: int = 1) -> Iterator[Row]:
        log = self._log()
        with log.lock:
            if from_seq <= log.base_seq:
                raise Pruned(self.where, from_seq, log.base_seq + 1)
            if from_seq - 1 > log.seq:
                raise SequenceGap(self.where, from_seq - 1, log.seq)
            before = log.chain_at(from_seq - 1)
            rows = log.rows[from_seq - log.base_seq - 1 :]
        yield from verified(self.where, from_seq - 1, before, rows)

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
                raise Corrupt(self.where, seq, "the snapshot after this row does not have its checksum")
            if seq > log.seq or log.chain_at(seq) != chain:
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

    def open(self) -> int:
        with _logs_lock:
            log = _logs.setdefault(self._key, MemoryLog(genesis(self._key[1])))
        with log.lock:
            self._meet_fault(log)
            log.epoch += 1
            self._epoch, self._broken = log.epoch, None
            return log.epoch

    def append(self, records: Sequence[tuple[float, bytes]], expected_seq: int) -> int:
        log = self._log()
        with log.lock:
            self._check(log)
            if expected_seq != log.seq:
                raise SequenceGap(self.where, expected_seq, log.seq)
            rows = chained(self.where, log.seq, log.chain_at(log.seq), self._epoch, records)
            if rows:
                if log.next_fault == "sync_kept":
                    log.rows += rows
                self._meet_fault(log)
                log.rows += rows
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
            row = log.rows[seq - log.base_seq - 1]
            log.snapshot = (seq, row.epoch, row.chain, state, seal(seq, row.epoch, row.chain, state))

    def prune(self, before_seq: int) -> int:
        log = self._log()
        with log.lock:
            self._check(log)
            latest = self.latest_snapshot()
            if before_seq > (latest.seq if latest else 0):
                raise AppendFailed(self.where, cannot_prune(before_seq, latest))
            count = max(0, before_seq - 1 - log.base_seq)
            if count:
                self._meet_fault(log)
                log.base_chain = log.rows[count - 1].chain
                log.base_seq += count
                del log.rows[:count]
            return count

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
