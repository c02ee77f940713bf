"""One actor's log, read event by event into the facts that a check of several logs needs.

What lives here: the fold of one log beside an independent count of what is held (docs/rules.md section 10, items 2 and
3), and the comparison of folds (item 7). What does not: anything that takes two logs at once (log_check.py). Reading
changes nothing, so a log may be live: what is read is a prefix of it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgpack

from .core import records as ev
from .core.coordinator_state import CoordinatorState
from .core.pool_state import PoolState
from .core.queue import HOLDING
from .core.requests import FINAL
from .errors import PoolsError
from .store import Reader

COORDINATOR = "coordinator"
Attempt = tuple[str, int]


def pool_log(pool: str) -> str:
    """The name of a pool's log."""
    return "pool:" + pool


class Problem(NamedTuple):
    """One thing that must not be: in which log, at which row (0: none), of which request, by which item."""

    log: str
    seq: int
    request: str
    item: int
    text: str

    def __str__(self) -> str:
        row = f" row {self.seq}" if self.seq else ""
        request = f", request {self.request}" if self.request else ""
        return f"{self.log}{row}{request}: {self.text} (docs/rules.md section 10.{self.item})"


class LogEnds(Exception):
    """What follows in this log can't be judged; the problem is noted."""


@dataclass
class Life:
    """What one log of a pool says of one attempt. Row numbers; 0 where it did not happen."""

    nominated: int = 0
    granted: int = 0
    ended: int = 0


@dataclass
class Held:
    """A grant that holds, as the independent count knows it."""

    k: int
    requester: str
    amounts: ev.Amounts
    preemptible: bool


class Story:
    """What all logs have: the fold, its digest, what was wrong. `from_seq` above 1: earlier rows are pruned."""

    item_of_fold = 7

    def __init__(self, log: str, state: Any, load: Callable[[dict[str, Any]], Any]) -> None:
        self.log, self.state, self._load = log, state, load
        self.problems: list[Problem] = []
        self.from_seq = 1
        self.events = 0
        self.digest = ""

    def wrong(self, seq: int, request: str, item: int, text: str) -> None:
        """Notes a problem."""
        self.problems.append(Problem(self.log, seq, request, item, text))

    def read(self, reader: Reader, live: Mapping[str, Any] | None = None) -> None:
        """The whole log as it is now, in three passes: the story, the fold again, the fold from halfway on.

        `live`: {"seq", "digest"} as the actor itself gave them; they must be met on the way.
        """
        try:
            self._begin(reader)
            half = (reader.head()[1] + self.from_seq) // 2
            dumped: bytes | None = None
            for row, event in self._rows(reader, self.from_seq):
                self._event(row.seq, row.at, event)
                self.events += 1
                if row.seq == half:
                    dumped = msgpack.packb(self.state.dump())
                if live is not None and row.seq == live["seq"] and self.state.digest() != live["digest"]:
                    self.wrong(row.seq, "", 7, "the actor's own state differs from what its log gives")
            self.digest = self.state.digest()
            self._compare_folds(reader, dumped)
        except LogEnds:
            return
        self._end()

    def _begin(self, reader: Reader) -> None:
        """Where earlier rows are pruned, the snapshot stands for them."""
        self.from_seq = reader.first_seq()
        if self.from_seq > 1:
            snapshot = reader.latest_snapshot()
            if snapshot is None:
                self.wrong(self.from_seq, "", 7, "earlier rows are pruned, and there is no snapshot")
                raise LogEnds
            self.state = self._load(msgpack.unpackb(snapshot.state, strict_map_key=False))
            self.from_seq = snapshot.seq + 1
            self._seed()

    def _rows(self, reader: Reader, from_seq: int, upto: int | None = None) -> Iterator[tuple[Any, Any]]:
        """Rows with their events; every way in which a log can be unreadable becomes a problem."""
        seq = from_seq - 1
        try:
            for row in reader.read(from_seq):
                if upto is not None and row.seq > upto:
                    return
                seq = row.seq
                yield row, ev.unpack(row.body)
        except PoolsError as problem:
            self.wrong(getattr(problem, "seq", seq), "", 7, str(problem))
            raise LogEnds from None
        except (ValueError, TypeError) as problem:
            self.wrong(seq, "", 7, f"the row is no event: {problem}")
            raise LogEnds from None

    def _event(self, seq: int, at: float, event: Any) -> None:
        self._look(seq, event)
        try:
            self.state.apply(event, at)
        except Exception as problem:  # noqa: BLE001 - whatever the fold trips over, this event can't follow here
            name = type(event).__name__
            self.wrong(
                seq,
                getattr(event, "id", ""),
                7,
                f"{name} can't follow here: {type(problem).__name__} {problem}",
            )
            raise LogEnds from None
        self._applied(seq, event)

    def _compare_folds(self, reader: Reader, dumped: bytes | None) -> None:
        last, want = self.state.seq, self.digest
        loaded = self._load(_through_bytes(self.state.dump()))
        if loaded.digest() != want:
            self.wrong(last, "", 7, "the state differs once it is written out and read back")
        snapshot = reader.latest_snapshot()
        ways: list[tuple[str, Any]] = []
        if self.from_seq == 1:
            ways.append(("folding the log again", type(self.state)()))
        if dumped is not None:
            halfway = self._load(msgpack.unpackb(dumped, strict_map_key=False))
            ways.append(("going on from halfway", halfway))
        if snapshot is not None and snapshot.seq <= last:
            from_snapshot = self._load(msgpack.unpackb(snapshot.state, strict_map_key=False))
            ways.append((f"the snapshot of row {snapshot.seq} and what follows", from_snapshot))
        if not ways:
            return
        first = min(state.seq for _, state in ways) + 1
        for row, event in self._rows(reader, first, last):
            for _, state in ways:
                if state.seq + 1 == row.seq:
                    state.apply(event, row.at)
        for what, state in ways:
            if state.digest() != want:
                self.wrong(last, "", 7, f"{what} gives another state than folding it once")

    # --- what a subclass says

    def _seed(self) -> None:
        """The facts that a snapshot holds."""

    def _look(self, seq: int, event: Any) -> None:
        """Before the event is applied."""

    def _applied(self, seq: int, event: Any) -> None:
        """After it."""

    def _end(self) -> None:
        """The log was read to its end."""


def _through_bytes(dumped: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = msgpack.unpackb(msgpack.packb(dumped), strict_map_key=False)
    return found


class PoolStory(Story):
    """A pool's log. `lives`: what it says of each attempt. The count of what is held is made from the events alone."""

    state: PoolState

    def __init__(self, pool: str) -> None:
        super().__init__(pool_log(pool), PoolState(), PoolState.load)
        self.pool = pool
        self.lives: dict[Attempt, Life] = defaultdict(Life)
        self._waiting: dict[str, Held] = {}
        self._holding: dict[str, Held] = {}
        self._held: dict[str, int] = defaultdict(int)
        self._of: dict[tuple[str, str], int] = defaultdict(int)
        self._pinned_of: dict[tuple[str, str], int] = defaultdict(int)
        self._capacity: dict[str, int] = {}
        self._policies: dict[str, Mapping[str, Any]] = {}

    def _seed(self) -> None:
        state = self.state
        if state.config is not None:
            self._configured(state.config.to_wire(), [p.to_wire() for p in state.policies.values()])
        for attempt in state.attempts.values():
            held = Held(attempt.k, attempt.requester, attempt.amounts, attempt.preemptible)
            self._waiting[attempt.id] = held
            if attempt.state in HOLDING:
                self.lives[attempt.id, attempt.k].granted = attempt.grant_number
                self._hold(attempt.id, held)

    def _configured(self, config: Mapping[str, Any], policies: list[dict[str, Any]]) -> None:
        self._capacity = dict(config["capacity"])
        self._policies = {policy["requester"]: policy for policy in policies}

    def _look(self, seq: int, event: Any) -> None:
        if isinstance(event, ev.Configured):
            self._configured(event.config, event.policies)
        elif isinstance(event, ev.Queued):
            amounts = tuple((str(key), int(amount)) for key, amount in event.amounts)
            self._waiting[event.id] = Held(event.k, event.requester, amounts, event.preemptible)
            if event.id in self._holding:
                self.wrong(seq, event.id, 1, f"attempt {event.k} queues while an attempt of it holds here")
        elif isinstance(event, ev.Nominated):
            life = self.lives[event.id, event.k]
            life.nominated, life.ended = seq, 0
        elif isinstance(event, ev.Granted):
            self._granted(seq, event)
        elif isinstance(event, ev.Ended):
            self._ended(seq, event)
        elif isinstance(event, ev.BegunAnew):  # whatever stood of its grants is removed before it goes on
            for id, held in list(self._holding.items()):
                self._hold(id, held, -1)
            for life in self.lives.values():
                life.ended = life.ended or seq
            self._waiting.clear()

    def _granted(self, seq: int, event: ev.Granted) -> None:
        waiting = self._waiting.get(event.id)
        if event.id in self._holding:
            self.wrong(seq, event.id, 6, f"attempt {event.k} is granted although it holds already")
        elif waiting is None or waiting.k != event.k:
            self.wrong(seq, event.id, 6, f"attempt {event.k} is granted and never queued here")
        else:
            self._hold(event.id, waiting)
            self._within_bounds(seq, event.id, waiting)
        life = self.lives[event.id, event.k]
        life.granted, life.ended = seq, 0

    def _hold(self, id: str, held: Held, sign: int = 1) -> None:
        if sign > 0:
            self._holding[id] = held
        else:
            del self._holding[id]
        for key, amount in held.amounts:
            self._held[key] += sign * amount
            self._of[held.requester, key] += sign * amount
            if not held.preemptible:
                self._pinned_of[held.requester, key] += sign * amount

    def _within_bounds(self, seq: int, id: str, held: Held) -> None:
        """Only a grant raises what is held, so its moment is the one to look at; a change may leave more (2, 3)."""
        policy = self._policies.get(held.requester, {})
        limit, reserved = policy.get("limit", {}), policy.get("reserved", {})
        for key, amount in held.amounts:
            if key not in self._capacity or amount <= 0:
                continue
            total, own = self._held[key], self._of[held.requester, key]
            pinned = self._pinned_of[held.requester, key]
            if total > self._capacity[key]:
                self.wrong(seq, id, 2, f"{key} held {total}, capacity {self._capacity[key]}")
            if key in limit and own > limit[key]:
                self.wrong(seq, id, 3, f"requester {held.requester} holds {key} {own}, limit {limit[key]}")
            if not held.preemptible and pinned > reserved.get(key, 0):
                have = reserved.get(key, 0)
                text = f"requester {held.requester} holds non-preemptible {key} {pinned}, reserved {have}"
                self.wrong(seq, id, 3, text)

    def _ended(self, seq: int, event: ev.Ended) -> None:
        held = self._holding.get(event.id)
        if held is not None:
            if held.k != event.k:
                self.wrong(seq, event.id, 6, f"attempt {event.k} ends while attempt {held.k} holds")
            self._hold(event.id, held, -1)
        self._waiting.pop(event.id, None)
        self.lives[event.id, event.k].ended = seq

    def _applied(self, seq: int, event: Any) -> None:
        if isinstance(event, (ev.Granted, ev.Ended)):
            for key, total in self.state.usage().items():
                if total != self._held[key]:
                    self.wrong(
                        seq, event.id, 2, f"the ledger says {key} {total}, the events {self._held[key]}"
                    )


@dataclass
class Opening:
    """Attempt `k` took the place of `k - 1`, which `before` had taken ("": nobody). `heard`: how far the coordinator
    had heard `before` by the end of that turn.
    """

    id: str
    k: int
    seq: int
    before: str
    heard: int = 0


@dataclass
class CoordinatorFacts:
    """What the coordinator's log says."""

    takers: dict[Attempt, str] = field(default_factory=dict)
    told_granted: dict[Attempt, int] = field(default_factory=dict)
    openings: list[Opening] = field(default_factory=list)
    submitted: dict[str, int] = field(default_factory=dict)
    finished: dict[str, tuple[int, str]] = field(default_factory=dict)
    # attempts that started before what is left of a pruned log
    older: dict[str, int] = field(default_factory=dict)
    # pool -> the last row by which it was declared lost: its log need not show what was told before
    lost: dict[str, int] = field(default_factory=dict)


class CoordinatorStory(Story):
    """The coordinator's log: who took which attempt, what opened when, how each request ended."""

    state: CoordinatorState

    def __init__(self) -> None:
        super().__init__(COORDINATOR, CoordinatorState(), CoordinatorState.load)
        self.facts = CoordinatorFacts()
        self._k: dict[str, int] = {}
        self._pools: dict[str, tuple[str, ...]] = {}
        self._heard: dict[str, int] = {}
        # openings of the turn; a turn ends with its Peer events
        self._new: list[Opening] = []
        self._in_peers = False

    def _seed(self) -> None:
        facts = self.facts
        for request in self.state.requests.values():
            facts.submitted[request.id] = facts.older[request.id] = request.k
            self._k[request.id], self._pools[request.id] = request.k, request.pools
            if request.owner:
                facts.takers[request.id, request.k] = request.owner
            if request.phase == FINAL:
                facts.finished[request.id] = (0, request.state)
        self._heard = {name: peer.heard for name, peer in self.state.peers.items()}

    def _look(self, seq: int, event: Any) -> None:
        if isinstance(event, ev.Peer):
            self._in_peers = True
            self._heard[event.name] = event.heard
            return
        if self._in_peers:
            self._turn_over()
        id = getattr(event, "id", "")
        if id and not isinstance(
            event, (ev.Submitted, ev.Denied)
        ):  # a submission that was refused is no request
            if id not in self._k:
                self.wrong(seq, id, 6, f"{type(event).__name__} of a request that was never submitted")
                raise LogEnds
            if id in self.facts.finished:
                was = self.facts.finished[id][1]
                self.wrong(seq, id, 6, f"{type(event).__name__} after the request was {was}, which is final")
        self._note(seq, event)

    def _note(self, seq: int, event: Any) -> None:
        facts = self.facts
        if isinstance(event, ev.Submitted):
            if event.id in facts.submitted:
                self.wrong(seq, event.id, 6, "submitted twice")
            facts.submitted[event.id] = seq
            self._attempt(event.id, 1, event.pools)
            if not event.pools:
                facts.finished[event.id] = (seq, "rejected")
        elif isinstance(event, ev.Opened):
            before = facts.takers.get((event.id, self._k[event.id]), "")
            if event.k != self._k[event.id] + 1:
                self.wrong(seq, event.id, 1, f"attempt {event.k} follows attempt {self._k[event.id]}")
            opening = Opening(event.id, event.k, seq, before)
            facts.openings.append(opening)
            self._new.append(opening)
            self._attempt(event.id, event.k, event.pools)
        elif isinstance(event, ev.Taken):
            if (event.id, event.k) in facts.takers:
                self.wrong(seq, event.id, 1, f"attempt {event.k} is taken twice")
            if event.k != self._k[event.id] or event.pool not in self._pools[event.id]:
                self.wrong(
                    seq, event.id, 1, f"attempt {event.k} is taken by {event.pool}, where it is not open"
                )
            facts.takers[event.id, event.k] = event.pool
        elif isinstance(event, ev.Told):
            if event.state in ("granted", "placed", "preempting"):
                facts.told_granted.setdefault((event.id, event.k), seq)
        elif isinstance(event, ev.DeclaredLost):
            facts.lost[event.pool] = seq
            self._heard.pop(event.pool, None)
        elif isinstance(event, ev.Finished):
            facts.finished.setdefault(event.id, (seq, event.state))

    def _attempt(self, id: str, k: int, pools: list[str]) -> None:
        self._k[id], self._pools[id] = k, tuple(pools)
        if len(pools) == 1:
            self.facts.takers[id, k] = pools[0]

    def _turn_over(self) -> None:
        self._in_peers = False
        for opening in self._new:
            opening.heard = self._heard.get(opening.before, 0)
        self._new = []

    def _end(self) -> None:
        self._turn_over()
        for id, request in self.state.requests.items():
            told = self.facts.finished.get(id)
            if (request.phase == FINAL) != (told is not None):
                self.wrong(self.state.seq, id, 6, f"is {request.shown}, its events say {told}")
