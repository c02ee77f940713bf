"""Plays jobs through simulated pools: each waits, runs for its duration, and gives its capacity back.

A preempted job keeps what its last checkpoint has, loses the rest, and queues again with what is left to do. All that
falls on one instant is one turn: ends and stops first, then submissions in the trace's order, then the pools decide.
"""

from __future__ import annotations

import gc
import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from ..core import records as ev
from ..core.config_rules import PolicyConfig, PoolConfig
from ..core.records import Amounts
from ..limits import RETRIES_MAX
from ..trace import TraceJob
from .meter import Holding, ShareWatch
from .world import World

KEY = "gpu"
_BINS_S = (1.0, 10.0, 60.0, 300.0, 900.0, 3600.0, 6 * 3600.0, 86400.0, 7 * 86400.0)
_BINS_MAX = 600

WAITING, RUNNING, STOPPING, DONE, REJECTED = "waiting", "running", "stopping", "done", "rejected"


class Job:
    """One job on its way. Times are the trace's, in seconds; -1: not yet."""

    __slots__ = (
        "caused",
        "causes",
        "ended_at",
        "first_at",
        "k",
        "left_s",
        "lost_s",
        "pool",
        "preempted",
        "queued_s",
        "since",
        "state",
        "trace",
    )

    def __init__(self, trace: TraceJob) -> None:
        self.trace = trace
        self.state = WAITING
        self.k = 0
        self.pool = ""
        self.left_s = trace.duration_s
        # since when it waits or runs, whichever it does
        self.since = trace.submit_s
        self.first_at = -1.0
        self.ended_at = -1.0
        # in all its attempts
        self.queued_s = 0.0
        # run again, because no checkpoint had it; with the time that it took to stop
        self.lost_s = 0.0
        self.preempted = 0
        self.caused = 0
        self.causes: dict[str, str] = {}


class Played:
    """What came of it, job by job and as sums. times: of the first submission and the last end."""

    def __init__(
        self,
        jobs: list[Job],
        holdings: Mapping[tuple[str, str], Holding],
        shares: ShareWatch,
        capacity: int,
        times: tuple[float, float],
        bin_s: float,
    ) -> None:
        self.jobs, self.holdings, self.shares, self.capacity = jobs, holdings, shares, capacity
        self.first_s, self.end_s = times
        self.bin_s = bin_s


def play(
    pools: Mapping[str, PoolConfig],
    policies: Sequence[PolicyConfig],
    trace: Sequence[TraceJob],
    *,
    checkpoint_every_s: float = math.inf,
    stop_s: float = 0.0,
) -> Played:
    """Plays the trace to its end.

    checkpoint_every_s: running time between two checkpoints; infinite: none, 0: one whenever it is told to stop.
    stop_s: how long a job takes to stop when it is told to (its pool's grace at most).

    Raises:
        BadInput: the configuration breaks a rule.
    """
    with _no_collector():
        return _Player(pools, policies, trace, checkpoint_every_s, stop_s).run()


@contextmanager
def _no_collector() -> Iterator[None]:
    """Nothing of this makes cycles that matter, and the collector would go through all jobs again and again."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


class _Player:
    def __init__(
        self,
        pools: Mapping[str, PoolConfig],
        policies: Sequence[PolicyConfig],
        trace: Sequence[TraceJob],
        checkpoint_every_s: float,
        stop_s: float,
    ) -> None:
        self.world = World(pools, policies, self._heard, now=trace[0].submit_s)
        self.trace = trace
        self.checkpoint_every_s = checkpoint_every_s
        self.stop_s = {name: min(stop_s, pool.grace_s) for name, pool in pools.items()}
        self.jobs = {row.id: Job(row) for row in trace}
        # what will happen: (time, in which order, id, attempt, what)
        self.ahead: list[tuple[float, int, str, int, str]] = []
        self.order = 0
        self.metered = _metered(pools)
        span_s = trace[-1].submit_s - trace[0].submit_s + max(row.duration_s for row in trace)
        self.bin_s = next((each for each in _BINS_S if span_s / each <= _BINS_MAX), _BINS_S[-1])
        self.reserved = {(p.pool, p.requester): p.reserved.get(KEY, 0) for p in policies}
        self.holdings: dict[tuple[str, str], Holding] = {}
        self.shares = ShareWatch(self.world.pools, KEY)
        self.capacity = sum(pool.capacity.get(KEY, 0) for pool in pools.values())

    def run(self) -> Played:
        world, ahead, trace, shares = self.world, self.ahead, self.trace, self.shares
        count, place = len(trace), 0
        now = trace[0].submit_s
        while place < count or ahead:
            at = trace[place].submit_s if place < count else math.inf
            if ahead and ahead[0][0] < at:
                at = ahead[0][0]
            wake = world.next_event_at()
            if wake is not None and wake < at:
                at = wake
            now = max(now, at)
            world.set_time(now)
            while ahead and ahead[0][0] <= now:
                self._comes(heapq.heappop(ahead))
            while place < count and trace[place].submit_s <= now:
                self._submit(trace[place])
                place += 1
            world.settle()
            if not ahead or ahead[0][0] > now:
                shares.look(now)
        shares.close(now)
        for holding in self.holdings.values():
            holding.settle(now)
        times = trace[0].submit_s, now
        return Played(list(self.jobs.values()), self.holdings, shares, self.capacity, times, self.bin_s)

    def _submit(self, row: TraceJob) -> None:
        request = self.world.submit(row.id, row.requester, self._amounts(row), retries=RETRIES_MAX)
        if request.rejected:
            job = self.jobs[row.id]
            job.state, job.causes = REJECTED, request.causes

    def _amounts(self, row: TraceJob) -> Amounts:
        """By key, and only what some pool meters: nothing else is ever looked at."""
        if not self.metered:
            return ((KEY, row.gpus),) if row.gpus else ()
        amounts = {KEY: row.gpus, "mcpu": row.mcpu, "memory_mb": row.memory_mb, "step_run": 1}
        return tuple(sorted((k, n) for k, n in amounts.items() if n > 0 and (k == KEY or k in self.metered)))

    def _comes(self, what: tuple[float, int, str, int, str]) -> None:
        """A job ends, or has stopped; unless that is about an attempt of before."""
        _, _, id, k, state = what
        job = self.jobs[id]
        if job.k == k and job.state == state:
            if state == RUNNING:
                self.world.release(id)
            else:
                self.world.stopped(id)

    def _ahead(self, at: float, id: str, k: int, what: str) -> None:
        self.order += 1
        heapq.heappush(self.ahead, (at, self.order, id, k, what))

    # --- what the pools did

    def _heard(self, pool: str, events: list[Any]) -> None:
        for event in events:
            kind = type(event)
            if kind is ev.Granted:
                self._granted(pool, event)
            elif kind is ev.Ended:
                self._ended(pool, event)
            elif kind is ev.Nominated:
                self._nominated(pool, event)

    def _holding(self, pool: str, requester: str) -> Holding:
        found = self.holdings.get((pool, requester))
        if found is None:
            reserved = self.reserved.get((pool, requester), 0)
            found = self.holdings[pool, requester] = Holding(reserved, self.bin_s)
        return found

    def _granted(self, pool: str, event: ev.Granted) -> None:
        job, now = self.jobs[event.id], self.world.now
        row = job.trace
        job.queued_s += now - job.since
        if job.first_at < 0:
            job.first_at = now
        job.k, job.pool, job.state, job.since = event.k, pool, RUNNING, now
        self._holding(pool, row.requester).change(now, row.gpus, row.gpus)
        self._ahead(now + job.left_s, event.id, event.k, RUNNING)

    def _nominated(self, pool: str, event: ev.Nominated) -> None:
        now = self.world.now
        self.jobs[event.id].caused += len(event.victims)
        for id, k in event.victims:
            job = self.jobs[id]
            row = job.trace
            done_s = min(now - job.since, job.left_s)
            every_s = self.checkpoint_every_s
            kept_s = done_s if every_s <= 0 else done_s // every_s * every_s if every_s < math.inf else 0.0
            job.left_s -= kept_s
            job.lost_s += done_s - kept_s + self.stop_s[pool]
            job.preempted += 1
            job.state = STOPPING
            self._holding(pool, row.requester).change(now, 0, -row.gpus)
            self._ahead(now + self.stop_s[pool], id, k, STOPPING)

    def _ended(self, pool: str, event: ev.Ended) -> None:
        job, now = self.jobs[event.id], self.world.now
        if job.k != event.k or job.pool != pool or job.state not in (RUNNING, STOPPING):
            return  # it did not run there
        gpus = job.trace.gpus
        self._holding(pool, job.trace.requester).change(now, -gpus, -gpus if job.state == RUNNING else 0)
        if event.how == "stopped":
            job.state = WAITING
        else:
            job.state, job.ended_at = DONE, now
        job.since = now


def _metered(pools: Mapping[str, PoolConfig]) -> frozenset[str]:
    """Keys besides GPUs that some pool has a total of."""
    return frozenset(key for pool in pools.values() for key in pool.capacity if key != KEY)
