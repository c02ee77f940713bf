"""A real log again, under the same or another policy: the same requests at the same times, decided anew.

What people and machines did is taken from the log: when requests came, how long each held in all, how long victims took
to stop and groups to come up or go. As long as decisions are those of the log, all of it happens at the very times of
the log, so that the same policy gives the same decisions; once they differ, the same spans of time are counted from
where they begin now. What the log does not say (how long one would have run that never did) is its team's median.
"""

from __future__ import annotations

import heapq
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..core import records as ev
from ..core.config_rules import PolicyConfig, PoolConfig
from ..core.pool import Place, Pool, Unplace
from .history import UNKNOWN, Decision, History, Past, PastAttempt
from .world import Request, World

ABOUT_S = 2.0
"""A message between actors that took longer than this was no message of the same decision."""


class Again:
    """One request as it went this time. `assumed`: how long it would run is not known, but guessed."""

    __slots__ = (
        "assumed",
        "done_s",
        "ended_at",
        "first_at",
        "granted_at",
        "k",
        "past",
        "pool",
        "preempted",
        "state",
    )

    def __init__(self, past: Past) -> None:
        self.past = past
        self.state = "waiting"
        self.pool = ""
        self.k = 0
        self.first_at = self.granted_at = self.ended_at = UNKNOWN
        # how long it held in attempts that are over
        self.done_s = 0.0
        self.preempted = 0
        self.assumed = False


class Rerun:
    """See the module's docstring. After `run`, `requests` and `decisions` say what came of it."""

    def __init__(
        self, pools: Mapping[str, PoolConfig], policies: Sequence[PolicyConfig], history: History
    ) -> None:
        self.history = history
        self.world = World(pools, policies, self._heard, now=history.began_at, live=True)
        self.world.reopens = self._reopens
        self.world.effect = self._effect
        self.world.send = self._send
        self.grace_s = {name: pool.grace_s for name, pool in pools.items()}
        self.requests = {id: Again(past) for id, past in history.requests.items()}
        self.decisions: list[Decision] = []
        self.ahead: list[tuple[float, int, Callable[[], None]]] = []
        self.order = 0
        self._learn()
        for past in history.requests.values():
            self._plan(past)

    def _learn(self) -> None:
        """What is usual, for what the log does not have."""
        attempts = [
            a for past in self.history.requests.values() for of in past.attempts.values() for a in of.values()
        ]
        self.place_s = _median(a.placed_at - a.granted_at for a in attempts if a.ran and a.placed_at >= 0)
        self.remove_s = _median(a.free_at - a.over_at for a in attempts if a.ran and a.free_at >= 0)
        self.stop_s = _median(
            a.over_at - a.called_at for a in attempts if a.called_at >= 0 and a.over_at >= 0
        )
        self.enqueue_s = _median(
            a.queued_at - past.submitted_at
            for past in self.history.requests.values()
            for a in past.attempts.get(1, {}).values()
            if a.queued_at >= 0
        )
        held: dict[str, list[float]] = {}
        for past in self.history.requests.values():
            if (seconds := past.held_s) is not None:
                held.setdefault(past.requester, []).append(seconds)
        self.usual_s = {team: statistics.median(values) for team, values in held.items()}
        everyone = [value for values in held.values() for value in values]
        self.usual_of_all_s = statistics.median(everyone) if everyone else math.inf

    # --- time

    def _at(self, at: float, act: Callable[[], None]) -> None:
        self.order += 1
        heapq.heappush(self.ahead, (at, self.order, act))

    def run(self) -> Rerun:
        """Until the log's last moment."""
        world, until = self.world, self.history.until
        while True:
            times = [self.ahead[0][0]] if self.ahead else []
            wake = world.next_event_at()
            now = max(min([*times, *([wake] if wake is not None else [])], default=math.inf), world.now)
            if now > until:
                break
            world.set_time(now)
            while self.ahead and self.ahead[0][0] <= now:
                heapq.heappop(self.ahead)[2]()
            world.settle()
        return self

    # --- what happens whatever the policy

    def _plan(self, past: Past) -> None:
        queued = [a.queued_at for a in past.attempts.get(1, {}).values() if a.queued_at >= 0]
        if (at := past.gave_up_at) is not None:
            self._at(at, lambda: self._lose_patience(past))
        if not queued and past.pools and (not past.state or at is not None):
            return  # the log ended, or nobody wanted it any more, before a pool heard of it
        self._at(min(queued, default=past.submitted_at + self.enqueue_s), lambda: self._submit(past))

    def _submit(self, past: Past) -> None:
        request = self.world.submit(
            past.id,
            past.requester,
            past.positive,
            preemptible=past.preemptible,
            retries=past.retries,
            age=past.age,
            submitted_at=past.submitted_at,
        )
        if request.rejected:
            self.requests[past.id].state = "rejected"

    def _lose_patience(self, past: Past) -> None:
        """It was cancelled while it waited: also here, if it still does."""
        again = self.requests[past.id]
        if again.state == "waiting":
            again.state, again.ended_at = "cancelled", self.world.now
            self.world.cancel(past.id)

    # --- what pools decide

    def _heard(self, pool: str, events: list[Any]) -> None:
        for event in events:
            if isinstance(event, ev.Granted):
                self.decisions.append(Decision(self.world.now, pool, event.id, event.k, None))
                self._granted(pool, event)
            elif isinstance(event, ev.Nominated):
                victims = tuple((id, k) for id, k in event.victims)
                self.decisions.append(Decision(self.world.now, pool, event.id, event.k, victims))
                for id, k in victims:
                    self._called(pool, id, k)
            elif isinstance(event, (ev.Ending, ev.Ended)):
                self._left(pool, event)

    def _granted(self, pool: str, event: ev.Granted) -> None:
        again, now = self.requests[event.id], self.world.now
        again.pool, again.k, again.state, again.granted_at = pool, event.k, "running", now
        if again.first_at < 0:
            again.first_at = now
        at, how = self._end_of(again)
        if at < math.inf:
            self._at(at, lambda: self._leave(again, event.k, how))

    def _end_of(self, again: Again) -> tuple[float, str]:
        """When its holder leaves, if nobody stops it, and how."""
        past, now = again.past, self.world.now
        same = past.granted(again.k)
        if same is not None and same.how == "returned":  # it could not be placed
            return _shifted(now, same.granted_at, same.over_at), "returned"
        last = past.grants[-1] if past.grants else None
        held_s = past.held_s
        if held_s is None or last is None:
            if last is not None and last.over_at < 0:
                return math.inf, ""  # it still ran when the log ended
            again.assumed = True
            usual_s = self.usual_s.get(past.requester, self.usual_of_all_s)
            ran_s = sum(
                grant.over_at - grant.granted_at + 1.0 for grant in past.grants
            )  # it would have run on
            return now + max(usual_s, ran_s - again.done_s), "released"
        if same is last and now == same.granted_at:  # as it was: to the very moment
            return same.over_at, last.how
        return now + max(held_s - again.done_s, 0.0), last.how

    def _leave(self, again: Again, k: int, how: str) -> None:
        if again.k != k or again.state not in ("running", "stopping"):
            return
        if how == "returned":
            why = next((a.why for a in again.past.attempts[k].values() if a.how == "returned"), "not placed")
            self.world.pools[again.pool].unplaced(again.past.id, k, why)
        else:
            self.world.end(again.past.id, {"released": "release", "expired": "expire"}.get(how, "cancel"))

    def _called(self, pool: str, id: str, k: int) -> None:
        """It is told to stop. It does so as soon as it did, or as others do."""
        again, now = self.requests[id], self.world.now
        again.state = "stopping"
        again.preempted += 1
        past = self._past_attempt(pool, id, k)
        known = past is not None and past.called_at >= 0
        grace_s = self.grace_s[pool]
        if known and past is not None:  # one that had not stopped when the log ended does not before
            over_at = past.over_at if past.over_at >= 0 else self.history.until + 1.0
            at = _shifted(now, past.called_at, over_at)
        else:
            at = now + min(self.stop_s, grace_s)
        if at >= now + grace_s:  # an actor's timer is some milliseconds late
            if known and id in self.world.pools[pool].deadlines:
                self.world.pools[pool].deadlines[id] = at
            return
        self._at(at, lambda: self._stops(again, k))

    def _stops(self, again: Again, k: int) -> None:
        if again.k == k and again.state == "stopping":
            self.world.stopped(again.past.id)

    def _left(self, pool: str, event: ev.Ending | ev.Ended) -> None:
        again = self.requests.get(event.id)
        if (
            again is None
            or (again.pool, again.k) != (pool, event.k)
            or again.state not in ("running", "stopping")
        ):
            return
        now = self.world.now
        again.done_s += now - again.granted_at
        again.state = event.how if event.how in ("released", "cancelled", "expired") else "waiting"
        if again.state != "waiting":
            again.ended_at = now
        elif event.how == "stopped" and event.id in self.world.requests:
            if self.world.requests[event.id].retries <= 0:
                again.state, again.ended_at = "preempted", now

    def _reopens(self, request: Request) -> None:
        """The next attempt queues some milliseconds later: coordinator and pool have to speak first."""
        again, now = self.requests[request.id], self.world.now
        before = self._past_attempt(again.pool, request.id, request.k)
        coming = [a for a in again.past.attempts.get(request.k + 1, {}).values() if a.queued_at >= 0]
        at = now + self.enqueue_s
        if before is not None and before.free_at >= 0:
            if not coming and again.past.state in ("released", "expired"):
                # its holder gave it back just before it was stopped by force
                again.state, again.ended_at = again.past.state, now
                self.world.requests.pop(request.id)
                return
            if not coming and (not again.past.state or again.past.gave_up_at is not None):
                return  # the log ended, or nobody wanted it any more, before a pool heard of it
            if coming:
                at = _shifted(now, before.free_at, min(a.queued_at for a in coming))
                request.fields[5] = max(a.not_before for a in coming)
        self._at(at, lambda: self._open(request))

    def _send(self, pool: str, directive: list[Any]) -> None:
        """It arrives when it did in the log, if it does so about now; else as soon as directives usually do."""
        id, kind, k = directive[1:4]
        now, past = self.world.now, self._past_attempt(pool, id, k)
        at = now if kind == "enqueue" else now + self.enqueue_s
        if past is not None:
            closed_at = past.over_at if past.how == "withdrawn" else UNKNOWN
            logged = {"enqueue": past.queued_at, "take": past.taken_at, "close": closed_at}[kind]
            if logged >= 0 and abs(logged - now) <= ABOUT_S:
                at = max(logged, now)
        if at <= now:
            self.world.deliver(pool, directive)
        else:
            self._at(at, lambda: self.world.deliver(pool, directive))

    def _open(self, request: Request) -> None:
        if request.id in self.world.requests:
            self.world.open(request)

    def _past_attempt(self, pool: str, id: str, k: int) -> PastAttempt | None:
        return self.history.requests[id].attempts.get(k, {}).get(pool)

    # --- placement groups

    def _effect(self, pool: Pool, effect: Any) -> None:
        now, past = self.world.now, self._past_attempt(pool.name, effect.id, effect.k)
        if isinstance(effect, Place):
            if past is not None and past.ran and past.placed_at < 0:
                return  # it did not come up
            known = past is not None and past.ran and past.placed_at >= 0
            at = now + self.place_s
            detail = {"pg": True}
            if known and past is not None:
                at = _shifted(now, past.granted_at, past.placed_at)
                detail = {"pg": True} if past.grouped else {}
            self._at(at, lambda: pool.placed(effect.id, effect.k, detail))
        elif isinstance(effect, Unplace):
            at = now + self.remove_s
            if past is not None and past.over_at >= 0:
                free_at = past.free_at if past.free_at >= 0 else self.history.until + 1.0
                at = _shifted(now, past.over_at, free_at)
            self._at(at, lambda: pool.gone(effect.id, effect.k))


def _shifted(now: float, since: float, at: float) -> float:
    """As long after `now` as `at` was after `since`; the very same moment where nothing has moved."""
    return at if now == since else now + (at - since)


def _median(values: Any) -> float:
    found = list(values)
    return float(statistics.median(found)) if found else 0.0
