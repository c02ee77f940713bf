"""What was decided, newest first, with the reason of each: out of all logs of a store.

Decisions are grants, victims and who they stop for, ends, rejections, changes and operators' words. What only carries
them on (an attempt that queues, what one actor told another) is left out; `pools log` has it.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import msgpack

from .config_difference import difference_words
from .core import access, explain
from .core import records as ev
from .core.coordinator_state import CoordinatorState
from .core.pool_state import PoolState
from .core.queue import ENDING, HOLDING, NOMINATED, Attempt
from .log_story import COORDINATOR, pool_log
from .log_view import base_state, events, pools_in, time_text
from .log_words import amounts_words, ids_words, words
from .store import Reader, open_reader


class Decision(NamedTuple):
    """One decision. `request` and `requester` are "" where it is about none; `also` are the requests that it stops."""

    log: str
    seq: int
    at: float
    event: str
    request: str
    requester: str
    text: str
    also: tuple[str, ...] = ()

    @property
    def pool(self) -> str:
        """The pool that decided, or "" for the coordinator."""
        return "" if self.log == COORDINATOR else self.log.removeprefix("pool:")

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return {**self._asdict(), "also": list(self.also), "pool": self.pool}

    def __str__(self) -> str:
        return f"{time_text(self.at)}  {self.pool or COORDINATOR}: {self.text}"


def history(
    store: str,
    limit: int,
    *,
    pool: str | None = None,
    request: str | None = None,
    requester: str | None = None,
    since: float | None = None,
) -> list[Decision]:
    """The newest decisions: of one pool, about one request (those that stop it too), of one requester, since a time.

    Raises:
        NoLog: there is no coordinator's log, or none of that pool.
    """

    def wanted(decision: Decision) -> bool:
        return (
            (request is None or request in (decision.request, *decision.also))
            and (requester is None or decision.requester == requester)
            and (since is None or decision.at >= since)
        )

    logs = [pool_log(pool)] if pool is not None else [COORDINATOR, *map(pool_log, pools_in(store))]
    found = [_newest(store, log, limit, wanted) for log in logs]
    merged = heapq.merge(*found, key=lambda each: -each.at)
    return [decision for decision, _ in zip(merged, range(limit), strict=False)]


def why_not_placed(store: str, pool: str, request: str) -> str:
    """Why the pool gave its newest grant of the request back, as its log has it since its snapshot; else "".

    Raises:
        NoLog, PoolsError: the log can't be read from here.
    """
    reader = open_reader(store, pool_log(pool))
    why = ""
    try:
        for _, event in events(reader, next(_starts(reader, pool_log(pool))).seq + 1):
            if isinstance(event, ev.Ending) and event.id == request:
                why = event.why
    finally:
        reader.close()
    return why


def _newest(store: str, log: str, limit: int, wanted: Callable[[Decision], bool]) -> list[Decision]:
    """The newest decisions of one log, newest first. The whole log is read only if there is not enough after its
    snapshot.
    """
    reader = open_reader(store, log)
    try:
        for state in _starts(reader, log):
            first = state.seq
            teller: Any = _CoordinatorTeller(state) if log == COORDINATOR else _PoolTeller(log, state)
            kept: deque[Decision] = deque(maxlen=limit)
            for row, event in events(reader, first + 1):
                kept.extend(each for each in teller.hear(row.seq, row.at, event) if wanted(each))
            if len(kept) == limit or first < reader.first_seq():
                break
    finally:
        reader.close()
    return list(reversed(kept))


def _starts(reader: Reader, log: str) -> Iterator[Any]:
    """The newest state that needs no reading, then the oldest."""
    snapshot = reader.latest_snapshot()
    if snapshot is not None:
        kind: Any = CoordinatorState if log == COORDINATOR else PoolState
        try:
            yield kind.load(msgpack.unpackb(snapshot.state, strict_map_key=False))
        except ev.UnknownSnapshot:
            pass  # other code's: the log has it all
    yield base_state(reader, log)


class _CoordinatorTeller:
    def __init__(self, state: CoordinatorState) -> None:
        self.state = state

    def hear(self, seq: int, at: float, event: Any) -> Iterator[Decision]:
        changed = self._changed(event) if isinstance(event, ev.Changed) else ""
        self.state.apply(event, at)
        id = str(getattr(event, "id", ""))
        known = self.state.requests.get(id)
        text = changed or self._text(event)
        if text:
            requester = known.requester if known is not None else ""
            said = f"{_named(id, requester)}: {text}" if id and not isinstance(event, ev.Submitted) else text
            yield Decision(COORDINATOR, seq, at, type(event).__name__, id, requester, said)

    def _changed(self, event: ev.Changed) -> str:
        """What is other than before, not all that is there now. Before the event is applied."""
        state = self.state
        before = {
            "pools": [pool.to_wire() for pool in state.pools.values()],
            "policies": [p.to_wire() for name in state.pools for p in state.policies_of(name)],
            "requesters": state.requester_keys,
            "limits": {name: state.limit(name) for name in access.LIMITS},
            "timings": state.timings,
        }
        by = f", by operator {event.by}" if event.by else ""
        return f"configuration {event.version}{by}: {'; '.join(difference_words(before, event.changes))}"

    def _text(self, event: Any) -> str:
        if isinstance(event, ev.Submitted):
            return "" if event.pools else f"{event.id} of {words(event)}"
        if isinstance(event, ev.Opened):
            return words(event) if event.k > 1 else ""
        if isinstance(event, ev.Finished):
            return "" if event.state == "released" else words(event)
        told = (
            ev.Changed,
            ev.DeclaredLost,
            ev.Commanded,
            ev.HolderGone,
            ev.Denied,
            ev.Announced,
            ev.Unannounced,
        )
        return words(event) if isinstance(event, told) else ""


class _PoolTeller:
    def __init__(self, log: str, state: PoolState) -> None:
        self.log, self.state = log, state

    def hear(self, seq: int, at: float, event: Any) -> Iterator[Decision]:
        state = self.state
        text, also = "", ()
        if isinstance(event, ev.Nominated):
            text, also = self._nominated(event), tuple(id for id, _ in event.victims)
        attempt = state.attempts.get(getattr(event, "id", ""))
        was = attempt.state if attempt is not None else ""
        state.apply(event, at)
        if isinstance(event, ev.Granted):
            text = self._granted(state.attempts[event.id], at)
        elif (
            isinstance(event, ev.Evicted)
            or (isinstance(event, (ev.Ending, ev.Ended)) and was in (*HOLDING, NOMINATED) and was != ENDING)
            or isinstance(event, ev.BegunAnew)
        ):
            text = words(event)
        if text:
            requester = attempt.requester if attempt is not None else ""
            id = str(getattr(event, "id", ""))
            said = f"{_named(id, requester)}: {text}" if id else text
            yield Decision(self.log, seq, at, type(event).__name__, id, requester, said, also)

    def _granted(self, attempt: Attempt, at: float) -> str:
        borrowed = explain.borrowed_part(self.state, attempt)
        how = f"borrows {amounts_words(borrowed.items())}" if borrowed else "in its share"
        waited_s = max(0.0, at - attempt.submitted_at)
        return f"granted {amounts_words(attempt.amounts)}, {how}; it was submitted {waited_s:.1f} s before"

    def _nominated(self, event: ev.Nominated) -> str:
        state = self.state
        attempt = state.attempts[event.id]
        policy = state.policies.get(attempt.requester)
        victims = ids_words(
            _named(id, victim.requester) if (victim := state.attempts.get(id)) else id
            for id, _ in event.victims
        )
        if state.in_share(attempt):
            why = "it takes its share back"
        else:
            why = f"its priority {policy.priority if policy else 'none'} is above theirs"
        return f"nominated for {amounts_words(attempt.amounts)}: {victims} must stop, since {why}"


def _named(id: str, requester: str) -> str:
    return f"{id} of {requester}" if requester else id
