"""What each team got, told by the logs: time in share and borrowed, waits, preemptions suffered and caused.

A team's time in its share is, at each moment, what its grants book up to `reserved`; all that it holds beyond that is
borrowed (docs/rules.md sections 1 and 4), a grant that is being preempted among it until it stops. So the sums are
exact from the events, whatever the policies were meanwhile.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from .core import records as ev
from .errors import PoolsError
from .log_story import COORDINATOR, pool_log
from .store import NoLog, open_reader


@dataclass
class TeamUsage:
    """One team. Seconds are of the key's amount times the core's seconds: GPU-seconds for `gpu`."""

    in_share_s: float = 0.0
    borrowed_s: float = 0.0
    waits_s: list[float] = field(default_factory=list)
    """From each submission to the first usable grant, in the order of those grants."""
    suffered: int = 0
    caused: int = 0
    requests: int = 0
    by_pool_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))


def team_usage(
    store: str, pools: Iterable[str], *, since_s: float = 0.0, key: str = "gpu"
) -> dict[str, TeamUsage]:
    """Per requester, from the core's time `since_s` on; requests submitted earlier count for their time only.

    Reads logs from their first row on (a pruned one from what is left). Raises NoLog without a coordinator's log.
    """
    teams: dict[str, TeamUsage] = defaultdict(TeamUsage)
    _read_waits(store, since_s, teams)
    for pool in sorted(set(pools)):
        try:
            reader = open_reader(store, pool_log(pool))
        except NoLog:
            continue
        meter = _Meter(pool, key, since_s, teams)
        try:
            for row in reader.read(reader.first_seq()):
                meter.event(ev.unpack(row.body), row.at)
        except PoolsError as problem:
            raise PoolsError(f"pool {pool!r}: {problem}") from None
        finally:
            reader.close()
        meter.close()
    return dict(teams)


def _read_waits(store: str, since_s: float, teams: dict[str, TeamUsage]) -> None:
    reader = open_reader(store, COORDINATOR)
    submitted: dict[str, tuple[str, float]] = {}
    try:
        for row in reader.read(reader.first_seq()):
            event = ev.unpack(row.body)
            if isinstance(event, ev.Submitted) and row.at >= since_s:
                teams[event.requester].requests += 1
                submitted[event.id] = event.requester, row.at
            elif isinstance(event, ev.Told) and event.state == "placed" and event.id in submitted:
                requester, at = submitted.pop(event.id)
                teams[requester].waits_s.append(max(row.at - at, 0.0))
    finally:
        reader.close()


class _Meter:
    """Integrates one pool's holdings over time, requester by requester."""

    def __init__(self, pool: str, key: str, since_s: float, teams: dict[str, TeamUsage]) -> None:
        self._pool, self._key, self._since_s, self._teams = pool, key, since_s, teams
        self._waiting: dict[str, tuple[str, int]] = {}
        self._held: dict[str, tuple[str, int]] = {}
        self._leaving: set[str] = set()
        self._reserved: dict[str, int] = {}
        # per requester: all that it holds, the part that is not being preempted, and since when that is so
        self._all: dict[str, int] = defaultdict(int)
        self._booked: dict[str, int] = defaultdict(int)
        self._from: dict[str, float] = {}
        self._now = since_s

    def event(self, event: Any, at: float) -> None:
        """One event of the pool's log."""
        self._now = max(self._now, at)
        if isinstance(event, ev.Configured):
            for requester in list(self._from):
                self._settle(requester)
            self._reserved = {p["requester"]: p["reserved"].get(self._key, 0) for p in event.policies}
        elif isinstance(event, ev.Queued):
            amount = sum(amount for key, amount in event.amounts if key == self._key)
            self._waiting[event.id] = event.requester, amount
        elif isinstance(event, ev.Granted) and event.id in self._waiting:
            requester, amount = self._held[event.id] = self._waiting.pop(event.id)
            self._change(requester, amount, amount)
        elif isinstance(event, ev.Nominated):
            self._nominated(event)
        elif isinstance(event, ev.Evicted):
            self._called_back(event.id)
        elif isinstance(event, ev.Ended):
            self._waiting.pop(event.id, None)
            held = self._held.pop(event.id, None)
            if held is not None:
                booked = 0 if event.id in self._leaving else held[1]
                self._leaving.discard(event.id)
                self._change(held[0], -held[1], -booked)

    def _nominated(self, event: ev.Nominated) -> None:
        asker = self._waiting.get(event.id)
        for id, _ in event.victims:
            if self._called_back(id) and asker is not None and self._now > self._since_s:
                self._teams[asker[0]].caused += 1

    def _called_back(self, id: str) -> bool:
        held = self._held.get(id)
        if held is None:
            return False
        self._leaving.add(id)
        self._change(held[0], 0, -held[1])
        if self._now > self._since_s:
            self._teams[held[0]].suffered += 1
        return True

    def _change(self, requester: str, held: int, booked: int) -> None:
        self._settle(requester)
        self._all[requester] += held
        self._booked[requester] += booked

    def _settle(self, requester: str) -> None:
        """What the requester held since it last changed is added up."""
        elapsed_s = self._now - self._from.get(requester, self._now)
        self._from[requester] = self._now
        held = self._all[requester]
        if held and elapsed_s > 0:
            share = min(self._booked[requester], self._reserved.get(requester, 0))
            team = self._teams[requester]
            team.in_share_s += share * elapsed_s
            team.borrowed_s += (held - share) * elapsed_s
            team.by_pool_s[self._pool] += held * elapsed_s

    def close(self) -> None:
        """The log was read: what is still held counts up to its last event."""
        for requester in list(self._from):
            self._settle(requester)


def quantile(values: list[float], share: float) -> float | None:
    """The smallest value that at least this share of them does not exceed; None of none."""
    return ordered_quantile(sorted(values), share) if values else None


def ordered_quantile(ordered: Sequence[float], share: float) -> float:
    """Likewise, of at least one value, in ascending order."""
    return ordered[min(max(int(-(-share * len(ordered) // 1)) - 1, 0), len(ordered) - 1)]
