"""Metrics as a fold over durable events, beside the actor's state and never in its way.

A meter hears the events of a turn once they are in the log, in a thread of its own: it reads nothing that the actor's
loop changes. So what it counts is what the log says; a process that starts begins its counters at 0, as is usual for
counters, and its gauges where the state is.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from ray_pools.core import records as ev
from ray_pools.core.config_rules import PolicyConfig
from ray_pools.core.coordinator_state import CoordinatorState
from ray_pools.core.metrics import Requesters, Samples
from ray_pools.core.pool_state import PoolState
from ray_pools.core.queue import ENDING, HOLDING, NOMINATED, PREEMPTING
from ray_pools.core.quota import Ledger, need_of
from ray_pools.core.records import Amounts
from ray_pools.core.requests import SHOWN
from ray_pools.core.victims import OPERATOR, reason

_QUEUE_SLACK = 1000
_STATES = ("allocated", "preempting", "queued")
_BY_WHY = {
    ev.HOLDER_STOPPED: "stopped",
    ev.GRACE_RAN_OUT: "grace_over",
    ev.NOT_PLACED_YET: "not_placed",
}


class _Known:
    """An attempt that waits or holds."""

    __slots__ = (
        "amounts",
        "booked",
        "granted_at",
        "holds",
        "preemptible",
        "preempting",
        "requester",
        "since",
    )

    def __init__(self, requester: str, amounts: Amounts, preemptible: bool, since: float | None) -> None:
        self.requester, self.amounts, self.preemptible = requester, amounts, preemptible
        # since when it queues; None: before this process started, and the state does not say
        self.since = since
        self.granted_at = 0.0
        # by being nominated, or by a grant that is not on its way out
        self.booked = False
        self.holds = self.preempting = False


class PoolMeter:
    """The metrics of one pool. `state` is only read, and only by the constructor."""

    def __init__(self, pool: str, state: PoolState, requesters: Requesters | None = None) -> None:
        self.pool, self.log = pool, "pool:" + pool
        self.samples = Samples()
        self._requesters = requesters or Requesters()
        self._begin()
        self._version = state.version
        self._capacity.update(state.capacity)
        self._policies.update(state.policies)
        for attempt in state.attempts.values():
            since = attempt.submitted_at if attempt.k == 1 else None
            known = self._add(attempt.id, attempt.requester, attempt.amounts, attempt.preemptible, since)
            if attempt.state in HOLDING:
                self._grant(known, attempt.granted_at)
                if attempt.state in (PREEMPTING, ENDING):
                    self._leaving(known, attempt.state == PREEMPTING)
            elif attempt.state == NOMINATED:
                self._nominate(known)

    def _begin(self) -> None:
        # kept and never summed anew: a queue of thousands costs nothing to tell of
        self._pending: Counter[str] = Counter()
        self._running: Counter[str] = Counter()
        # (requester, key) -> amount
        self._nominations: Counter[tuple[str, str]] = Counter()
        self._preempted: Counter[tuple[str, str]] = Counter()
        # (since when it queues, its id), the oldest first; some that wait no more stand here too
        self._queue: list[tuple[float, str]] = []
        self._version = 0
        self._capacity: dict[str, int] = {}
        self._policies: dict[str, PolicyConfig] = {}
        self._known: dict[str, _Known] = {}
        self._ledger = Ledger()

    # --- the fold

    def hear(self, events: Iterable[Any], at: float) -> None:
        """Events that became durable in one turn, at the core's time."""
        for event in events:
            run = _OF_POOL.get(type(event))
            if run is not None:
                run(self, event, at)

    def _configured(self, event: ev.Configured, at: float) -> None:
        self._version = event.version
        self._capacity = dict(event.config["capacity"])
        self._policies = {p["requester"]: PolicyConfig.from_wire(p) for p in event.policies}

    def _queued(self, event: ev.Queued, at: float) -> None:
        amounts = tuple((key, amount) for key, amount in event.amounts)
        since = event.submitted_at if event.k == 1 else at
        self._drop(event.id)
        self._add(event.id, event.requester, amounts, event.preemptible, since)

    def _add(
        self, id: str, requester: str, amounts: Amounts, preemptible: bool, since: float | None
    ) -> _Known:
        known = self._known[id] = _Known(requester, amounts, preemptible, since)
        self._pending[requester] += 1
        if since is not None:
            heapq.heappush(self._queue, (since, id))
        return known

    def _granted(self, event: ev.Granted, at: float) -> None:
        known = self._known.get(event.id)
        if known is None:
            return
        self._grant(known, at)
        label = self._requesters.label(known.requester)
        self.samples.count("pools_grants", self.pool, label)
        if known.since is not None:
            self.samples.observe("pools_wait_seconds", max(at - known.since, 0.0), self.pool, label)

    def _grant(self, known: _Known, at: float) -> None:
        if known.booked:
            self._count(self._nominations, known, -1)
        else:
            self._ledger.book(known.requester, known.amounts, known.preemptible)
        self._ledger.hold(known.amounts, known.preemptible)
        self._pending[known.requester] -= 1
        self._running[known.requester] += 1
        known.booked, known.holds, known.granted_at = True, True, at

    @staticmethod
    def _count(amounts: Counter[tuple[str, str]], known: _Known, sign: int) -> None:
        for key, amount in known.amounts:
            amounts[known.requester, key] += sign * amount

    def _placed(self, event: ev.Placed, at: float) -> None:
        known = self._known.get(event.id)
        if known is not None:
            self.samples.observe("pools_grant_latency_seconds", max(at - known.granted_at, 0.0), self.pool)

    def _nominated(self, event: ev.Nominated, at: float) -> None:
        asker = self._known.get(event.id)
        if asker is None:
            return
        in_share = self._in_share(asker)
        for id, _ in event.victims:
            victim = self._known.get(id)
            if victim is not None:
                why = reason(asker.requester, in_share, victim.requester)
                label = self._requesters.label(victim.requester)
                self.samples.count("pools_preemptions", self.pool, label, why)
                self._leaving(victim, True)
        self._nominate(asker)

    def _evicted(self, event: ev.Evicted, at: float) -> None:
        victim = self._known.get(event.id)
        if victim is not None:
            label = self._requesters.label(victim.requester)
            self.samples.count("pools_preemptions", self.pool, label, OPERATOR)
            self._leaving(victim, True)

    def _in_share(self, asker: _Known) -> bool:
        policy = self._policies.get(asker.requester)
        need, use = need_of(asker.amounts, self._capacity, policy), self._ledger.uses[asker.requester]
        return policy is not None and self._ledger.in_share(need, use, asker.preemptible)

    def _nominate(self, known: _Known) -> None:
        self._ledger.book(known.requester, known.amounts, known.preemptible)
        self._count(self._nominations, known, 1)
        known.booked = True

    def _leaving(self, known: _Known, preempting: bool) -> None:
        """It holds on, and books nothing any more."""
        if known.booked:
            self._ledger.unbook(known.requester, known.amounts)
            known.booked = False
        if preempting and not known.preempting:
            self._count(self._preempted, known, 1)
            known.preempting = True

    def _ending(self, event: ev.Ending, at: float) -> None:
        known = self._known.get(event.id)
        if known is not None:
            self._leaving(known, False)

    def _ended(self, event: ev.Ended, at: float) -> None:
        known = self._drop(event.id)
        if known is not None and known.holds:
            how = eviction_reason(event.how, event.why)
            if how:
                label = self._requesters.label(known.requester)
                self.samples.count("pools_evictions", self.pool, label, how)

    def _drop(self, id: str) -> _Known | None:
        known = self._known.pop(id, None)
        if known is None:
            return None
        if known.holds:
            self._leaving(known, False)
            self._ledger.vacate(known.requester, known.amounts, known.preemptible)
            self._running[known.requester] -= 1
            if known.preempting:
                self._count(self._preempted, known, -1)
            return known
        self._pending[known.requester] -= 1
        if known.booked:
            self._ledger.book(known.requester, known.amounts, known.preemptible, -1)
            self._count(self._nominations, known, -1)
        return known

    def _begun_anew(self, event: ev.BegunAnew, at: float) -> None:
        self._begin()

    # --- gauges

    def take(self, now: float) -> Samples:
        """All since the last time, with the gauges as they are. `now`: the core's time."""
        out, self.samples = self.samples, Samples()
        out.gauge("pools_configuration_version", self._version, self.log)
        for key, total in self._capacity.items():
            out.gauge("pools_capacity", total, self.pool, key)
        for requester, policy in self._policies.items():
            label = self._requesters.label(requester)
            for key, amount in policy.reserved.items():
                out.gauge("pools_reserved", amount, self.pool, label, key)
        for requester, use in self._ledger.uses.items():
            label, of_policy = self._requesters.label(requester), self._policies.get(requester)
            for key in self._capacity:
                nominated = self._nominations[requester, key]
                borrowed = use.booked[key] - (of_policy.reserved.get(key, 0) if of_policy else 0)
                out.gauge("pools_allocated", use.claimed[key] - nominated, self.pool, label, key)
                out.gauge("pools_borrowed", max(borrowed, 0), self.pool, label, key)
                out.gauge("pools_nominated", nominated, self.pool, label, key)
                out.gauge("pools_preempting", self._preempted[requester, key], self.pool, label, key)
        for name, counts in (("pools_pending", self._pending), ("pools_running", self._running)):
            for requester, count in counts.items():
                out.gauge(name, count, self.pool, self._requesters.label(requester))
        out.gauge("pools_oldest_pending_seconds", self._oldest_s(now), self.pool)
        return out

    def _oldest_s(self, now: float) -> float:
        if (
            len(self._queue) > 2 * len(self._known) + _QUEUE_SLACK
        ):  # the oldest waits for long, and many passed it
            waiting = [(k.since, id) for id, k in self._known.items() if not k.holds and k.since is not None]
            heapq.heapify(waiting)
            self._queue = waiting
        queue = self._queue
        while queue:
            since, id = queue[0]
            known = self._known.get(id)
            if known is not None and not known.holds and known.since == since:
                return max(now - since, 0.0)
            heapq.heappop(queue)
        return 0.0


def eviction_reason(how: str, why: str) -> str:
    """Why a grant ended without its holder's wish, as one of few words; "" if that is what its holder wanted."""
    if how == "stopped":
        return _BY_WHY.get(why, "group_lost")
    return {"expired": "expired", "returned": "not_placed"}.get(how, "")


class CoordinatorMeter:
    """The metrics of the coordinator. `state` is only read, and only by the constructor."""

    log = "coordinator"

    def __init__(self, state: CoordinatorState, requesters: Requesters | None = None) -> None:
        self.samples = Samples()
        self._requesters = requesters or Requesters()
        self._version = state.version
        # requests that wait or hold: their requester and state
        self._live = {id: (r.requester, r.shown) for id, r in state.waiting_or_holding.items()}
        self._states = Counter(shown for _, shown in self._live.values())

    def hear(self, events: Iterable[Any], at: float) -> None:
        """Events that became durable in one turn."""
        for event in events:
            run = _OF_COORDINATOR.get(type(event))
            if run is not None:
                run(self, event)

    def _submitted(self, event: ev.Submitted) -> None:
        label = self._requesters.label(event.requester, bool(event.pools))
        self.samples.count("pools_submissions", label)
        if event.pools:
            self._live[event.id] = event.requester, "queued"
            self._states["queued"] += 1
        else:
            self.samples.count("pools_finished", label, "rejected")

    def _moves(self, id: str, shown: str) -> None:
        if id in self._live:
            requester, before = self._live[id]
            self._live[id] = requester, shown
            self._states[before] -= 1
            self._states[shown] += 1

    def _asked(self, event: ev.Asked) -> None:
        if event.what == "expire" and event.id in self._live:
            requester, shown = self._live[event.id]
            state = "waiting" if shown == "queued" else "holding"
            self.samples.count("pools_lease_expiries", self._requesters.label(requester), state)

    def _finished(self, event: ev.Finished) -> None:
        found = self._live.pop(event.id, None)
        if found is not None:
            self._states[found[1]] -= 1
            self.samples.count("pools_finished", self._requesters.label(found[0]), event.state)

    def _changed(self, event: ev.Changed | ev.DeclaredLost) -> None:
        self._version = event.version

    def take(self, now: float) -> Samples:
        """As a pool's."""
        out, self.samples = self.samples, Samples()
        out.gauge("pools_configuration_version", self._version, self.log)
        for shown in _STATES:
            out.gauge("pools_requests", self._states[shown], shown)
        return out


_OF_POOL: Mapping[type[Any], Any] = {
    ev.Configured: PoolMeter._configured,
    ev.Queued: PoolMeter._queued,
    ev.Granted: PoolMeter._granted,
    ev.Placed: PoolMeter._placed,
    ev.Nominated: PoolMeter._nominated,
    ev.Evicted: PoolMeter._evicted,
    ev.Ending: PoolMeter._ending,
    ev.Ended: PoolMeter._ended,
    ev.BegunAnew: PoolMeter._begun_anew,
}
_OF_COORDINATOR: Mapping[type[Any], Any] = {
    ev.Changed: CoordinatorMeter._changed,
    ev.DeclaredLost: CoordinatorMeter._changed,
    ev.Submitted: CoordinatorMeter._submitted,
    ev.Opened: lambda meter, event: meter._moves(event.id, "queued"),
    ev.Told: lambda meter, event: meter._moves(event.id, SHOWN[event.state]),
    ev.Asked: CoordinatorMeter._asked,
    ev.Finished: CoordinatorMeter._finished,
    ev.HolderGone: lambda meter, event: meter.samples.count("pools_holders_gone"),
    ev.Denied: lambda meter, event: meter.samples.count("pools_refusals", event.why, by=event.times),
}
