"""What happens in the pools, told in plain words while it happens: the logs read live, event by event.

What lives here: following the logs of coordinator and pools (`LogFollower`), and the story that their events make
(`Story`): sentences for people and figures for the summary. Nothing is told that a log does not say; what was in
a share and what was borrowed comes from the pools' own fold. What does not: Ray, terminals, the workload.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .core import records as ev
from .core.pool_state import PoolState
from .core.queue import Attempt
from .store import NoLog, Reader, open_reader

COORDINATOR = "coordinator"

CAUSES = {
    "waiting_capacity": "all GPUs that it may use are taken",
    "awaiting_preemption": "who had the GPUs is still on its way out",
    "behind_head": "it could start, but someone in their share waits before it",
    "at_limit": "its team is at its limit",
    "reserved_in_use": "its team's share is in use by work that can't be stopped",
    "paused": "nodes did not come up in time; it is tried again soon",
}
"""What the causes of docs/rules.md sections 4 and 5 mean."""


class Line(NamedTuple):
    """One sentence: at which second of the epoch, about what (`kind`), of which team ("" for none)."""

    at: float
    kind: str
    who: str
    text: str


class LogRow(NamedTuple):
    """One event of one log ("coordinator" or a pool's name)."""

    at: float
    log: str
    event: Any


@dataclass
class Team:
    """What a team got, counted in grants."""

    requests: int = 0
    in_share: int = 0
    borrowed: int = 0
    fallback: int = 0
    preempted: int = 0
    finished: int = 0
    waits_s: list[float] = field(default_factory=list)


class LogFollower:
    """Reads what the actors log, from several logs in the order of its time."""

    def __init__(self, store: str, pools: Iterable[str]) -> None:
        self._store = store
        self._logs = {COORDINATOR: COORDINATOR, **{pool: f"pool:{pool}" for pool in pools}}
        self._readers: dict[str, Reader] = {}
        self._next_seq = dict.fromkeys(self._logs, 1)
        self._held_back: list[LogRow] = []

    def read(self, until: float) -> list[LogRow]:
        """What is new. Rows later than `until` are kept for the next call: a log that was read first may lack
        what another already follows up.
        """
        rows = self._held_back
        for log in self._logs:
            rows += self._new_rows(log)
        rows.sort(key=lambda row: row.at)
        ready = [row for row in rows if row.at <= until]
        self._held_back = [row for row in rows if row.at > until]
        return ready

    def _new_rows(self, log: str) -> list[LogRow]:
        reader = self._readers.get(log)
        if reader is None:
            try:
                reader = self._readers[log] = open_reader(self._store, self._logs[log])
            except NoLog:  # its actor is only starting
                return []
        rows = []
        for row in reader.read(self._next_seq[log]):
            rows.append(LogRow(row.at, log, ev.unpack(row.body)))
            self._next_seq[log] = row.seq + 1
        return rows

    def close(self) -> None:
        """Lets go of the files."""
        for reader in self._readers.values():
            reader.close()


class Story:
    """Figures and sentences out of log rows; `hear` takes them in the order of their time."""

    def __init__(self) -> None:
        self.teams: dict[str, Team] = {}
        self.reclaims = 0
        self.fallbacks = 0
        self._pools: dict[str, PoolState] = {}
        self._asked: dict[str, ev.Submitted] = {}
        self._since: dict[str, float] = {}

    def hear(self, row: LogRow) -> Iterator[Line]:
        """What there is to say of one row."""
        event = row.event
        if row.log != COORDINATOR:
            yield from self._hear_pool(row)
        elif isinstance(event, ev.Submitted):
            yield self._submitted(event, row.at)
        elif isinstance(event, ev.Opened):
            self._since[event.id] = row.at
            yield self._line(row, "queue", event.id, f"{event.id} queues again, with the age that it had")
        elif isinstance(event, ev.Asked) and event.what == "stopped":
            yield self._line(row, "stop", event.id, f"{event.id} has stopped and says so")
        elif isinstance(event, ev.Finished) and event.id in self._asked:
            self._team(event.id).finished += event.state == "released"
            if event.state != "released":
                yield self._line(row, "end", event.id, f"{event.id} is {event.state}")

    def _team(self, id: str) -> Team:
        return self.teams.setdefault(self._who(id), Team())

    def _who(self, id: str) -> str:
        asked = self._asked.get(id)
        return asked.requester if asked else ""

    def _line(self, row: LogRow, kind: str, id: str, text: str) -> Line:
        return Line(row.at, kind, self._who(id), text)

    def _submitted(self, event: ev.Submitted, at: float) -> Line:
        self._asked[event.id], self._since[event.id] = event, at
        self._team(event.id).requests += 1
        wanted = gpus_text(sum(amount for key, amount in event.amounts if key == "gpu"))
        if not event.pools:
            return Line(at, "end", event.requester, f"{event.id} asks for {wanted}: no pool can ever give it")
        return Line(at, "ask", event.requester, f"{event.id} asks for {wanted} ({or_list(event.pools)})")

    def _hear_pool(self, row: LogRow) -> Iterator[Line]:
        event, pool = row.event, row.log
        state = self._pools.setdefault(pool, PoolState())
        if isinstance(event, ev.Nominated):
            yield self._nominated(row, state)
        ending = state.attempts.get(event.id) if isinstance(event, (ev.Ending, ev.Ended)) else None
        was_holding = ending is not None and ending.state in ("granted", "preempting")
        state.apply(event, row.at)
        if isinstance(event, ev.Granted):
            yield self._granted(row, state)
        elif ending is not None and was_holding:
            yield from self._ended(row, ending)

    def _nominated(self, row: LogRow, state: PoolState) -> Line:
        event, attempt = row.event, state.attempts[row.event.id]
        in_share = state.in_share(attempt)
        self.reclaims += in_share
        victims = [id for id, _ in event.victims]
        for id in victims:
            self._team(id).preempted += 1
        why = f"{attempt.requester} takes back its share" if in_share else "it goes before"
        grace_s = state.config.grace_s if state.config else 0.0
        text = f"{event.id}: {why} of {row.log}; {and_list(victims)} must stop within {grace_s:g} s"
        return self._line(row, "reclaim" if in_share else "preempt", event.id, text)

    def _granted(self, row: LogRow, state: PoolState) -> Line:
        attempt, id = state.attempts[row.event.id], row.event.id
        gpus = dict(attempt.amounts).get("gpu", 0)
        policy = state.policies.get(attempt.requester)
        share = policy.reserved.get("gpu", 0) if policy else 0
        over = max(state.ledger.uses[attempt.requester].booked["gpu"] - share, 0)
        borrowed = min(gpus, over)
        waited_s = max(row.at - self._since.get(id, row.at), 0.0)
        team = self._team(id)
        team.borrowed += borrowed > 0
        team.in_share += borrowed == 0
        team.waits_s.append(waited_s)
        asked = self._asked.get(id)
        is_fallback = asked is not None and bool(asked.pools) and asked.pools[0] != row.log
        said = "in its share" if not borrowed else "borrowed"
        if 0 < borrowed < gpus:
            said = f"{gpus - borrowed} in its share, {borrowed} borrowed"
        text = f"{id} gets {gpus_text(gpus)} of {row.log}, {said}"
        if waited_s >= 1:
            text += f", after {waited_s:.1f} s"
        if is_fallback and asked is not None:
            self.fallbacks += 1
            team.fallback += 1
            text += f": {asked.pools[0]} is full, and nobody is stopped while {row.log} has room"
        return self._line(row, "fallback" if is_fallback else "grant", id, text)

    def _ended(self, row: LogRow, attempt: Attempt) -> Iterator[Line]:
        gpus, how = gpus_text(dict(attempt.amounts).get("gpu", 0)), row.event.how
        if how == "released":
            yield self._line(row, "end", attempt.id, f"{attempt.id} is done; {gpus} of {row.log} are free")
        elif how == "stopped" and "grace" in row.event.why:
            yield self._line(row, "stop", attempt.id, f"{attempt.id} did not stop in time: taken by force")
        elif how not in ("stopped", "released"):
            yield self._line(row, "end", attempt.id, f"{attempt.id} loses {gpus} of {row.log}: {how}")


def gpus_text(count: int) -> str:
    """1 GPU, 2 GPUs."""
    return f"{count} GPU" + ("" if count == 1 else "s")


def and_list(names: Sequence[str], word: str = "and") -> str:
    """a, b and c."""
    return f" {word} ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))


def or_list(names: Sequence[str]) -> str:
    """a, else b, else c."""
    return ", else ".join(names)
