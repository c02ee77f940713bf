"""How much the log costs: appending to it, reading a million events back, and a restart.

- append: a turn made durable by the sqlite store, against a bare write and fdatasync of the same bytes to a file.
- replay: 1,000,000 events of a pool's log read, verified and unpacked, against bare msgpack decoding of the same
  bodies, one after the other and held in memory. The events are real: the pool's core makes them (submissions,
  releases and grants in a full pool), with ids as clients make them. Once in the turns in which the core made them,
  about 4 events each, once in turns of 100, and once with every event as a turn of its own, for which there is no
  target: each turn has a row of the table and a checksum, and no other event shares their price.
- restart: a snapshot and the 50,000 events after it, as many as a restart ever has to fold, against the fold of all.

Logs are made and read in processes of their own, so that the peak of their memory is that of the work alone.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgpack

from benchmarks.decide import SHAPES, Bench
from benchmarks.figures import Figure, middle, rounds, size, verdict
from ray_pools.core import records as ev
from ray_pools.core.config_rules import PolicyConfig, PoolConfig
from ray_pools.core.pool_state import PoolState
from ray_pools.store import Reader, open_reader, open_store
from ray_pools.store.base import reading_much
from ray_pools.store.chain import genesis, stored

ROUNDS = 5
EVENTS = size(1_000_000, 5_000)
TAIL = size(50_000, 500)
APPENDS = size(1_500, 20)
"""Turns for each round: more than a WAL takes before its pages are moved, so that this is in the price."""
TIMES_MAX, MEMORY_MAX_MB = 4.0, 300.0
NAME = "pool:bench"
LAYOUTS = {"made": "turns as made", "100": "turns of 100", "1": "turns of 1"}


class Cycling(Bench):
    """A full pool; each turn brings it a request and a release, and it grants what fits."""

    def __init__(self) -> None:
        self.events: list[Any] = []
        config = PoolConfig("bench", {"gpu": 480, "step_run": 1_000_000})
        super().__init__(
            config, [PolicyConfig("bench", f"team-{n}", 0, {"gpu": 30, "step_run": 1000}) for n in range(8)]
        )
        self.held: deque[str] = deque()

    def tell(self, *directives: list[Any]) -> list[Any]:
        self.events = super().tell(*directives)
        return self.events

    def submission(self, requester: str, gpus: int, preemptible: bool = True) -> list[Any]:
        directive = super().submission(requester, gpus, preemptible)
        directive[0] = hashlib.md5(directive[0].encode()).hexdigest()  # as long as the ids that clients make
        directive[4][4] = self.pool.now
        return directive

    def more(self) -> list[Any]:
        return self.submission(f"team-{self.ages % 8}", SHAPES[self.ages % len(SHAPES)])

    def turns(self) -> Iterator[tuple[float, list[bytes]]]:
        """Time and bodies of one turn after the other, without end."""
        directives = [self.more() for _ in range(400)]
        while True:
            yield self.pool.now, [ev.pack(event) for event in self.events]
            self.pool.set_time(self.pool.now + 0.125)
            self.tell(*directives)
            self.held.extend(event.id for event in self.events if type(event) is ev.Granted)
            directives = [self.more(), [self.held.popleft(), "ask", 1, "release"]]


def make(directory: str) -> None:
    """The logs of all layouts, each of EVENTS events; a snapshot TAIL events before the end in the first."""
    writers = {layout: Writer(f"{directory}/{layout}") for layout in LAYOUTS}
    state, bench, snapshot = PoolState(), Cycling(), (0, b"")
    hundred: list[bytes] = []
    for at, bodies in bench.turns():
        bodies = bodies[: EVENTS - state.seq]
        for body in bodies:
            state.apply(ev.unpack(body), at)
            writers["1"].append(at, [body])
        writers["made"].append(at, bodies)
        hundred += bodies
        if len(hundred) >= 100 or state.seq == EVENTS:
            writers["100"].append(at, hundred)
            hundred = []
        if not snapshot[0] and state.seq >= EVENTS - TAIL:
            snapshot = state.seq, msgpack.packb(state.dump())
        if state.seq == EVENTS:
            break
    for writer in writers.values():
        writer.close()
    store = open_store(f"{directory}/made", NAME)
    store.open()
    store.snapshot(*snapshot)
    store.close()


class Writer:
    """Puts turns into a log's table as the store would, but all in one transaction: nobody waits for a disk."""

    def __init__(self, directory: str, name: str = NAME) -> None:
        store = open_store(directory, name)
        store.open()
        store.close()
        self.seq, self.chain = 0, genesis(name)
        self.db = sqlite3.connect(store.where)

    def append(self, at: float, bodies: list[bytes]) -> None:
        rows = stored("", self.seq, self.chain, 1, [(at, body) for body in bodies])
        names = ", ".join(rows[0]._fields)
        self.db.executemany(f"INSERT INTO log ({names}) VALUES (?, ?, ?, ?, ?, ?, ?)", rows)
        self.seq, self.chain = rows[-1].seq, rows[-1].chain

    def close(self) -> None:
        self.db.commit()
        self.db.close()


# --- reading it


def events_of(reader: Reader, from_seq: int = 1) -> Iterator[tuple[Iterator[float], list[Any]]]:
    """Events of the log, some at a time, and the time of each."""
    for run in reader.read_runs(from_seq):
        yield run.times(), ev.unpack_all(run.body, run.rows)


def seconds(work: Callable[[], object]) -> Callable[[], float]:
    def measure() -> float:
        started = time.perf_counter()
        work()
        return time.perf_counter() - started

    return measure


def replay(reader: Reader) -> None:
    with reading_much():
        count = sum(len(events) for _, events in events_of(reader))
    assert count == EVENTS, count


def compare_replay(reader: Reader) -> dict[str, Any]:
    """Seconds for bare decoding and for replay, round by round."""
    bodies = [row.body for row in reader.read()]

    def bare() -> None:
        for body in bodies:
            msgpack.unpackb(body, strict_map_key=False)

    bare_s, replay_s = rounds(ROUNDS, seconds(bare), seconds(lambda: replay(reader)))
    return {"bare": bare_s, "replay": replay_s, "bytes": sum(map(len, bodies))}


def measure_memory(reader: Reader) -> dict[str, Any]:
    """The peak of a process that replays and does nothing else."""
    replay(reader)
    return {"peak_mb": peak_mb()}


def compare_restarts(reader: Reader) -> dict[str, Any]:
    """Seconds for a restart from the snapshot and for the fold of all; both must give the same state."""
    digests = set()

    def folded(use_snapshot: bool) -> None:
        snapshot = reader.latest_snapshot() if use_snapshot else None
        state = (
            PoolState.load(msgpack.unpackb(snapshot.state, strict_map_key=False)) if snapshot else PoolState()
        )
        with reading_much():
            for times, events in events_of(reader, state.seq + 1):
                for event, at in zip(events, times, strict=True):
                    state.apply(event, at)
        assert state.seq == EVENTS
        digests.add(state.digest())

    quick, full = rounds(ROUNDS, seconds(lambda: folded(True)), seconds(lambda: folded(False)))
    assert len(digests) == 1, "snapshot and tail don't give the state that all events give"
    return {"quick": quick, "full": full, "peak_mb": peak_mb()}


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


# --- appending


def append_rate(directory: Path, per_turn: int) -> tuple[Callable[[], float], Callable[[], float]]:
    """Turns a second: by the store, and by a bare write and fdatasync of the same bytes."""
    turns = Cycling().turns()
    next(turns)
    bodies: list[bytes] = []
    while len(bodies) < per_turn:
        bodies += next(turns)[1]
    bodies = bodies[:per_turn]
    records, data = [(1.0, body) for body in bodies], b"".join(bodies)
    count = APPENDS if per_turn == 1 else APPENDS // 2

    def by_store() -> float:
        with closing(open_store(str(directory / f"append-{per_turn}"), NAME)) as store:
            store.open()
            seq = store.head()[1]
            started = time.perf_counter()
            for _ in range(count):
                seq = store.append(records, seq)
            return count / (time.perf_counter() - started)

    def bare() -> float:
        file = os.open(directory / f"bare-{per_turn}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            started = time.perf_counter()
            for _ in range(count):
                os.write(file, data)
                os.fdatasync(file)
            return count / (time.perf_counter() - started)
        finally:
            os.close(file)

    return by_store, bare


# --- the figures


def run() -> Iterator[Figure]:
    """The figures, medians of 5 rounds; the ratio of a replay is the median of the rounds' ratios."""
    with tempfile.TemporaryDirectory(prefix="ray-pools-bench-") as directory:
        for per_turn in (1, 100):
            store, bare = rounds(ROUNDS, *append_rate(Path(directory), per_turn))
            rate, spread = middle(store)
            name = f"log: appends, turns of {per_turn}"
            yield Figure(name, rate, "turns/s", rate / middle(bare)[0], "", None, spread)
        in_child("make", directory)
        for layout, words in LAYOUTS.items():
            found = in_child("compare_replay", f"{directory}/{layout}")
            value, spread = middle(found["replay"])
            ratio, _ = middle([a / b for a, b in zip(found["replay"], found["bare"], strict=True)])
            target, met = (
                ("", None) if layout == "1" else ("at most 4 times bare", verdict(ratio <= TIMES_MAX))
            )
            yield Figure(f"log: replay of a million, {words}", value, "s", ratio, target, met, spread)
            if layout == "made":
                bare_s, _ = middle(found["bare"])
            peak = in_child("measure_memory", f"{directory}/{layout}")["peak_mb"]
            met = verdict(peak <= MEMORY_MAX_MB)
            yield Figure(f"log: its peak, {words}", peak, "MB", None, "at most 300 MB", met, 0.0)
        found = in_child("compare_restarts", f"{directory}/made")
        full, full_spread = middle(found["full"])
        yield Figure("log: replay of a million and its fold", full, "s", full / bare_s, "", None, full_spread)
        peak = found["peak_mb"]
        met = verdict(peak <= MEMORY_MAX_MB)
        yield Figure("log: peak of the fold", peak, "MB", None, "at most 300 MB", met, 0.0)
        quick, spread = middle(found["quick"])
        yield Figure("log: restart, snapshot + 50,000", quick, "s", quick / full, "", None, spread)


def in_child(what: str, directory: str) -> dict[str, Any]:
    """What a function of this module gives, called in a new process."""
    command = [sys.executable, "-m", "benchmarks.log", what, directory]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, cwd=Path(__file__).parent.parent)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def main(what: str, directory: str) -> None:
    if what == "make":
        make(directory)
        print("{}")
        return
    with closing(open_reader(directory, NAME)) as reader:
        print(json.dumps(globals()[what](reader)))


if __name__ == "__main__":
    main(*sys.argv[1:])
