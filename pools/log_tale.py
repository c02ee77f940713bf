"""One request's whole story: what the coordinator's log and the pools' logs say of it, in one order, with reasons.

Logs have times of the same machine, or of several. So lines are put in order by time, but never an effect before what
caused it: a grant comes after the pool has taken the attempt, what the coordinator was told after the pool's own row.
Why a request waited is in no log; it is judged again from the pool's state as its log gives it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from .core import explain
from .core import records as ev
from .core.pool import Pool
from .core.queue import NOMINATED, QUEUED
from .errors import Refused
from .log_story import COORDINATOR, pool_log
from .log_view import Line, base_state, events, lines, pools_in, time_text
from .log_words import amounts_words, is_about, words
from .store import NoLog, open_reader


@dataclass
class Told:
    """One line of the story. seq 0: no event of its own, but what follows from the pool's state then."""

    log: str
    seq: int
    at: float
    name: str
    text: str
    gives: set[Hashable] = field(default_factory=set)
    needs: set[Hashable] = field(default_factory=set)

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return {"log": self.log, "seq": self.seq, "at": self.at, "event": self.name, "text": self.text}

    def __str__(self) -> str:
        row = f"{self.log} {self.seq}" if self.seq else self.log
        return f"{time_text(self.at)}  {row}: {self.text}"


def tale(store: str, id: str) -> list[Told]:
    """The story of a request.

    Raises:
        NoLog: there is no coordinator's log.
        Refused: no log here knows the request (`unknown_id`).
    """
    reader = open_reader(store, COORDINATOR)
    try:
        whole = reader.first_seq() == 1
        before = None if whole else base_state(reader, COORDINATOR).requests.get(id)
        found = list(_concerning(lines(reader, COORDINATOR), id, before.pools if before else ()))
    finally:
        reader.close()
    told: list[Told] = []
    named: set[str] = set()
    k = 1
    for line in found:
        k = getattr(line.event, "k", k)
        told.append(_of_coordinator(line.event, k, line.seq, line.at))
        named.update(getattr(line.event, "pools", ()))
    per_log = [told]
    for pool in sorted(named) if whole else pools_in(store):
        per_log.append(list(_of_pool(store, pool, id)))
    if not any(per_log):
        raise Refused("unknown_id", f"the logs at {store} know no request {id!r}", {"id": id})
    return list(_in_order(per_log))


def _concerning(found: Iterable[Line], id: str, before: Iterable[str]) -> Iterator[Line]:
    """What is about the request, and that the log of a pool is lost in which it waits or holds then."""
    pools = set(before)
    for line in found:
        event = line.event
        if is_about(event, id):
            if isinstance(event, (ev.Submitted, ev.Opened)):
                pools = set(event.pools)
            elif isinstance(event, ev.Taken):
                pools = {event.pool}
            elif isinstance(event, ev.Finished):
                pools = set()
        elif not (isinstance(event, ev.DeclaredLost) and event.pool in pools):
            continue
        yield line


def _of_coordinator(event: Any, k: int, seq: int, at: float) -> Told:
    line = Told(COORDINATOR, seq, at, type(event).__name__, words(event))
    if isinstance(event, (ev.Submitted, ev.Opened)):
        line.gives = {("open", k), ("moved", k - 1)}
        line.needs = {("ended", k - 1)}
        if len(event.pools) == 1:
            line.gives.add(("taken", k))
    elif isinstance(event, ev.Taken):
        line.gives = {("taken", k), ("moved", k)}
    elif isinstance(event, ev.Asked):
        line.gives = {("asked", k), ("moved", k)}
    elif isinstance(event, ev.Told):
        line.needs = {(event.state, k)}
    elif isinstance(event, ev.Finished):
        line.gives = {("moved", k)}
        line.needs = {("ended", k)}
    elif isinstance(event, ev.Forgotten):
        line.text = "it leaves the coordinator's state: retention is over"
    return line


def _of_pool(store: str, pool: str, id: str) -> Iterator[Told]:
    try:
        reader = open_reader(store, pool_log(pool))
    except NoLog:
        return
    try:
        teller = _PoolTeller(pool, id, base_state(reader, pool_log(pool)))
        for row, event in events(reader, teller.state.seq + 1):
            yield from teller.hear(row.seq, row.at, event)
        yield from teller.reason()
    finally:
        reader.close()


class _PoolTeller:
    """Folds a pool's log and tells what concerns one request. A turn is over where the time moves on."""

    def __init__(self, pool: str, id: str, state: Any) -> None:
        self.log, self.id, self.state = pool_log(pool), id, state
        self._core = Pool(pool, state, 1, state.clock)
        self._said: tuple[int, str | None] | None = None

    def hear(self, seq: int, at: float, event: Any) -> Iterator[Told]:
        if at > self._core.now:
            yield from self.reason()
            self._core.set_time(at)
        before = self.state.attempts.get(self.id)
        was = before.state if before is not None else ""
        self.state.apply(event, at)
        if isinstance(event, ev.Nominated) and event.id != self.id:
            for victim, k in event.victims:
                if victim == self.id:
                    yield self._victim(seq, at, event, k)
        elif getattr(event, "id", "") == self.id:
            yield self._own(seq, at, event, was)

    def _victim(self, seq: int, at: float, event: ev.Nominated, k: int) -> Told:
        asker = self.state.attempts[event.id]
        policy = self.state.policies.get(asker.requester)
        priority = f", priority {policy.priority}" if policy is not None else ""
        text = (
            f"attempt {k} must stop: request {event.id} of {asker.requester} ({amounts_words(asker.amounts)}"
            f"{priority}) needs its capacity; it has {self.state.config.grace_s:g} s of grace"
        )
        return Told(self.log, seq, at, "Nominated", text, gives={("preempting", k)})

    def _own(self, seq: int, at: float, event: Any, was: str) -> Told:
        line = Told(self.log, seq, at, type(event).__name__, words(event))
        k = event.k
        if isinstance(event, ev.Queued):
            line.needs = {("open", k)}
        elif isinstance(event, ev.Evicted):
            line.gives = {("preempting", k)}
        elif isinstance(event, (ev.Granted, ev.Nominated)):
            granted = isinstance(event, ev.Granted)
            line.gives, line.needs = {("granted" if granted else "nominated", k)}, {("taken", k)}
            if granted:
                if not self.state.places:  # it only counts: nothing is to be placed
                    line.gives.add(("placed", k))
                line.text += ": " + ("those before it have stopped" if was == NOMINATED else "there is room")
        elif isinstance(event, ev.Placed):
            line.gives = {("placed", k)}
        elif isinstance(event, (ev.Ending, ev.Ended)):
            asked = event.how in ("released", "cancelled", "expired") or event.why == ev.HOLDER_STOPPED
            line.needs = {("asked", k)} if asked else {("moved", k)} if event.how == "withdrawn" else set()
            if isinstance(event, ev.Ended) and event.how != "withdrawn":
                line.gives = {("ended", k)}
        return line

    def reason(self) -> Iterator[Told]:
        """At the end of a turn: why it waits, if it does, and for another cause than before."""
        attempt = self.state.attempts.get(self.id)
        if attempt is None or attempt.state not in (QUEUED, NOMINATED):
            self._said = None
            return
        cause = explain.cause(self._core, attempt)
        if cause is None or self._said == (attempt.k, cause):
            return
        self._said = attempt.k, cause
        said = explain.why(self._core, attempt)
        place = f"{said['position']} of {said['waiting']} in the queue"
        text = f"attempt {attempt.k} waits, {place}: {cause}, {said['text']}"
        yield Told(self.log, 0, self._core.now, "waits", text)


def _in_order(per_log: Iterable[list[Told]]) -> Iterator[Told]:
    """By time, each log in its own order, and nothing before what it needs, as far as some log here gives that."""
    queues = [list(reversed(told)) for told in per_log if told]
    missing: dict[Hashable, int] = {}
    for queue in queues:
        for line in queue:
            for fact in line.gives:
                missing[fact] = missing.get(fact, 0) + 1
    given: set[Hashable] = set()
    while queues:
        ready = [queue for queue in queues if all(f in given or f not in missing for f in queue[-1].needs)]
        queue = min(ready or queues, key=lambda each: each[-1].at)
        line = queue.pop()
        given |= line.gives
        yield line
        queues = [each for each in queues if each]
