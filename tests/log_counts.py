"""What metrics must be after a log, counted by another way than the meters' own: from the fold of the state."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any

from ray_pools.core import records as ev
from ray_pools.core.pool_state import PoolState
from ray_pools.core.queue import HOLDING, NOMINATED, PREEMPTING

Rows = Iterable[tuple[float, Any]]
Counts = Counter[tuple[str, ...]]
"""Metric and its labels."""


class PoolCounts:
    """Counters, observations and gauges of a pool's log."""

    def __init__(self, pool: str, rows: Rows) -> None:
        self.pool = pool
        self.state = PoolState()
        self.counts: Counts = Counter()
        self.waits: dict[str, list[float]] = defaultdict(list)
        self.placings: list[float] = []
        self._queued: dict[str, float] = {}
        for at, event in rows:
            self.counts["pools_log_rows", "pool:" + pool] += 1
            self._before(event, at)
            self.state.apply(event, at)

    def _before(self, event: Any, at: float) -> None:
        attempt = self.state.attempts.get(getattr(event, "id", ""))
        if isinstance(event, ev.Queued):
            self._queued[event.id] = event.submitted_at if event.k == 1 else at
        elif isinstance(event, ev.Granted):
            assert attempt is not None
            self.counts["pools_grants", self.pool, attempt.requester] += 1
            self.waits[attempt.requester].append(at - self._queued[event.id])
        elif isinstance(event, ev.Placed):
            assert attempt is not None
            self.placings.append(at - attempt.granted_at)
        elif isinstance(event, ev.Nominated):
            assert attempt is not None
            use = self.state.ledger.uses[attempt.requester]
            share = self.state.ledger.in_share(self.state.need(attempt), use, attempt.preemptible)
            for id, _ in event.victims:
                victim = self.state.attempts[id].requester
                reason = "own" if victim == attempt.requester else "reclaim" if share else "priority"
                self.counts["pools_preemptions", self.pool, victim, reason] += 1
        elif isinstance(event, ev.Evicted):
            assert attempt is not None
            self.counts["pools_preemptions", self.pool, attempt.requester, "operator"] += 1
        elif isinstance(event, ev.Ended) and attempt is not None and attempt.state in HOLDING:
            words = {"its holder stopped": "stopped", "its grace ran out": "grace_over"}
            words["it was not placed yet"] = "not_placed"
            ends = {
                "stopped": words.get(event.why, "group_lost"),
                "expired": "expired",
                "returned": "not_placed",
            }
            if event.how in ends:
                self.counts["pools_evictions", self.pool, attempt.requester, ends[event.how]] += 1

    def gauges(self) -> Counts:
        """Those of amounts and requests, without zeros."""
        found: Counts = Counter()
        for attempt in self.state.attempts.values():
            team, holds = attempt.requester, attempt.state in HOLDING
            found["pools_running" if holds else "pools_pending", self.pool, team] += 1
            for key, amount in attempt.amounts:
                if key in self.state.capacity:
                    found["pools_allocated", self.pool, team, key] += amount * holds
                    found["pools_nominated", self.pool, team, key] += amount * (attempt.state == NOMINATED)
                    found["pools_preempting", self.pool, team, key] += amount * (attempt.state == PREEMPTING)
        for key, amount in self.state.capacity.items():
            found["pools_capacity", self.pool, key] = amount
        for requester in {*self.state.policies, *self.state.ledger.uses}:
            policy = self.state.policies.get(requester)
            for key in self.state.capacity:
                reserved = policy.reserved.get(key, 0) if policy else 0
                found["pools_reserved", self.pool, requester, key] = reserved
                over = self.state.ledger.uses[requester].booked[key] - reserved
                found["pools_borrowed", self.pool, requester, key] = max(over, 0)
        return +found


def coordinator_counts(rows: Rows) -> Counts:
    """The counters of the coordinator's log."""
    counts: Counts = Counter()
    team: dict[str, str] = {}
    holds: dict[str, bool] = {}
    known: set[str] = set()
    for _, event in rows:
        counts["pools_log_rows", "coordinator"] += 1
        if isinstance(event, ev.Submitted):
            known |= {event.requester} if event.pools else set()
            team[event.id] = event.requester if event.requester in known else "(other)"
            counts["pools_submissions", team[event.id]] += 1
            counts["pools_finished", team[event.id], "rejected"] += not event.pools
        elif isinstance(event, ev.Told):
            holds[event.id] = event.state != "nominated"
        elif isinstance(event, ev.Opened):
            holds[event.id] = False
        elif isinstance(event, ev.Asked) and event.what == "expire":
            state = "holding" if holds.get(event.id) else "waiting"
            counts["pools_lease_expiries", team[event.id], state] += 1
        elif isinstance(event, ev.Finished):
            counts["pools_finished", team[event.id], event.state] += 1
        elif isinstance(event, ev.HolderGone):
            counts[("pools_holders_gone",)] += 1
        elif isinstance(event, ev.Denied):
            counts["pools_refusals", event.why] += event.times
    return +counts
