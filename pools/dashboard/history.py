"""The pools' logs as the page looks at them: who held what when, and the state at any moment.

Each log is read once and then followed. What is kept of it is bounded: the newest grants that are over, and some states
on the way, from which a moment in the past is reached without a fold from the first row. The state at a moment is
`log_view.state_at`, as `pools log POOL --at` has it. One thread uses a `History` at a time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import msgpack

from ..core import records as ev
from ..core.pool_state import PoolState
from ..core.queue import HOLDING, Attempt
from ..core.victims import OPERATOR, reason
from ..errors import PoolsError
from ..log_story import pool_log
from ..log_tale import tale
from ..log_view import as_plain, base_state, pools_in, state_at
from ..store import NoLog, Reader, open_reader
from ..store.base import reading_much

GRANTS_KEPT = 10_000
"""Grants of a pool that are over; older ones are in the log only."""

CHECKPOINTS_MAX = 24
CHECKPOINT_EVERY_ROWS = 5_000
"""States that are kept of each log; where it is long, they stand the farther apart."""

LOST = "lost"
"""How a grant ended whose pool was declared lost; otherwise it is one of `records.ENDS`."""

Key = tuple[str, int]


@dataclass
class Held:
    """One grant: what it held, from when to when, and what ended it."""

    id: str
    k: int
    requester: str
    amounts: dict[str, int]
    preemptible: bool
    granted_at: float
    row: int
    """Of its grant, in the pool's log."""
    seq: int
    """The row of its last change: of its end, once it is over."""
    told_at: float | None = None
    """When it was told to stop."""
    asker: str = ""
    """The request that it was told to stop for, and that one's requester."""
    asker_requester: str = ""
    reason: str = ""
    ended_at: float | None = None
    how: str = ""
    why: str = ""

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return dict(vars(self))


@dataclass
class Follower:
    """One pool's log, read so far."""

    pool: str
    state: PoolState
    epoch: int = 0
    first_at: float | None = None
    holding: dict[Key, Held] = field(default_factory=dict)
    over: dict[Key, Held] = field(default_factory=dict)
    checkpoints: list[tuple[float, int, int, bytes]] = field(default_factory=list)
    """(time, row, epoch, dumped state), in order."""
    spacing: int = CHECKPOINT_EVERY_ROWS
    cut: bool = False
    """Some grants that are over are no longer kept."""

    def read(self, reader: Reader) -> None:
        """Takes in what is new."""
        with reading_much():
            for batch in reader.read_batches(self.state.seq + 1):
                self.epoch = batch.epoch
                for event in ev.unpack_all(batch.body, batch.last_seq - batch.first_seq + 1):
                    self._take(event, batch.at)

    def _take(self, event: Any, at: float) -> None:
        state = self.state
        if self.first_at is None:
            self.first_at = at
        if isinstance(event, ev.Nominated):
            self._nominated(event, at)
        elif isinstance(event, ev.Evicted) and (held := self.holding.get((event.id, event.k))) is not None:
            held.told_at, held.seq, held.reason = at, state.seq + 1, OPERATOR
        state.apply(event, at)
        if isinstance(event, ev.Granted):
            self.holds(state.attempts[event.id])
        elif isinstance(event, ev.Ended):
            if (event.id, event.k) in self.holding:
                self._ends((event.id, event.k), at, event.how, event.why)
        elif isinstance(event, ev.BegunAnew):
            for key in list(self.holding):
                self._ends(key, at, LOST, "its pool was declared lost")
        last = self.checkpoints[-1][1] if self.checkpoints else 0
        if state.seq - last >= self.spacing:
            self._checkpoint()

    def _nominated(self, event: ev.Nominated, at: float) -> None:
        """Before the event: who stops for whom, and why."""
        state, asker = self.state, self.state.attempts[event.id]
        share = state.in_share(asker)
        for id, k in event.victims:
            held = self.holding.get((id, k))
            if held is not None:
                held.told_at, held.seq = at, state.seq + 1
                held.asker, held.asker_requester = asker.id, asker.requester
                held.reason = reason(asker.requester, share, held.requester)

    def holds(self, attempt: Attempt) -> None:
        """A grant begins, or stood when the log as it is kept begins."""
        self.holding[attempt.id, attempt.k] = Held(
            attempt.id,
            attempt.k,
            attempt.requester,
            dict(attempt.amounts),
            attempt.preemptible,
            attempt.granted_at,
            attempt.grant_number,
            self.state.seq,
        )

    def _ends(self, key: Key, at: float, how: str, why: str) -> None:
        held = self.over[key] = self.holding.pop(key)
        held.ended_at, held.how, held.why, held.seq = at, how, why, self.state.seq
        if len(self.over) > GRANTS_KEPT:
            del self.over[next(iter(self.over))]
            self.cut = True

    def _checkpoint(self) -> None:
        state = self.state
        self.checkpoints.append((state.clock, state.seq, self.epoch, msgpack.packb(state.dump())))
        if len(self.checkpoints) > CHECKPOINTS_MAX:
            self.checkpoints = self.checkpoints[1::2]
            self.spacing *= 2

    def start_for(self, moment: float) -> tuple[PoolState, int] | None:
        """The last state kept that is not after the moment."""
        for at, _, epoch, dumped in reversed(self.checkpoints):
            if at <= moment:
                return PoolState.load(msgpack.unpackb(dumped, strict_map_key=False)), epoch
        return None


class History:
    """All pools' logs at a store. Raises NoLog, or what a store raises, if they can't be read."""

    def __init__(self, store: str) -> None:
        self.store = store
        self.followers: dict[str, Follower] = {}
        self._readers: dict[str, Reader] = {}
        self.add(pools_in(store))

    def add(self, pools: Iterable[str]) -> None:
        """These pools' logs are followed too, as soon as they are there."""
        for pool in pools:
            if pool in self.followers:
                continue
            try:
                reader = self._readers[pool] = open_reader(self.store, pool_log(pool))
            except NoLog:
                continue
            follower = Follower(pool, base_state(reader, pool_log(pool)))
            follower.first_at = follower.state.clock if follower.state.seq else None
            for attempt in follower.state.attempts.values():
                if attempt.state in HOLDING:
                    follower.holds(attempt)
            self.followers[pool] = follower

    def close(self) -> None:
        """Lets go of the store."""
        for reader in self._readers.values():
            reader.close()

    def read(self) -> None:
        """Takes in what is new in all logs."""
        for pool, follower in self.followers.items():
            follower.read(self._readers[pool])

    def span(self) -> dict[str, Any]:
        """From when to when the logs reach, and how many rows there are of each."""
        starts = [f.first_at for f in self.followers.values() if f.first_at is not None]
        ends = [f.state.clock for f in self.followers.values() if f.first_at is not None]
        return {
            "from": min(starts, default=None),
            "to": max(ends, default=None),
            "rows": {pool: follower.state.seq for pool, follower in sorted(self.followers.items())},
        }

    def grants(self, pool: str, from_s: float, to_s: float, after: int, most: int) -> dict[str, Any]:
        """Grants of a pool that held anything between two times and changed after row `after`, in order of their start.

        At most so many, of them the newest; `cut` says that there are more.
        """
        follower = self.followers.get(pool)
        if follower is None:
            return {"rows": 0, "grants": [], "cut": False}
        found = [
            held
            for held in (*follower.over.values(), *follower.holding.values())
            if held.seq > after
            and held.granted_at <= to_s
            and (held.ended_at is None or held.ended_at >= from_s)
        ]
        found.sort(key=lambda held: held.row)
        return {
            "rows": follower.state.seq,
            "grants": [held.plain() for held in found[max(len(found) - most, 0) :]],
            "cut": follower.cut or len(found) > most,
        }

    def at(self, moment: float) -> dict[str, Any]:
        """Each pool at a time, as `pools log POOL --at` has it; {"missing": why} where its log can't say."""
        found: dict[str, Any] = {}
        for pool, follower in sorted(self.followers.items()):
            try:
                start = follower.start_for(moment)
                found[pool] = state_at(self._readers[pool], pool_log(pool), moment, start)
            except PoolsError as problem:
                found[pool] = {"missing": str(problem)}
        return found

    def now(self, pool: str, shown: int) -> dict[str, Any]:
        """A pool after the last row read; of its queue and of its grants at most so many."""
        follower = self.followers[pool]
        return as_plain(pool_log(pool), follower.state, follower.epoch, shown)


def story(store: str, id: str) -> list[dict[str, Any]]:
    """A request's story over all logs, as `pools log --request` has it. Raises Refused for an unknown one."""
    return [line.plain() for line in tale(store, id)]
