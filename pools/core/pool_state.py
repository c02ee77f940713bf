"""The state of a pool: a fold over its log. `apply` is the only thing that changes it.

Durable: the configuration, the attempts, how far the coordinator's stream was heard. Derived from these and kept beside
them: the ledger, the queue, the holders. What is soft (deadlines, bids) is not here but in `pool.py`.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import msgpack

from ray_pools.core import quota
from ray_pools.core import records as ev
from ray_pools.core.config_rules import OPEN, PolicyConfig, PoolConfig
from ray_pools.core.queue import (
    ENDED,
    ENDING,
    GRANTED,
    HOLDING,
    NOMINATED,
    PREEMPTING,
    QUEUED,
    Attempt,
    Grants,
    Kind,
    WaitQueue,
)


class PoolState:
    """See the module's docstring. Attributes are read by all, and written by `apply` alone."""

    def __init__(self) -> None:
        self.seq = 0
        # the core's time of the newest event; it never runs backwards
        self.clock = 0.0
        self.version = 0
        self.config: PoolConfig | None = None
        self.uid = ""
        self.policies: dict[str, PolicyConfig] = {}
        # what waits or holds here; an attempt that ended moves to `ended` until the coordinator has heard of it
        self.attempts: dict[str, Attempt] = {}
        self.ended: dict[str, Attempt] = {}
        self.peer = ev.Peer("coordinator", 0, 0, 0, 0)
        # --- derived
        self.ledger = quota.Ledger()
        self.queue = WaitQueue()
        self.nominated: dict[str, Attempt] = {}
        # per requester its preemptible grants that are not being preempted, oldest first
        self.holders: dict[str, Grants] = {}
        # attempts that the pool gave back for a while (provisioning failed): they wait for `not_before`
        self.paused: dict[str, Attempt] = {}
        self.preempting: dict[str, Attempt] = {}
        # requesters that borrow and have grants to be preempted, with their priority; kept by `lowest_borrower`
        self.borrowers: dict[str, float] = {}
        self._lowest = float("inf")
        # requesters whose use changed since
        self._used: set[str] = set()

    # --- reading

    @property
    def capacity(self) -> dict[str, int]:
        """Per metered key the total."""
        return dict(self.config.capacity) if self.config else {}

    @property
    def is_open(self) -> bool:
        """It grants; else it is cordoned or draining (section 9)."""
        return self.config is not None and self.config.state == OPEN

    @property
    def places(self) -> bool:
        """Grants are placement groups here; else they only count."""
        return bool(self.config and self.config.placement)

    def usage(self) -> dict[str, int]:
        """Per metered key what is held (docs/rules.md section 4)."""
        return {key: self.ledger.held[key] for key in sorted(self.capacity)}

    def need(self, attempt: Attempt) -> quota.Need:
        """The attempt's metered keys with the policy's numbers."""
        policy = self.policies.get(attempt.requester)
        return quota.need_of(attempt.amounts, self.config.capacity if self.config else {}, policy)

    def in_share(self, attempt: Attempt) -> bool:
        """All of it fits in its requester's headroom (section 4); a nominated one leaves itself out."""
        return attempt.requester in self.policies and self.ledger.in_share(
            self.need(attempt),
            self.ledger.uses[attempt.requester],
            attempt.preemptible,
            nominated=attempt.state == NOMINATED,
        )

    def in_order(self) -> list[Attempt]:
        """All that waits here, in the order of the queue (docs/rules.md section 5)."""
        return self.sort(self.waiting())

    def sort(self, waiting: Iterable[Attempt]) -> list[Attempt]:
        """These waiters, in that order."""
        keyed = []
        for attempt in waiting:
            policy = self.policies.get(attempt.requester)
            named, share = attempt.state == NOMINATED, self.in_share(attempt)
            keyed.append(((not named, not share, -(policy.priority if policy else 0), attempt.age), attempt))
        keyed.sort(key=lambda pair: pair[0])
        return [attempt for _, attempt in keyed]

    def waiting(self) -> Iterator[Attempt]:
        """All that waits here, in no order."""
        return (a for a in self.attempts.values() if a.state in (QUEUED, NOMINATED))

    def impossible_nomination(self) -> Attempt | None:
        """The last submitted of the nominations that no end of a grant can fulfil (section 6), if there are any.

        The pool grants nothing any more; or they ask for a key that is booked beyond capacity; or together they are
        more than their requester's limit (or, non-preemptible ones, than its share), so that each would wait for the
        other for ever.
        """
        over = {key for key, total in self.capacity.items() if self.ledger.booked[key] > total}
        together: dict[str, quota.Use] = defaultdict(quota.Use)
        for attempt in self.nominated.values():
            use = together[attempt.requester]
            for key, amount in attempt.amounts:
                use.claimed[key] += amount
                use.pinned[key] += 0 if attempt.preemptible else amount
        found = [
            a
            for a in self.nominated.values()
            for use in (together[a.requester],)
            if not self.is_open
            or any(
                key in over
                or use.claimed[key] - amount > limit_room
                or (not a.preemptible and use.pinned[key] - amount > share_room)
                for key, amount, _, limit_room, share_room in self.need(a)
            )
        ]
        return max(found, key=lambda a: a.age, default=None)

    def attempt(self, id: str) -> Attempt | None:
        """The newest attempt of a request here, ended or not."""
        return self.attempts.get(id) or self.ended.get(id)

    # --- the fold

    def apply(self, event: Any, at: float) -> None:
        """One event of the log, which became durable with the core's time `at`."""
        self.seq += 1
        self.clock = max(self.clock, at)
        _APPLY[type(event)](self, event, at)

    def _configured(self, event: ev.Configured, at: float) -> None:
        self.version = event.version
        self.config = PoolConfig.from_wire(event.config)
        self.uid = event.uid
        self.policies = {p["requester"]: PolicyConfig.from_wire(p) for p in event.policies}
        self.refit()

    def refit(self) -> None:
        """Every kind of waiter is judged by the configuration as it is now."""
        self.queue.refit(self.policies, self.config.capacity if self.config else {}, self.ledger)
        self.borrowers.clear()
        self._used.update(self.holders)

    def _queued(self, event: ev.Queued, at: float) -> None:
        attempt = Attempt(event.id, event.k)
        attempt.state = QUEUED
        attempt.owned = event.owned
        attempt.requester = event.requester
        attempt.amounts = tuple((key, amount) for key, amount in event.amounts)
        attempt.preemptible = event.preemptible
        attempt.age = event.age
        attempt.submitted_at = event.submitted_at
        attempt.not_before = event.not_before
        attempt.options = event.options
        self.ended.pop(event.id, None)
        self.attempts[event.id] = attempt
        if attempt.not_before > at:
            self.paused[event.id] = attempt
        else:
            self.join_queue(attempt)

    def join_queue(self, attempt: Attempt) -> Kind:
        """The attempt stands among the waiters that a walk looks at."""
        kind = self.queue.add(attempt)
        if kind.need is None and attempt.requester in self.policies:
            capacity = self.config.capacity if self.config else {}
            self.queue.fit(kind, self.policies[attempt.requester], capacity, self.ledger)
        return kind

    def _touch(self, requester: str) -> None:
        """What the requester uses changed."""
        self.queue.touch(requester)
        self._used.add(requester)

    def promise(self, attempt: Attempt, sign: int = 1) -> None:
        """Room that a bid promises is booked, and counts as held for all others (soft: no event says so)."""
        self.ledger.book(attempt.requester, attempt.amounts, attempt.preemptible, sign)
        self.ledger.promise(attempt.amounts, sign)
        self._touch(attempt.requester)

    def lowest_borrower(self) -> tuple[float, int]:
        """The lowest priority among requesters whose grants could be victims at all, and how many these are.

        They have preemptible grants and use more than their share of some key: nobody else is ever a candidate,
        but for a request's own requester (section 6).
        """
        if self._used:
            capacity = self.config.capacity if self.config else {}
            for requester in self._used:
                self.borrowers.pop(requester, None)
                if requester in self.holders:
                    policy, use = self.policies.get(requester), self.ledger.uses[requester]
                    if self.ledger.borrows(use, policy.reserved if policy else {}, capacity):
                        self.borrowers[requester] = policy.priority if policy else quota.BELOW_ALL
            self._used.clear()
            self._lowest = min(self.borrowers.values(), default=float("inf"))
        return self._lowest, len(self.borrowers)

    def _leave_queue(self, attempt: Attempt) -> None:
        self.queue.remove(attempt)
        self.paused.pop(attempt.id, None)

    def _granted(self, event: ev.Granted, at: float) -> None:
        attempt = self.attempts[event.id]
        if attempt.state == NOMINATED:
            del self.nominated[event.id]
        else:
            self._leave_queue(attempt)
            self.ledger.book(attempt.requester, attempt.amounts, attempt.preemptible)
            self._touch(attempt.requester)
        self.ledger.hold(attempt.amounts, attempt.preemptible)
        self._used.add(attempt.requester)
        attempt.state = GRANTED
        attempt.owned = True
        attempt.granted_at = at
        attempt.grant_number = attempt.notice_seq = self.seq
        attempt.placed = None if self.places else {}
        if attempt.preemptible:
            self._hold(attempt)

    def _placed(self, event: ev.Placed, at: float) -> None:
        attempt = self.attempts[event.id]
        attempt.placed = event.detail
        attempt.notice_seq = self.seq

    def _nominated(self, event: ev.Nominated, at: float) -> None:
        for id, _ in event.victims:
            victim = self.attempts[id]
            self._unbook(victim)
            victim.state = PREEMPTING
            victim.notice_seq = self.seq
            self.preempting[id] = victim
        attempt = self.attempts[event.id]
        self._leave_queue(attempt)
        self.ledger.book(attempt.requester, attempt.amounts, attempt.preemptible)
        self._touch(attempt.requester)
        attempt.state = NOMINATED
        attempt.owned = True
        attempt.notice_seq = self.seq
        self.nominated[event.id] = attempt

    def _evicted(self, event: ev.Evicted, at: float) -> None:
        attempt = self.attempts[event.id]
        self._unbook(attempt)
        attempt.state = PREEMPTING
        attempt.notice_seq = self.seq
        self.preempting[event.id] = attempt

    def _hold(self, attempt: Attempt) -> None:
        grants = self.holders.get(attempt.requester)
        if grants is None:
            grants = self.holders[attempt.requester] = Grants(attempt.requester)
        grants.add(attempt)

    def _unbook(self, attempt: Attempt) -> None:
        self.ledger.unbook(attempt.requester, attempt.amounts)
        self._touch(attempt.requester)
        if attempt.preemptible:
            grants = self.holders[attempt.requester]
            grants.discard(attempt)
            if not grants:
                del self.holders[attempt.requester]

    def _ending(self, event: ev.Ending, at: float) -> None:
        attempt = self.attempts[event.id]
        if attempt.state == GRANTED:
            self._unbook(attempt)
        self.preempting.pop(event.id, None)
        attempt.state = ENDING
        attempt.ended_as, attempt.why = event.how, event.why

    def _ended(self, event: ev.Ended, at: float) -> None:
        attempt = self.attempts.pop(event.id, None)
        if attempt is None or attempt.k < event.k:
            if attempt is not None:
                self._leave(attempt)
            attempt = Attempt(event.id, event.k)
        else:
            self._leave(attempt)
        attempt.state = ENDED
        attempt.ended_as, attempt.why = event.how, event.why
        attempt.notice_seq = self.seq
        self.ended.pop(event.id, None)
        self.ended[event.id] = attempt

    def _leave(self, attempt: Attempt) -> None:
        """Whatever the attempt waited for or held is given up."""
        if attempt.state in HOLDING:
            if attempt.state == GRANTED:
                self._unbook(attempt)
            self.preempting.pop(attempt.id, None)
            self.ledger.vacate(attempt.requester, attempt.amounts, attempt.preemptible)
            self._touch(attempt.requester)
        elif attempt.state == NOMINATED:
            del self.nominated[attempt.id]
            self.ledger.book(attempt.requester, attempt.amounts, attempt.preemptible, -1)
            self._touch(attempt.requester)
        else:
            self._leave_queue(attempt)

    def _begun_anew(self, event: ev.BegunAnew, at: float) -> None:
        seq, clock = self.seq, self.clock
        self.__init__()  # type: ignore[misc]  # nothing of what was there is left
        self.seq, self.clock, self.uid = seq, clock, event.uid
        self.peer = ev.Peer("coordinator", event.epoch, event.head, 0, 0)

    def _peer(self, event: ev.Peer, at: float) -> None:
        self.peer = event
        ended = self.ended
        while ended:
            id, oldest = next(iter(ended.items()))
            if oldest.notice_seq > event.acked:
                break
            del ended[id]

    # --- the whole of it, as bytes

    def dump(self) -> dict[str, Any]:
        """The durable state as plain values, in an order that depends on nothing but the log."""
        dumped: dict[str, Any] = {
            "seq": self.seq,
            "clock": self.clock,
            "version": self.version,
            "config": self.config.to_wire() if self.config else None,
            "uid": self.uid,
            "policies": [self.policies[r].to_wire() for r in sorted(self.policies)],
            "peer": list(self.peer),
            "attempts": [_dump(self.attempts[id]) for id in sorted(self.attempts)],
            "ended": [_dump(a) for a in self.ended.values()],
        }
        dumped["layout"] = {"keys": sorted(dumped), "fields": _FIELDS}
        return dumped

    @classmethod
    def load(cls, dumped: dict[str, Any]) -> PoolState:
        """The state that `dump` wrote, with all that is derived from it. UnknownSnapshot if other code wrote it."""
        state = cls()
        ev.check_layout(dumped, state.dump())
        state.seq, state.clock, state.version = dumped["seq"], dumped["clock"], dumped["version"]
        state.uid = dumped["uid"]
        if dumped["config"]:
            state.config = PoolConfig.from_wire(dumped["config"])
        state.policies = {p["requester"]: PolicyConfig.from_wire(p) for p in dumped["policies"]}
        state.peer = ev.Peer(*dumped["peer"])
        for fields in dumped["ended"]:
            attempt = _load(fields)
            state.ended[attempt.id] = attempt
        for attempt in sorted(map(_load, dumped["attempts"]), key=lambda a: (a.grant_number, a.id)):
            state.attempts[attempt.id] = attempt
            state._settle_in(attempt)
        state.refit()
        return state

    def _settle_in(self, attempt: Attempt) -> None:
        """What the ledger, the queue and the holders know of an attempt that comes out of a snapshot."""
        if attempt.state == QUEUED:
            if attempt.not_before > self.clock:
                self.paused[attempt.id] = attempt
            else:
                self.join_queue(attempt)
            return
        self.ledger.book(attempt.requester, attempt.amounts, attempt.preemptible)
        if attempt.state == NOMINATED:
            self.nominated[attempt.id] = attempt
            return
        self.ledger.hold(attempt.amounts, attempt.preemptible)
        self._used.add(attempt.requester)
        if attempt.preemptible:
            self._hold(attempt)
        if attempt.state in (PREEMPTING, ENDING):
            self._unbook(attempt)
        if attempt.state == PREEMPTING:
            self.preempting[attempt.id] = attempt

    def digest(self) -> str:
        """A hash of the durable state: equal logs give equal digests (docs/rules.md section 10.7)."""
        return hashlib.blake2b(msgpack.packb(self.dump()), digest_size=16).hexdigest()


_FIELDS = sorted(set(Attempt.__slots__) - {"entry", "amounts"})


def _dump(attempt: Attempt) -> list[Any]:
    return [[list(pair) for pair in attempt.amounts], *(getattr(attempt, name) for name in _FIELDS)]


def _load(fields: list[Any]) -> Attempt:
    attempt = Attempt("", 0)
    for name, value in zip(_FIELDS, fields[1:], strict=True):
        setattr(attempt, name, value)
    attempt.amounts = tuple((key, amount) for key, amount in fields[0])
    return attempt


_APPLY: dict[type[Any], Any] = {
    ev.Configured: PoolState._configured,
    ev.Queued: PoolState._queued,
    ev.Granted: PoolState._granted,
    ev.Placed: PoolState._placed,
    ev.Nominated: PoolState._nominated,
    ev.Evicted: PoolState._evicted,
    ev.Ending: PoolState._ending,
    ev.Ended: PoolState._ended,
    ev.Peer: PoolState._peer,
    ev.BegunAnew: PoolState._begun_anew,
}
