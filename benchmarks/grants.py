"""How long it takes until a holder can work, in a pool that counts only, on the durable store and live actors.

- acquire: `client.submit(...).wait()` in a pool with room: from the call to a slot that can be used.
- known: from the pool's decision (the time of `Granted` in its log, before it is durable) to the moment at which the
  waiter goes on in another process: with one waiter, and with 1,000 waiters in 8 client processes, each its own
  request, where every grant goes out while others are released and granted.

Ratios are to a bare call, a no-op of a sync actor on the same node, measured in the same round.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import NamedTuple

from benchmarks.figures import Figure, middle, size, verdict
from benchmarks.live import Bare, Live, Worker, live, quantile
from ray_pools.core import records as ev
from ray_pools.store import open_reader

ROUNDS = 5
ACQUIRES = 150
PROCESSES, WAITERS = 8, 1000
SEATS = 16
BARE_CALLS_MAX = 5.0

CONFIG = f"""
pools:
  free: {{capacity: {{seat: 1000000}}, placement: none}}
  busy: {{capacity: {{seat: {SEATS}}}, placement: none}}
  single: {{capacity: {{seat: 1}}, placement: none}}
policies:
  - {{requester: acquires, pool: free}}
  - {{requester: waits, pool: busy}}
  - {{requester: alone, pool: single}}
"""


class Round(NamedTuple):
    """Seconds; each list is sorted by nothing."""

    bare: float
    acquire: list[float]
    alone: list[float]
    crowd: list[float]


def acquires(bench: Live) -> list[float]:
    """Of one client, one after the other."""
    found = []
    for _ in range(size(ACQUIRES, 5)):
        begun = time.perf_counter()
        slot = bench.client.submit("acquires", pool_resources={"seat": 1}).wait()
        found.append(time.perf_counter() - begun)
        slot.release()
    return found


def granted_at(bench: Live, pool: str, from_seq: int) -> tuple[dict[str, float], int]:
    """Request -> when the pool decided, for what its log has from this row on; and the row after it."""
    found, seq = {}, from_seq
    reader = open_reader(bench.store, f"pool:{pool}")
    try:
        for row in reader.read(from_seq):
            event = ev.unpack(row.body)
            seq = row.seq + 1
            if isinstance(event, ev.Granted):
                found[event.id] = row.at
    finally:
        reader.close()
    return found, seq


class Crowd:
    """Client processes that wait for slots of one pool."""

    def __init__(self, bench: Live, pool: str, requester: str, processes: int, waiters: int) -> None:
        self.bench, self.pool, self.seq = bench, pool, 1
        each = str(waiters // processes)
        self.workers: list[Worker] = []
        try:
            for _ in range(processes):
                self.workers.append(bench.process("benchmarks.waiters", requester, each))
            for worker in self.workers:
                worker.read()
        except BaseException:
            self.close()
            raise

    def once(self) -> list[float]:
        """From decision to known, of each waiter."""
        known: dict[str, float] = {}
        for worker in self.workers:
            worker.tell("again")
        for worker in self.workers:
            worker.read()
        for worker in self.workers:
            known.update(worker.read())
        decided, self.seq = granted_at(self.bench, self.pool, self.seq)
        return [at - decided[id] for id, at in known.items()]

    def close(self) -> None:
        for worker in self.workers:
            worker.close()


def measure(bench: Live, waiters: int) -> list[Round]:
    """The rounds, with all that is compared in each."""
    count = size(ACQUIRES, 5)
    with contextlib.ExitStack() as stack:
        bare = Bare()
        stack.callback(bare.close)
        crowd = Crowd(bench, "busy", "waits", size(PROCESSES, 2), waiters)
        stack.callback(crowd.close)
        alone = Crowd(bench, "single", "alone", 1, 1)
        stack.callback(alone.close)
        crowd.once(), alone.once(), acquires(bench)
        found = []
        for _ in range(ROUNDS):
            one = [alone.once()[0] for _ in range(count)]
            before = bare.p50(count)
            taken = acquires(bench)
            found.append(Round((before + bare.p50(count)) / 2, taken, one, crowd.once()))
        return found


def run() -> Iterator[Figure]:
    """The figures, medians of 5 rounds."""
    waiters = size(WAITERS, 20)
    with live(CONFIG) as bench:
        found = measure(bench, waiters)
    bare, spread = middle([each.bare for each in found])
    yield Figure("grants: bare call, p50", bare * 1e3, "ms", 1.0, "", None, spread)
    names = {
        "acquire to usable": "acquire",
        "grant to known, one waiter": "alone",
        f"grant to known, {waiters:,} waiters": "crowd",
    }
    for name, field in names.items():
        for label, share in (("p50", 0.5), ("p99", 0.99)):
            value, spread = middle([quantile(getattr(each, field), share) for each in found])
            ratio, _ = middle([quantile(getattr(each, field), share) / each.bare for each in found])
            target, met = "", None
            if (field, label) == ("acquire", "p50"):
                target, met = f"at most {BARE_CALLS_MAX:g} bare calls", verdict(ratio <= BARE_CALLS_MAX)
            yield Figure(f"grants: {name}, {label}", value * 1e3, "ms", ratio, target, met, spread)
