"""What a real log says of requests: when each was asked for, how long it held, and what its holder did.

Read from the logs of the coordinator and of the pools, from their first rows on. What pools decided is kept beside it,
so that a simulation can be compared with it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..core import records as ev
from ..core.records import Amounts, positive
from ..errors import PoolsError
from ..log_story import COORDINATOR, pool_log
from ..store import open_reader

UNKNOWN = -1.0
"""A time that the log does not have."""


class Decision(NamedTuple):
    """A pool granted an attempt, or stopped others for it."""

    at: float
    pool: str
    id: str
    k: int
    victims: tuple[tuple[str, int], ...] | None

    @property
    def what(self) -> tuple[str, str, int, tuple[tuple[str, int], ...] | None]:
        """Without its time."""
        return self[1:]


@dataclass
class PastAttempt:
    """One attempt in one pool. taken_at: the pool began to run it, or found that it can't; called_at: it was told to
    stop; over_at: its holder had left; free_at: nothing is held any more.
    """

    pool: str
    queued_at: float = UNKNOWN
    not_before: float = 0.0
    granted_at: float = UNKNOWN
    placed_at: float = UNKNOWN
    grouped: bool = False
    taken_at: float = UNKNOWN
    called_at: float = UNKNOWN
    over_at: float = UNKNOWN
    free_at: float = UNKNOWN
    how: str = ""
    why: str = ""

    @property
    def ran(self) -> bool:
        """It was granted; also one that was then given back because it could not be placed."""
        return self.granted_at >= 0


@dataclass
class Past:
    """One request, over all its attempts."""

    id: str
    requester: str
    positive: Amounts
    preemptible: bool
    retries: int
    age: int
    submitted_at: float
    pools: tuple[str, ...]
    attempts: dict[int, dict[str, PastAttempt]] = field(default_factory=dict)
    state: str = ""
    finished_at: float = UNKNOWN

    def granted(self, k: int) -> PastAttempt | None:
        """Attempt `k` where it was granted."""
        return next((a for a in self.attempts.get(k, {}).values() if a.ran), None)

    @property
    def grants(self) -> list[PastAttempt]:
        """All its grants, in order."""
        return [found for k in sorted(self.attempts) if (found := self.granted(k)) is not None]

    @property
    def gave_up_at(self) -> float | None:
        """When its pools, or the coordinator before they had it, took it away while it waited. None: they did not."""
        grants = self.grants
        if self.state not in ("cancelled", "expired") or (grants and grants[-1].how != "stopped"):
            return None
        newest = max(self.attempts, default=0)
        ends = [] if self.granted(newest) else [a.free_at for a in self.attempts.get(newest, {}).values()]
        return max(ends) if ends and min(ends) >= 0 else self.finished_at

    @property
    def held_s(self) -> float | None:
        """How long it held in all, until its holder left for good; None where the log does not have that end."""
        grants = self.grants
        if not grants or grants[-1].over_at < 0 or grants[-1].how not in ("released", "cancelled", "expired"):
            return None
        return sum(grant.over_at - grant.granted_at for grant in grants)


class History(NamedTuple):
    """requests: by id, in the order of their submission. until: the last time that a log has."""

    requests: dict[str, Past]
    decisions: list[Decision]
    began_at: float
    until: float
    configured: int


def read_history(store: str, pools: Iterable[str]) -> History:
    """The whole story.

    Raises:
        NoLog: there is no log of the coordinator, or of one of the pools.
        PoolsError: a log begins later than with its first row, or can't be read.
    """
    requests: dict[str, Past] = {}
    began_at, until = UNKNOWN, 0.0
    for at, event in _rows(store, COORDINATOR):
        if isinstance(event, ev.Submitted):
            requests[event.id] = Past(
                event.id,
                event.requester,
                positive((key, amount) for key, amount in event.amounts),
                event.preemptible,
                event.retries,
                event.age,
                at,
                tuple(event.pools),
            )
            if not event.pools:
                requests[event.id].state, requests[event.id].finished_at = "rejected", at
            began_at = at if began_at < 0 else began_at
        elif isinstance(event, ev.Finished) and event.id in requests:
            requests[event.id].state, requests[event.id].finished_at = event.state, at
        until = max(until, at)
    decisions: list[Decision] = []
    configured = 0
    for pool in sorted(set(pools)):
        for at, event in _rows(store, pool_log(pool)):
            configured += isinstance(event, ev.Configured)
            _read(pool, at, event, requests, decisions)
            until = max(until, at)
    decisions.sort(key=lambda decision: decision.at)
    return History(requests, decisions, max(began_at, 0.0), until, configured)


def _rows(store: str, log: str) -> Iterable[tuple[float, Any]]:
    reader = open_reader(store, log)
    try:
        if reader.first_seq() > 1:
            raise PoolsError(
                f"the log of {log} begins with row {reader.first_seq()}: what was before it is pruned"
            )
        for row in reader.read(1):
            yield row.at, ev.unpack(row.body)
    finally:
        reader.close()


def _read(pool: str, at: float, event: Any, requests: dict[str, Past], decisions: list[Decision]) -> None:
    """One event of a pool's log."""
    if isinstance(event, ev.Nominated):
        victims = tuple((id, k) for id, k in event.victims)
        decisions.append(Decision(at, pool, event.id, event.k, victims))
        if event.id in requests and pool in requests[event.id].attempts.get(event.k, {}):
            requests[event.id].attempts[event.k][pool].taken_at = at
        for id, k in victims:
            if id in requests and pool in requests[id].attempts.get(k, {}):
                requests[id].attempts[k][pool].called_at = at
        return
    past = requests.get(getattr(event, "id", ""))
    if isinstance(event, ev.Evicted) and past is not None and pool in past.attempts.get(event.k, {}):
        past.attempts[event.k][pool].called_at = at
    if past is None or not isinstance(event, (ev.Queued, ev.Granted, ev.Placed, ev.Ending, ev.Ended)):
        return
    if isinstance(event, ev.Queued):
        attempt = PastAttempt(pool, at, event.not_before)
        past.attempts.setdefault(event.k, {})[pool] = attempt
        return
    found = past.attempts.get(event.k, {}).get(pool)
    if found is None:  # ended before it was heard of
        found = past.attempts.setdefault(event.k, {})[pool] = PastAttempt(pool)
    if isinstance(event, ev.Granted):
        found.granted_at = at
        found.taken_at = at if found.taken_at < 0 else found.taken_at
        decisions.append(Decision(at, pool, event.id, event.k, None))
    elif isinstance(event, ev.Placed):
        found.placed_at, found.grouped = at, bool(event.detail.get("pg"))
    elif isinstance(event, (ev.Ending, ev.Ended)):
        if isinstance(event, ev.Ended):
            found.free_at = at
        if found.taken_at < 0 and event.how == "returned":
            found.taken_at = at
        if found.over_at < 0:
            found.over_at, found.how, found.why = at, event.how, event.why
