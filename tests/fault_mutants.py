"""What is broken on purpose, by name, to see that `fault_simulation` notices.

Mutants of the processes (`reply before sync`, `log not fenced`) are read by them; the others take a method of the core
away for the time of a day.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from ray_pools.core import lost
from ray_pools.core import records as ev
from ray_pools.core.coordinator import Coordinator
from ray_pools.core.coordinator_state import CoordinatorState
from ray_pools.core.link import Link, Message
from ray_pools.core.pool import Pool
from ray_pools.core.queue import GRANTED, QUEUED

Patch = tuple[Any, str, Callable[..., Any]]


def _grant_unasked(self: Pool, attempt: Any) -> None:
    self.start(attempt, None)


def _keep_booking(self: Pool, id: str) -> None:
    attempt = self.promised.pop(id, None)
    if attempt is not None:
        self.state.join_queue(attempt)
    self.bids.pop(id, None)
    self.bids_due.pop(id, None)
    self._unanswered.pop(id, None)


_asked_before = CoordinatorState._asked


def _asked_unfenced(self: CoordinatorState, event: ev.Asked, at: float) -> None:
    _asked_before(self, event, at)
    self.requests[event.id].asked = ""


_close_before, _pool_asked_before = Pool._close, Pool._asked


def _close_known(self: Pool, id: str, k: int) -> None:
    if self.state.attempt(id) is not None:
        _close_before(self, id, k)


def _ask_known(self: Pool, id: str, k: int, what: str) -> None:
    if self.state.attempt(id) is not None:
        _pool_asked_before(self, id, k, what)


_bids_before = Coordinator._bids


def _any_bid(self: Coordinator, pool: str, message: Message) -> None:
    self.bids_seen[pool] = (message.epoch, 0)
    _bids_before(self, pool, message)


_exchange_before = Pool.exchange


def _said_once(self: Pool, message: Message) -> None:
    """Bids that some run of the coordinator has acknowledged are not said again."""
    due = set(self.bids_due)
    known = set(self.bids)
    _exchange_before(self, message)
    self.bids_due = {id: n for id, n in self.bids_due.items() if id in due or id not in known}


def _current_lower_stays(self: Pool, id: str, k: int) -> Any:
    attempt = self.state.attempt(id)
    if attempt is not None and attempt.k < k:
        return None
    return attempt


def _receive_gaps(self: Link, message: Message, asked_in: int = 0) -> list[list[Any]]:
    return _receive_before(self, message._replace(after=0))


_receive_before = Link.receive


_check_before = Link.check


def _check_zombies(self: Link, message: Message, asked_in: int = 0) -> None:
    _check_before(self, message._replace(epoch=max(message.epoch, self.epoch)))


def _check_nothing_shorter(self: Link, message: Message, asked_in: int = 0) -> None:
    _check_before(self, message._replace(opened=max(message.opened, self.head)))


def _give_grants_back(self: Pool, id: str, k: int, what: str) -> None:
    attempt = self.state.attempts.get(id)
    if what == "give" and attempt is not None and attempt.k == k and attempt.state == GRANTED:
        self._finish(attempt, "returned", "another pool opened")
        return
    _pool_asked_before(self, id, k, what)


def _reopen_at_once(self: Coordinator, request: Any) -> None:
    """A cancel takes what is taken for open: the next attempt does not wait for the end of the one before."""
    pools, _ = self.state.admit(request.requester, request.positive, request.preemptible)
    if pools and request.told == "preempting" and request.retries and not request.asked:
        self._emit_for(
            request, ev.Opened(request.id, request.k + 1, list(pools), {}, {}, request.retries - 1)
        )


_take_before = Pool._take


def _take_any(self: Pool, id: str, k: int, fields: list[Any]) -> None:
    """What it can no longer run is granted all the same, for it was bid."""
    attempt = self._current(id, k)
    if attempt is not None and attempt.k == k and attempt.state == QUEUED:
        self._forget_bid(id)
        self.start(attempt, None)
        return
    _take_before(self, id, k, fields)


_patches: dict[str, list[Patch]] = {
    "grant without Taken": [(Pool, "_promise", _grant_unasked)],
    "booking not undone on close": [(Pool, "_forget_bid", _keep_booking)],
    "cancel does not fence": [],
    "k+1 opens before k has ended": [(Coordinator, "stopped", _reopen_at_once)],
    "granted attempt given back": [(Pool, "_asked", _give_grants_back)],
    "taken is granted unjudged": [(Pool, "_take", _take_any)],
    "R1": [(Pool, "_close", _close_known), (Pool, "_asked", _ask_known)],
    "R2": [(Coordinator, "_bids", _any_bid)],
    "R3": [(Pool, "exchange", _said_once)],
    "R7": [(Pool, "_current", _current_lower_stays)],
    "link gap check off": [(Link, "receive", _receive_gaps)],
    "a lost pool keeps its uid": [(lost, "uid_anew", lambda uid, version: uid)],
    "a shorter log is heard": [(Link, "check", _check_nothing_shorter)],
    "zombies are heard": [(Link, "check", _check_zombies)],
}

MUTANTS = ("reply before sync", "log not fenced", "groups of a lost pool stay", *_patches)


@contextmanager
def applied(mutant: str) -> Iterator[None]:
    """The core is broken so until the end of the block."""
    patches = [mock.patch.object(cls, name, new) for cls, name, new in _patches.get(mutant, [])]
    if mutant == "cancel does not fence":
        from ray_pools.core import coordinator_state

        patches.append(mock.patch.dict(coordinator_state._APPLY, {ev.Asked: _asked_unfenced}))
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in patches:
            patch.stop()
