"""What the explorer must catch: each rule of docs/protocol.md left out of the real core, by a method put in its place.

Each mutant comes with a small configuration in which it is caught, and with a word of the violation it must be caught
by. Some are of the turn and the log, not of a core: `explorer.py` asks for them by name (`*-early`, `*-not-fenced`).
Three rules are doubly kept in the project: what a mutant leaves out is then also weakened where it is kept otherwise:
  * `cut`: a turn's events become durable one by one (R4, R5: the log appends a turn as a whole);
  * `weak`: pools take directives in any order and stale ones too, and forget no end (an ended attempt that is enqueued
    again: the numbers of the link keep the old directive out).
The core itself must hold in the same configurations, which `test_explorer.py` sees to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest import mock

import explorer_cores

from ray_pools.core import coordinator as coordinator_module
from ray_pools.core import lost, pool_state
from ray_pools.core import records as ev
from ray_pools.core.coordinator import Coordinator
from ray_pools.core.coordinator_state import CoordinatorState
from ray_pools.core.link import Link, Message
from ray_pools.core.pool import Pool
from ray_pools.core.pool_state import PoolState
from ray_pools.core.queue import ENDED, GRANTED, NOMINATED, PREEMPTING, QUEUED, Attempt
from ray_pools.core.requests import OPEN, TAKEN, Request

# (class, method, what takes its place)
Patch = tuple[Any, str, Callable[..., Any]]


class Mutant(NamedTuple):
    """A rule left out: where it is caught, and by what."""

    name: str
    configuration: str
    caught_by: str
    patches: tuple[Patch, ...] = ()


# ---------------------------------------------------------------- named in the protocol, one by one


def _grants_without_taken(self: Pool, attempt: Attempt) -> None:
    self.start(attempt, None)


_admit_anew = Coordinator._admit_anew


def _opens_early(self: Coordinator) -> None:
    for request in list(self.state.waiting_or_holding.values()):
        pools, _ = self.state.admit(request.requester, request.positive, request.preemptible)
        if request.phase == TAKEN and not request.told and not request.asked and pools != (request.owner,):
            self._reopen(request, request.retries)
    _admit_anew(self)


_enqueue = Pool._enqueue


def _enqueues_what_ended(self: Pool, id: str, k: int, owned: bool, fields: list[Any]) -> None:
    attempt = self.state.attempt(id)
    if attempt is not None and (attempt.k, attempt.state) == (k, ENDED):
        self._emit(ev.Queued(id, k, owned, *fields))
        if not owned:
            self._unanswered[id] = self.state.attempts[id]
    else:
        _enqueue(self, id, k, owned, fields)


_close = Pool._close


def _keeps_the_booking(self: Pool, id: str, k: int) -> None:
    attempt = self._current(id, k)
    if attempt is not None and (attempt.k, attempt.state) == (k, QUEUED) and id in self.promised:
        del self.promised[id]
        self.bids.pop(id, None)
        self.bids_due.pop(id, None)
        self._emit(ev.Ended(id, k, "withdrawn", ""), id)
    else:
        _close(self, id, k)


_attempt_ended = Coordinator._attempt_ended


def _opens_after_a_cancel(self: Coordinator, request: Request, how: str, why: str) -> None:
    if request.asked and how in ("returned", "withdrawn", "stopped"):
        self._reopen(request, request.retries)
    else:
        _attempt_ended(self, request, how, why)


_asked = Pool._asked


def _gives_back_grants(self: Pool, id: str, k: int, what: str) -> None:
    attempt = self.state.attempt(id)
    if what == "give" and attempt is not None and (attempt.k, attempt.state) == (k, GRANTED):
        self._end(attempt, "returned", "another pool opened")
    else:
        _asked(self, id, k, what)


# ---------------------------------------------------------------- the seven rules


def _closes_what_it_knows(self: Pool, id: str, k: int) -> None:
    if self.state.attempt(id) is not None:
        _close(self, id, k)


def _asks_what_it_knows(self: Pool, id: str, k: int, what: str) -> None:
    if self.state.attempt(id) is not None:
        _asked(self, id, k, what)


def _hears_old_bids(self: Coordinator, pool: str, message: Message) -> None:
    for _, id, k, answer, in_share in message.bids:
        request = self.state.requests.get(id)
        if request is not None and request.phase == OPEN and request.k == k and pool in request.pools:
            request.answers[pool] = (answer, in_share)
            self.decide(request)
    epoch, newest = self.bids_seen.get(pool, (0, 0))
    newest = newest if message.epoch == epoch else 0
    self.bids_seen[pool] = (message.epoch, max(newest, message.bids_upto))


_exchange = Pool.exchange


def _says_bids_once(self: Pool, message: Message) -> None:
    due, is_new_run = dict(self.bids_due), message.epoch > self.link.epoch
    _exchange(self, message)
    if is_new_run:
        self.bids_due = {id: n for id, n in due.items() if id in self.bids and self.bids[id].number == n}


_start = Pool.start


def _nominates_in_two_events(self: Pool, attempt: Attempt, victims: list[Attempt] | None) -> None:
    if victims is None:
        _start(self, attempt, None)
        return
    self._emit(ev.Nominated(attempt.id, attempt.k, []), attempt.id)
    pairs = [[victim.id, victim.k] for victim in victims]
    self._emit(ev.Nominated(attempt.id, attempt.k, pairs), *(victim.id for victim in victims))
    for victim in victims:
        self.deadlines[victim.id] = self.now + (self.state.config.grace_s if self.state.config else 0.0)


_nominated = PoolState._nominated


def _folds_two_nominated(self: PoolState, event: ev.Nominated, at: float) -> None:
    if self.attempts[event.id].state != NOMINATED:
        _nominated(self, event, at)
        return
    for id, _ in event.victims:
        victim = self.attempts[id]
        self._unbook(victim)
        victim.state, victim.notice_seq = PREEMPTING, self.seq
        self.preempting[id] = victim


_begin = CoordinatorState._begin
_submit = Coordinator.submit
_reopen = Coordinator._reopen


def _begins_open(self: CoordinatorState, request: Request) -> None:
    _begin(self, request)
    request.phase, request.owner = OPEN, ""


def _take_the_only_pool(self: Coordinator, request: Request) -> None:
    if request.phase == OPEN and len(request.pools) == 1:
        self._emit_for(request, ev.Taken(request.id, request.k, request.pools[0]))


def _submits_in_two_events(self: Coordinator, id: str, *args: Any, **options: Any) -> Request:
    request = _submit(self, id, *args, **options)
    _take_the_only_pool(self, request)
    return request


def _reopens_in_two_events(self: Coordinator, request: Request, retries: int, paused: str = "") -> None:
    _reopen(self, request, retries, paused)
    _take_the_only_pool(self, request)


def _ends_before_it_opens(self: Coordinator, request: Request, how: str, why: str) -> None:
    """First that the attempt is over and heard of, then what comes next."""
    link = self.links[request.owner]
    self._emit_for(request, ev.Told(request.id, request.k, "ended", {"how": how, "why": why}))
    self._emit(ev.Peer(request.owner, link.epoch, link.head, link.heard, link.acked))
    _attempt_ended(self, request, how, why)


def _leaves_it_without_pools(self: Coordinator) -> None:
    lost = []
    for request in self.state.waiting_or_holding.values():
        pools, _ = self.state.admit(request.requester, request.positive, request.preemptible)
        if request.phase == OPEN and not pools:
            lost.append(request)
    for request in lost:
        del self.state.waiting_or_holding[request.id]
    _admit_anew(self)
    for request in lost:
        self.state.waiting_or_holding[request.id] = request


_current = Pool._current


def _keeps_lower_attempts(self: Pool, id: str, k: int) -> Attempt | None:
    attempt = self.state.attempt(id)
    if attempt is not None and attempt.k < k and attempt.state == QUEUED:
        return None
    return _current(self, id, k)


# ---------------------------------------------------------------- a pool that is declared lost

_declare_lost = explorer_cores.declare_lost


def _opens_before_the_new_pool_says_so(core: Coordinator, pool: str, operator: str, id: str) -> int:
    version = _declare_lost(core, pool, operator, id)
    for request in list(core.state.waiting_or_holding.values()):
        if request.phase == TAKEN and request.owner == pool:
            core._attempt_ended(request, "returned", "")
    return version


# ---------------------------------------------------------------- links

_receive = Link.receive


def _takes_old_items(self: Link, message: Message, asked_in: int = 0) -> list[list[Any]]:
    _receive(self, message._replace(items=[]))
    return message.items


# ---------------------------------------------------------------- all of them

_IN_TWO = ((Coordinator, "submit", _submits_in_two_events), (Coordinator, "_reopen", _reopens_in_two_events))

MUTANTS = [
    Mutant("coordinator-early", "AB 11 crash=1", "lost"),
    Mutant("pool-early", "AB 11 crash=1", "not in A's log"),
    Mutant("coordinator-not-fenced", "AB 11 split=1", "lost"),
    Mutant("pool-not-fenced", "A,A 1 split=1", "not in A's log"),
    Mutant("grant-without-taken", "AB 11", "without Taken", ((Pool, "_promise", _grants_without_taken),)),
    Mutant("open-early", "A>B 11 attach=1", "without Taken", ((Coordinator, "_admit_anew", _opens_early),)),
    Mutant(
        "ended-enqueued",
        "A>B 11 attach=1 weak=1",
        "without Taken",
        ((Pool, "_enqueue", _enqueues_what_ended),),
    ),
    Mutant("booking-kept", "AB,A 11", "kept and summed", ((Pool, "_close", _keeps_the_booking),)),
    Mutant(
        "cancel-not-fencing",
        "A,A 1 cancel=1",
        "was asked for",
        ((Coordinator, "_attempt_ended", _opens_after_a_cancel),),
    ),
    Mutant("grant-given-back", "A>B 11 attach=1", "was held", ((Pool, "_asked", _gives_back_grants),)),
    Mutant(
        "R1",
        "A 1 cancel=1",
        "stuck",
        ((Pool, "_close", _closes_what_it_knows), (Pool, "_asked", _asks_what_it_knows)),
    ),
    Mutant("R2", "B!,A,BA 11", "stuck", ((Coordinator, "_bids", _hears_old_bids),)),
    Mutant("R3", "A!,AB 11 crash=1", "stuck", ((Pool, "exchange", _says_bids_once),)),
    Mutant(
        "R4",
        "A-,A+ 1 crash=1 cut=1",
        "booked 2",
        ((Pool, "start", _nominates_in_two_events), (PoolState, "_nominated", _folds_two_nominated)),
    ),
    Mutant(
        "R5-taken",
        "A 1 crash=1 cut=1",
        "without Taken",
        ((CoordinatorState, "_begin", _begins_open), *_IN_TWO),
    ),
    Mutant(
        "R5-opened",
        "A>B 11 crash=1 attach=1 cut=1",
        "stuck",
        ((Coordinator, "_attempt_ended", _ends_before_it_opens),),
    ),
    Mutant("R6", "AB 11 expel=1", "stuck", ((Coordinator, "_admit_anew", _leaves_it_without_pools),)),
    Mutant("R7", "AB 11 delete=1", "stuck", ((Pool, "_current", _keeps_lower_attempts),)),
    Mutant(
        "declared-same-uid",
        "AB 11 declare=1",
        "stuck",
        ((lost, "uid_anew", lambda uid, version: uid),),
    ),
    Mutant(
        "declared-opens-early",
        "AB 11 declare=1",
        "without Taken",
        ((explorer_cores, "declare_lost", _opens_before_the_new_pool_says_so),),
    ),
    Mutant(
        "declared-old-word",
        "A- 1 declare=1 cancel=1 crash=1",
        "stuck",
        ((Pool, "_is_newer", lambda self, message: True),),
    ),
    Mutant("link-old-items", "A,A 1", "was held", ((Link, "receive", _takes_old_items),)),
]

_BY_NAME = {mutant.name: mutant for mutant in MUTANTS}

# folds are looked up in these, by event
_FOLDS = {
    (PoolState, "_nominated"): (pool_state._APPLY, ev.Nominated),
    (PoolState, "_peer"): (pool_state._APPLY, ev.Peer),
}


def _weak_receive(self: Link, message: Message, asked_in: int = 0) -> list[list[Any]]:
    """At a pool: nothing is too old, and nothing is missing."""
    fresh = _receive(self, message)
    return message.items if self.peer == "coordinator" else fresh


def _remembers_ends(self: PoolState, event: ev.Peer, at: float) -> None:
    self.peer = event


_WEAK: tuple[Patch, ...] = ((Link, "receive", _weak_receive), (PoolState, "_peer", _remembers_ends))


def revives(name: str, message: Message) -> bool:
    """With this mutant even old messages of this sort matter."""
    return (name == "R2" and bool(message.bids)) or (name == "link-old-items" and bool(message.items))


@contextmanager
def applied(name: str, *, weak: bool = False) -> Iterator[None]:
    """The core with a mutant in it (none: ""), and with weak links."""
    patches = (_BY_NAME[name].patches if name else ()) + (_WEAK if weak else ())
    with ExitStack() as stack:
        # a grant that was given back comes again at once: time stands still here
        stack.enter_context(mock.patch.object(coordinator_module, "PAUSE_FIRST_S", 0.0))
        for owner, method, new in patches:
            stack.enter_context(mock.patch.object(owner, method, new))
            if (owner, method) in _FOLDS:
                folds, event = _FOLDS[owner, method]
                stack.enter_context(mock.patch.dict(folds, {event: new}))
        yield


def table() -> str:
    """All mutants, as configurations."""
    return " / ".join(f"{mutant.configuration} mutant={mutant.name}" for mutant in MUTANTS)
