"""How soon a pool's actor serves again after SIGKILL, with 1,000,000 events in its log and 5,000 grants held.

Its log is as large as it gets between two snapshots: one, and the 50,000 events since, as many as a restart ever
has to fold. Beside it a bare actor, which Ray starts anew in the same way, and which has nothing to read. Each is
killed 15 times, in turn. What counts is from the start of the new process to its first answer; from the kill on,
which holds Ray's own pause before it starts another, is reported.

The logs of coordinator and pool are made beforehand by their cores, in virtual time, and written as a store would.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgpack

from benchmarks.figures import Figure, middle, size, verdict
from benchmarks.live import Bare, Live, live
from benchmarks.log import EVENTS, TAIL, Writer
from ray_pools.core import records as ev
from ray_pools.core.config_rules import PolicyConfig, PoolConfig
from ray_pools.core.coordinator import Coordinator
from ray_pools.core.coordinator_state import CoordinatorState
from ray_pools.core.pool import Pool
from ray_pools.core.pool_state import PoolState
from ray_pools.store import open_store

KILLS = 15
HELD = 5_000
PER_TURN = 50
TIMES_MAX = 1.5
NAME = "busy"
_RETENTION_S = 60.0
_LOOK_S = 0.005


def config(held: int) -> str:
    """A pool of so many seats."""
    pool = f"{NAME}: {{capacity: {{seat: {held}}}, placement: none}}"
    return f"pools:\n  {pool}\npolicies:\n  - {{requester: holds, pool: {NAME}}}\n"


# --- the logs


class Side(NamedTuple):
    """A core, and where its log goes."""

    core: Any
    writer: Writer

    def persist(self) -> list[Any]:
        """The turn is over: its events are in the log."""
        events: list[Any] = self.core.take_step().events
        if events:
            self.writer.append(self.core.now, [ev.pack(event) for event in events])
        return events


class Pair:
    """Coordinator and pool, in lockstep; every grant is of one seat, and those that hold longest give back first."""

    def __init__(self, folder: Path, held: int) -> None:
        self.now, self.submitted = 1.0, 0
        coordinator = Coordinator(CoordinatorState(), 1, self.now, _RETENTION_S)
        pool = Pool(NAME, PoolState(), 1, self.now)
        self.coordinator = Side(coordinator, Writer(str(folder), "coordinator"))
        self.pool = Side(pool, Writer(str(folder), f"pool:{NAME}"))
        config = PoolConfig(NAME, {"seat": held})
        coordinator.change([("pool", config, f"{NAME}#1"), ("policy", PolicyConfig(NAME, "holds"))])
        self.live: deque[str] = deque()
        self.exchange()

    def exchange(self) -> None:
        """Both hear all that the other has to say."""
        coordinator, pool = self.coordinator.core, self.pool.core
        self.coordinator.persist()
        while coordinator.has_news(NAME) or pool.has_news:
            pool.exchange(coordinator.outgoing(NAME))
            pool.walk()
            self.pool.persist()
            coordinator.exchange(NAME, pool.outgoing())
            self.coordinator.persist()

    def turn(self, submissions: int, releases: int) -> None:
        """So many requests come, and so many grants end."""
        self.now += 0.1
        core = self.coordinator.core
        for side in (self.coordinator, self.pool):
            side.core.set_time(self.now)
        for _ in range(submissions):
            self.submitted += 1
            id = f"{self.submitted:032x}"
            core.submit(id, "holds", {"seat": 1, "step_run": 1}, token=b"x" * 32, client="c" * 32)
            self.live.append(id)
        for _ in range(releases):
            core.release(core.state.requests[self.live.popleft()])
        if self.submitted % 1000 < submissions:
            core.forget()
        self.exchange()

    def snapshot(self, side: Side, name: str, folder: Path) -> Callable[[], None]:
        """Of the state as it is now; to be written when the log is."""
        seq, state = side.core.state.seq, msgpack.packb(side.core.state.dump())

        def write() -> None:
            store = open_store(str(folder), name)
            store.open()
            store.snapshot(seq, state)
            store.close()

        return write


def make(folder: Path, events: int, held: int, tail: int) -> None:
    """The logs of a pool of so many seats, all of them held, with a snapshot `tail` events before its end."""
    pair = Pair(folder, held)
    while len(pair.live) < held:
        pair.turn(min(PER_TURN, held - len(pair.live)), 0)
    snapshots: list[Callable[[], None]] = []
    while (seq := pair.pool.core.state.seq) < events:
        if not snapshots and seq >= events - tail:
            snapshots.append(pair.snapshot(pair.pool, f"pool:{NAME}", folder))
        pair.turn(PER_TURN, PER_TURN)
    snapshots.append(pair.snapshot(pair.coordinator, "coordinator", folder))
    for side in (pair.coordinator, pair.pool):
        side.writer.close()
    for write in snapshots:
        write()


# --- the actors


class Restart(NamedTuple):
    """Seconds to the first answer: since the kill, and since the new process was there."""

    since_kill: float
    since_start: float


def started_at(pid: int) -> float:
    """When a process of this machine began, by the monotonic clock."""
    ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    up_s = float(Path("/proc/uptime").read_text().split()[0])
    return time.monotonic() - (up_s - ticks / os.sysconf("SC_CLK_TCK"))


def kill(pid: int, ask: Callable[[], int]) -> Restart:
    """Kills the process, and asks until another one answers with its pid."""
    begun = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    while True:
        with suppress(Exception):  # whatever Ray raises while it is away
            if (new := ask()) != pid:
                answered = time.monotonic()
                return Restart(answered - begun, answered - max(started_at(new), begun))
        time.sleep(_LOOK_S)


def _pool_pid(bench: Live) -> Callable[[], int]:
    """Asks the actor as Ray sees it, with no patience of a client's."""
    import ray

    from ray_pools import wire

    actor: Any = ray.get_actor(wire.pool_actor_name(NAME), namespace=bench.namespace)
    data = wire.encode_request([{"op": "status", "queue_limit": 1}, {"op": "ping"}])

    def ask() -> int:
        status, said = wire.decode_response(ray.get(actor.call.remote(data), timeout=30.0), 2)
        assert wire.value_of(status)["requesters"]["holds"]["grants"] > 0
        return int(wire.value_of(said)["pid"])

    return ask


def run() -> Iterator[Figure]:
    """The figures, medians of 15 restarts of each, in turn."""
    kills, held = size(KILLS, 2), size(HELD, 50)
    with tempfile.TemporaryDirectory(prefix="ray-pools-bench-") as directory:
        store = Path(directory)
        make(store, EVENTS, held, TAIL)
        with live(config(held), store) as bench:
            bare, ask = Bare(), _pool_pid(bench)
            found: list[tuple[Restart, Restart]] = []
            for _ in range(kills):
                found.append((kill(ask(), ask), kill(bare.pid(), bare.pid)))
            bare.close()
    for field, shown in (("since_start", "process start to serving"), ("since_kill", "SIGKILL to serving")):
        pools, bares = ([getattr(each[side], field) for each in found] for side in (0, 1))
        base, spread = middle(bares)
        yield Figure(f"restart: {shown}, bare actor", base, "s", 1.0, "", None, spread)
        value, spread = middle(pools)
        ratio, target, met = value / base, "", None
        if field == "since_start":
            target, met = f"at most {TIMES_MAX:g} times bare", verdict(ratio <= TIMES_MAX)
        yield Figure(f"restart: {shown}, pool with {held:,} held", value, "s", ratio, target, met, spread)
