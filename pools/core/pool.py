"""A pool: what it does with what it is told, and the walk over its queue.

Commands come in (`exchange`, `tick`, `placed`, `unplaced`, `gone`), events and effects go out (`take_step`). Nothing
here waits, sends or knows the time: the shell around it appends the events, then runs the effects and sends what
`outgoing` gives. Soft state lives here and dies with the process: deadlines of victims and bids (docs/protocol.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from ray_pools.core import records as ev
from ray_pools.core import walk
from ray_pools.core.link import Link, Message, StalePeer, is_made_anew
from ray_pools.core.outgoing import news_of
from ray_pools.core.pool_state import PoolState
from ray_pools.core.queue import ENDED, ENDING, GRANTED, NOMINATED, PREEMPTING, QUEUED, Attempt
from ray_pools.core.walk import NO, PREEMPT, ROOM

# A peer event is logged alone, without other events of the turn, only when this much was heard since the last.
_PEER_EVERY = 1000


class Place(NamedTuple):
    """Effect: make the grant's placement group, or find it by its name."""

    id: str
    k: int
    amounts: dict[str, int]
    options: dict[str, Any]


class Unplace(NamedTuple):
    """Effect: remove the grant's placement group and say `gone`."""

    id: str
    k: int


class BeginAnew(NamedTuple):
    """Effect: what stands of this pool's grants is removed before anything is granted again."""


class Bid(NamedTuple):
    """What the pool answered for an attempt that it was not yet told to run."""

    number: int
    k: int
    answer: str
    in_share: bool


class Step(NamedTuple):
    """What a turn brought: events to append, then effects to run."""

    events: list[Any]
    effects: list[Any]


class Pool:
    """One pool's core. `state` is the fold; `epoch` the one in which its log was opened."""

    def __init__(self, name: str, state: PoolState, epoch: int, now: float) -> None:
        self.name = name
        self.state = state
        self.epoch = epoch
        self.now = max(now, state.clock)
        # how long the log was when this run opened it
        self.opened = state.seq
        self.events: list[Any] = []
        self.effects: list[Any] = []
        self._begin()

    def _begin(self) -> None:
        """What follows from the log, and what is soft."""
        state, peer = self.state, self.state.peer
        self.link = Link("pool:" + self.name, "coordinator", peer.epoch, peer.head, peer.heard, peer.acked)
        self.link.rebuild((a.notice_seq, a.id) for a in self._noticed())
        self._needs_walk = True
        # --- soft: after a restart each victim has its full grace again, and every bid is made anew
        grace_s = state.config.grace_s if state.config else 0.0
        self.deadlines: dict[str, float] = dict.fromkeys(state.preempting, self.now + grace_s)
        self.bids: dict[str, Bid] = {}
        self.bid_number = 0
        # bids that this run of the coordinator does not have yet: id -> number, ascending
        self.bids_due: dict[str, int] = {}
        self.bids_acked = 0
        self.promised: dict[str, Attempt] = {}
        # whose bid to preempt stands
        self._bidder: str | None = None
        self._unanswered: dict[str, Attempt] = {
            a.id: a for a in state.attempts.values() if a.state == QUEUED and not a.owned
        }
        for attempt in state.attempts.values():
            self._effect_of(attempt)

    def _noticed(self) -> Iterator[Attempt]:
        for attempts in (self.state.attempts, self.state.ended):
            for attempt in attempts.values():
                if attempt.notice_seq:
                    yield attempt

    def _effect_of(self, attempt: Attempt) -> None:
        """What a restarted pool must see to for this attempt."""
        if attempt.state == ENDING:
            self.effects.append(Unplace(attempt.id, attempt.k))
        elif attempt.state in (GRANTED, PREEMPTING) and attempt.placed is None:
            self.effects.append(Place(attempt.id, attempt.k, dict(attempt.amounts), attempt.options))

    # --- the turn

    def _emit(self, event: Any, *subjects: str) -> None:
        """The event happens: it changes the state and goes into the log; `subjects` are what it tells of."""
        self.state.apply(event, self.now)
        self.events.append(event)
        self._needs_walk = True
        for subject in subjects:
            self.link.note(subject, self.state.seq)

    def set_time(self, now: float) -> None:
        """The core's time never runs backwards."""
        self.now = max(self.now, now)

    def take_step(self) -> Step:
        """The turn is over: its events, and the effects to run once they are durable."""
        peer, link = self.state.peer, self.link
        now = ev.Peer("coordinator", link.epoch, link.head, link.heard, link.acked)
        if now != peer and (self.events or link.heard - peer.heard >= _PEER_EVERY):
            self.state.apply(now, self.now)
            self.events.append(now)
        step = Step(self.events, self.effects)
        self.events, self.effects = [], []
        return step

    def soft(self) -> tuple[int, int, int, int]:
        """How far the link is: what a turn that fails must not move."""
        return self.link.epoch, self.link.head, self.link.heard, self.link.acked

    def resume(self, soft: tuple[int, int, int, int], before: Pool) -> None:
        """Go on in the same epoch after a turn that failed: `soft` is of its start, `before` the core that failed."""
        self.link.epoch, self.link.head, self.link.heard, self.link.acked = soft
        self.link.rebuild((a.notice_seq, a.id) for a in self._noticed())
        self.bid_number, self.opened = before.bid_number, before.opened

    # --- messages of the coordinator

    def check(self, message: Message, asked_in: int = 0) -> None:
        """Whether the coordinator may be listened to. Raises as `Link.check`."""
        if self.is_declared_lost(message):
            return
        if self._is_for_another(message) and not self._is_newer(message):
            raise StalePeer(
                f"this is pool {self.name} ({self.state.uid}), and the message is for {message.uid}"
            )
        self.link.check(message, asked_in)

    def _is_for_another(self, message: Message) -> bool:
        return bool(message.uid and self.state.uid) and message.uid != self.state.uid

    def _is_newer(self, message: Message) -> bool:
        return (message.epoch, message.head) > (self.link.epoch, self.link.head)

    def is_replaced(self, message: Message) -> bool:
        """The coordinator knows another pool under this name, and so answers none of this one's calls: what it says
        must be worked in whether it has answered or not. An older word does not count."""
        return self._is_for_another(message) and self._is_newer(message)

    def is_declared_lost(self, message: Message) -> bool:
        """This pool is no more: an operator said that its log is lost."""
        return is_made_anew(message.uid) and self.is_replaced(message)

    def exchange(self, message: Message, asked_in: int = 0) -> None:
        """A message of the coordinator: its directives, in order (docs/protocol.md, "Directives").

        Raises:
            StalePeer, ShorterLog: the coordinator must not be listened to.
        """
        if self.is_declared_lost(message):
            self._emit(ev.BegunAnew(message.uid, message.epoch, message.head))
            self._begin()
            self.effects = [BeginAnew()]
            return
        self.check(message, asked_in)
        if message.epoch > self.link.epoch:  # a new run of it knows no bid
            self.bids_due = {id: bid.number for id, bid in self.bids.items()}
            self.bids_acked = 0
        items = self.link.receive(message, asked_in)
        if self.link.went_back:
            self.link.rebuild((a.notice_seq, a.id) for a in self._noticed())
        if message.to_epoch == self.epoch and message.bids_ack > self.bids_acked:
            self.bids_acked = message.bids_ack
            self.bids_due = {id: n for id, n in self.bids_due.items() if n > message.bids_ack}
        self.work_in(items)

    def work_in(self, items: list[list[Any]]) -> None:
        """Directives, in order: what `exchange` does with those that it has not seen yet."""
        reconfigured = False
        for _, subject, kind, *rest in items:
            if kind == "configure":
                reconfigured |= self._configure(*rest)
            elif kind == "enqueue":
                self._enqueue(subject, *rest)
            elif kind == "take":
                self._take(subject, *rest)
            elif kind == "close":
                self._close(subject, *rest)
            else:
                self._asked(subject, *rest)
        if reconfigured:
            self._undo_nominations()

    def outgoing(self) -> Message:
        """All that the coordinator does not have yet."""
        state, link = self.state, self.link
        due = link.due()
        items = []
        for id, seq in due:
            attempt = state.attempt(id)
            if attempt is not None and attempt.notice_seq:
                items.append([seq, id, attempt.k, *news_of(attempt)])
        bids = [[bid.number, id, *bid[1:]] for id in self.bids_due if (bid := self.bids.get(id)) is not None]
        return Message(
            "pool:" + self.name,
            state.uid,
            self.epoch,
            state.seq,
            link.acked,
            due[-1][1] if len(due) < len(link.index) else state.seq,
            items,
            link.heard,
            bids,
            self.bid_number,
            0,
            link.epoch,
            self.opened,
            link.epoch,
            link.head,
        )

    @property
    def has_news(self) -> bool:
        """There is something that the coordinator was not told, or did not acknowledge."""
        return bool(self.link.index or self.bids_due)

    def _configure(
        self, version: int, uid: str, config: dict[str, Any], policies: list[dict[str, Any]]
    ) -> bool:
        if version <= self.state.version:
            return False
        for id in list(self.promised):
            self._unpromise(id)
        self._emit(ev.Configured(version, uid, config, policies))
        return True

    def _undo_nominations(self) -> None:
        """After a change: those that can't stand together any more are undone, the last submitted first (section 6)."""
        while (last := self.state.impossible_nomination()) is not None:
            self._end(last, "returned", "the pool changed")

    def _current(self, id: str, k: int) -> Attempt | None:
        """The attempt `k` or a newer one; a lower one that still waits is ended first (R7)."""
        attempt = self.state.attempt(id)
        if attempt is not None and attempt.k < k:
            if attempt.state in (QUEUED, NOMINATED):
                self._end(attempt, "withdrawn", "")
            elif attempt.state != ENDED:
                raise AssertionError(f"attempt {k} of {id} opened while {self.name} still holds {attempt.k}")
            return None
        return attempt

    def _enqueue(self, id: str, k: int, owned: bool, fields: list[Any]) -> None:
        if self._current(id, k) is None:
            self._emit(ev.Queued(id, k, owned, *fields))
            if not owned:
                self._unanswered[id] = self.state.attempts[id]

    def _take(self, id: str, k: int, fields: list[Any]) -> None:
        """Told to run it: as bid, or judged anew where the bid is lost; else it goes back."""
        attempt = self._current(id, k)
        promised = attempt is not None and id in self.promised
        if attempt is None:
            self._emit(ev.Queued(id, k, True, *fields))
            attempt = self.state.attempts[id]
        elif attempt.k > k or attempt.state != QUEUED:
            return
        self._forget_bid(id)
        answer, victims = self.judge(attempt, promised=promised)
        if answer == NO:
            self._end(attempt, "returned", "it could no longer be run here")
        else:
            self.start(attempt, victims)

    def _close(self, id: str, k: int) -> None:
        """Not here: also an attempt that was never heard of is ended, so that it can't come later (R1)."""
        attempt = self._current(id, k)
        if attempt is None:
            self._emit(ev.Ended(id, k, "withdrawn", ""), id)
        elif attempt.k == k and attempt.state == QUEUED:
            self._end(attempt, "withdrawn", "")

    def _asked(self, id: str, k: int, what: str) -> None:
        """The coordinator asks the pool that runs the attempt (R1 as above)."""
        attempt = self._current(id, k)
        back = what in ("give", "yield", "evict")
        if attempt is None:
            if what == "lost":
                self._emit(ev.Ended(id, k, "stopped", "the log of its pool was lost"), id)
            elif what != "stopped":
                self._emit(ev.Ended(id, k, "returned" if back else "withdrawn", ""), id)
        elif attempt.k != k:
            return
        elif attempt.state in (QUEUED, NOMINATED):
            if what in ("yield", "evict") or (what == "give" and attempt.state == QUEUED):
                self._end(attempt, "returned", "another pool opened")
            elif not back and what != "stopped":
                self._end(attempt, "withdrawn", what)
        elif attempt.state not in (GRANTED, PREEMPTING):
            return  # it is over already, which the coordinator will hear
        elif what in ("release", "cancel", "expire"):
            how = {"release": "released", "cancel": "cancelled", "expire": "expired"}[what]
            self._finish(attempt, how, "")
        elif what == "stopped" and attempt.state == PREEMPTING:
            self._finish(attempt, "stopped", ev.HOLDER_STOPPED)
        elif what == "evict" and attempt.state == GRANTED:
            self._emit(ev.Evicted(id, k, "its pool is being emptied"), id)
            self._call_back([attempt])

    # --- what the shell reports

    def placed(self, id: str, k: int, detail: dict[str, Any]) -> None:
        """The grant's placement group is ready: its holder may be told."""
        attempt = self.state.attempts.get(id)
        if attempt is not None and attempt.k == k and attempt.placed is None:
            if attempt.state in (GRANTED, PREEMPTING):
                self._emit(ev.Placed(id, k, detail), id)

    def unplaced(self, id: str, k: int, why: str) -> None:
        """The group was not ready in time: the grant goes back, no retry spent. One that its holder had is stopped."""
        attempt = self.state.attempts.get(id)
        if attempt is not None and attempt.k == k and attempt.state in (GRANTED, PREEMPTING):
            lost = attempt.state == PREEMPTING or attempt.placed is not None
            self._finish(attempt, "stopped" if lost else "returned", why)

    def gone(self, id: str, k: int) -> None:
        """The grant's placement group exists no more: what it held is free."""
        attempt = self.state.attempts.get(id)
        if attempt is not None and attempt.k == k and attempt.state == ENDING:
            self._emit(ev.Ended(id, k, attempt.ended_as, attempt.why), id)

    def tick(self) -> None:
        """What time alone brings: pauses that are over, and deadlines of victims (section 6)."""
        state, now = self.state, self.now
        if state.config and state.config.min_runtime_s > 0 and state.queue.size:
            self._needs_walk = True  # another grant may have run for long enough
        if not (state.paused or self.deadlines):
            return
        for attempt in [a for a in state.paused.values() if a.not_before <= now]:
            del state.paused[attempt.id]
            state.join_queue(attempt)
            self._needs_walk = True
        due = [(at, state.preempting[id].age, id) for id, at in self.deadlines.items() if at <= now]
        for _, _, id in sorted(due):
            self._finish(state.preempting[id], "stopped", ev.GRACE_RAN_OUT)

    def next_event_at(self) -> float | None:
        """The time at which a tick or a walk could change something, if nothing else happens."""
        state, now = self.state, self.now
        times = [a.not_before for a in state.paused.values()]
        times += self.deadlines.values()
        if state.config and state.config.min_runtime_s > 0 and state.queue.size:
            ripe_s = state.config.min_runtime_s
            young = (grants.first_after(now - ripe_s) for grants in state.holders.values())
            times += [at for grant in young if grant is not None and (at := grant.granted_at + ripe_s) > now]
        return min(times, default=None)

    # --- ends

    def _end(self, attempt: Attempt, how: str, why: str) -> None:
        """Over at once: what ends holds no placement group."""
        self._forget_bid(attempt.id)
        self.deadlines.pop(attempt.id, None)
        self._emit(ev.Ended(attempt.id, attempt.k, how, why), attempt.id)

    def _finish(self, attempt: Attempt, how: str, why: str) -> None:
        """A grant is over: at once where grants only count, else when its placement group is gone."""
        if attempt.placed is not None and not attempt.placed.get("pg"):
            self._end(attempt, how, why)
            return
        self.deadlines.pop(attempt.id, None)
        self._emit(ev.Ending(attempt.id, attempt.k, how, why))
        self.effects.append(Unplace(attempt.id, attempt.k))

    def start(self, attempt: Attempt, victims: list[Attempt] | None) -> None:
        """Grant it; or, with victims, nominate it and tell them to stop, in one event (R4)."""
        self._unanswered.pop(attempt.id, None)
        if victims is None:
            self._emit(ev.Granted(attempt.id, attempt.k), attempt.id)
            if self.state.places:
                self.effects.append(Place(attempt.id, attempt.k, dict(attempt.amounts), attempt.options))
            return
        pairs = [[v.id, v.k] for v in victims]
        self._emit(ev.Nominated(attempt.id, attempt.k, pairs), attempt.id, *(v.id for v in victims))
        self._call_back(victims)

    def _call_back(self, victims: list[Attempt]) -> None:
        """Their grace begins."""
        grace_s = self.state.config.grace_s if self.state.config else 0.0
        for victim in victims:
            self.deadlines[victim.id] = self.now + grace_s
            if victim.placed is None:  # nobody was told of this grant yet
                self._finish(victim, "stopped", ev.NOT_PLACED_YET)

    # --- the walk (docs/rules.md section 5)

    def first_grant(self) -> Attempt | None:
        """The first in the queue's order that can be granted."""
        return walk.first(self.state, self.now)[0]

    def first_preemption(self) -> tuple[Attempt, list[Attempt]] | None:
        """The first in the queue's order that fits once others are stopped, and these; nothing can be granted."""
        attempt, asking = walk.first(self.state, self.now)
        return None if attempt is not None else walk.first_preemption(self.state, self.now, asking)

    def judge(self, attempt: Attempt, *, promised: bool = False) -> tuple[str, list[Attempt] | None]:
        """What the pool could do for one waiter right now: its answer, and for `preempt` the victims."""
        return walk.judge(self.state, self.now, attempt, promised=promised)

    def walk(self) -> None:
        """All that this pool can decide by itself: grant and preempt what it owns, bid for the rest."""
        if not self._needs_walk:
            return
        bidder: Attempt | None = None
        while True:
            attempt, asking = walk.first(self.state, self.now)
            if attempt is None:
                found = walk.first_preemption(self.state, self.now, asking)
                if found is None:
                    break
                attempt, victims = found
                if not attempt.owned:  # behind an unanswered bid to preempt no other preemption starts
                    bidder = attempt
                    break
                self.start(attempt, victims)
                if any(self.deadlines.get(victim.id) == self.now for victim in victims):
                    self.tick()  # they have no grace, and stop before anyone looks for other victims
            elif attempt.owned:
                self.start(attempt, None)
            else:
                self._promise(attempt)
        self._answer(bidder)
        self._needs_walk = False

    # --- bids (docs/protocol.md, "Bids")

    def _promise(self, attempt: Attempt) -> None:
        """Bid room: the amounts are booked, and count as held for others, while the bid stands."""
        state = self.state
        kind = state.queue.kind(attempt)
        self._bid(attempt, ROOM, kind.share)
        state.queue.remove(attempt)
        state.promise(attempt)
        self.promised[attempt.id] = attempt

    def _unpromise(self, id: str) -> None:
        attempt = self.promised.pop(id)
        self.state.promise(attempt, -1)
        self.state.join_queue(attempt)
        self._unanswered[id] = attempt
        self._needs_walk = True

    def _bid(self, attempt: Attempt, answer: str, in_share: bool) -> None:
        before = self.bids.get(attempt.id)
        self._unanswered.pop(attempt.id, None)
        if before is not None and before[1:] == (attempt.k, answer, in_share):
            return
        self.bid_number += 1
        self.bids[attempt.id] = Bid(self.bid_number, attempt.k, answer, in_share)
        self.bids_due.pop(attempt.id, None)
        self.bids_due[attempt.id] = self.bid_number

    def _forget_bid(self, id: str) -> None:
        if id in self.promised:
            self._unpromise(id)
        self.bids.pop(id, None)
        self.bids_due.pop(id, None)
        self._unanswered.pop(id, None)

    def _answer(self, bidder: Attempt | None) -> None:
        """Whoever has no room is told so; a bid to preempt that does not stand any more becomes a no."""
        before = self._bidder
        stands = before is not None and before in self.bids and self.bids[before].answer == PREEMPT
        if before is not None and stands and (bidder is None or before != bidder.id):
            self._unanswered[before] = self.state.attempts[before]
        self._bidder = bidder.id if bidder is not None else None
        if bidder is not None:
            self._bid(bidder, PREEMPT, self.state.queue.kind(bidder).share)
        for attempt in list(self._unanswered.values()):
            self._bid(attempt, NO, False)
