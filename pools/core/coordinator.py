"""The coordinator: where everything enters, and what keeps a request in at most one pool.

It stamps the age of each request, keeps one attempt of it at a time, and decides which pool an attempt belongs to
(docs/protocol.md). Commands come in as methods, events go out (`take_step`); a method that is refused raises and has
changed nothing. Soft state lives here and dies with the process: leases, and what the pools answered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ray_pools.core import announcements, holders
from ray_pools.core import records as ev
from ray_pools.core.access import Denials
from ray_pools.core.changes import merge
from ray_pools.core.choice import best_pool
from ray_pools.core.coordinator_state import CoordinatorState
from ray_pools.core.intake import check_age, check_room, check_same, check_token
from ray_pools.core.leases import Leases
from ray_pools.core.link import Link, Message
from ray_pools.core.lost import check
from ray_pools.core.outgoing import message_to
from ray_pools.core.requests import FINAL, OPEN, TAKEN, Request
from ray_pools.errors import Refused

RETENTION_S = 7 * 24 * 3600.0
# After a pool gave a grant back because its group did not come up, it is tried again after 30 s, 60 s, ... 960 s.
PAUSE_FIRST_S = 30.0
PAUSE_DOUBLINGS_MAX = 5

_PEER_EVERY = 1000


class CoordinatorStep(NamedTuple):
    """What a turn brought: events to append, and the ids of requests whose holders have something to hear."""

    events: list[Any]
    touched: list[str]


class Soft(NamedTuple):
    """How far each pool's link is (epoch, head, heard, acked), and its bids (epoch, number of the newest)."""

    links: dict[str, tuple[int, int, int, int]]
    bids_seen: dict[str, tuple[int, int]]


class Coordinator:
    """The coordinator's core. `state` is the fold; `epoch` the one in which its log was opened."""

    def __init__(
        self, state: CoordinatorState, epoch: int, now: float, retention_s: float = RETENTION_S
    ) -> None:
        self.state = state
        self.epoch = epoch
        self.retention_s = retention_s
        self.now = max(now, state.clock)
        # how long the log was when this run opened it
        self.opened = state.seq
        self.events: list[Any] = []
        self.touched: dict[str, None] = {}
        # answers of the open attempts that this turn, and the one before, decided: a turn that fails gives them back
        self._decided: dict[str, tuple[int, dict[str, tuple[str, bool]]]] = {}
        self._decided_before = self._decided
        self.links: dict[str, Link] = {}
        for name in state.pools:
            self._link(name)
        # --- soft: after a restart every lease has its full term again, and every pool is asked anew
        self.leases = Leases()
        self.denials = Denials()
        for request in state.waiting_or_holding.values():
            self._start_lease(request)
        # pool -> (its epoch, number of its newest bid) as worked in by this run
        self.bids_seen: dict[str, tuple[int, int]] = {}
        # pools that speak to this run of the coordinator: the others may not know that their bids are gone (R3)
        self.greeted: set[str] = set()
        # pools that can't be reached: their answer counts as no
        self.silent: set[str] = set()

    def _link(self, pool: str) -> Link:
        link = self.links.get(pool)
        if link is None:
            peer = self.state.peers.get(pool) or ev.Peer(pool, 0, 0, 0, 0)
            known = peer.epoch, peer.head, peer.heard, peer.acked
            link = self.links[pool] = Link("coordinator", "pool:" + pool, *known)
            self._rebuild(pool)
        return link

    def _rebuild(self, pool: str) -> None:
        pairs = [
            (directive.seq, request.id)
            for request in self.state.requests.values()
            if (directive := request.directives.get(pool)) is not None
        ]
        self.links[pool].rebuild([*pairs, (self.state.configured.get(pool, 0), "")])

    # --- the turn

    def _emit(self, event: Any) -> None:
        self.state.apply(event, self.now)
        self.events.append(event)

    def _emit_for(self, request: Request, event: Any) -> None:
        """The event happens to the request: its pools and its holder will hear of it."""
        before = request.changed_seq
        if request.phase == OPEN:
            self._decided.setdefault(request.id, (request.k, request.answers))
        self._emit(event)
        seq = self.state.seq
        for pool, directive in request.directives.items():
            if directive.seq == seq:
                self._link(pool).note(request.id, seq)
        if request.changed_seq != before:
            self.touched[request.id] = None

    def set_time(self, now: float) -> None:
        """The core's time never runs backwards."""
        self.now = max(self.now, now)

    def take_step(self) -> CoordinatorStep:
        """The turn is over: its events, and whose holders have news once they are durable."""
        for name, link in self.links.items():
            if name not in self.state.pools:
                continue
            before = self.state.peers.get(name) or ev.Peer(name, 0, 0, 0, 0)
            now = ev.Peer(name, link.epoch, link.head, link.heard, link.acked)
            if now != before and (self.events or link.heard - before.heard >= _PEER_EVERY):
                self._emit(now)
        step = CoordinatorStep(self.events, list(self.touched))
        self.events, self.touched = [], {}
        self._decided_before, self._decided = self._decided, {}
        return step

    def soft(self) -> Soft:
        """How far each link and its bids are: what a turn that fails must not move."""
        links = {name: (link.epoch, link.head, link.heard, link.acked) for name, link in self.links.items()}
        return Soft(links, dict(self.bids_seen))

    def resume(self, soft: Soft, before: Coordinator) -> None:
        """Go on in the same epoch after a turn that failed: `soft` is of its start, `before` the core that failed."""
        for name, (epoch, head, heard, acked) in soft.links.items():
            link = self._link(name)
            link.epoch, link.head, link.heard, link.acked = epoch, head, heard, acked
            self._rebuild(name)
        self.denials = before.denials
        self.opened = before.opened
        self.bids_seen, self.greeted, self.silent = soft.bids_seen, before.greeted, before.silent
        decided = {**before._decided_before, **before._decided}
        for id, request in self.state.waiting_or_holding.items():
            failed = before.state.requests.get(id)
            if request.phase == OPEN and failed is not None:
                k, answers = decided.get(id, (failed.k, failed.answers))
                if k == request.k:
                    request.answers = answers

    # --- requests

    def submit(
        self,
        id: str,
        requester: str,
        amounts: Mapping[str, int],
        *,
        preemptible: bool = True,
        retries: int = 0,
        lease_s: float = 0.0,
        options: Mapping[str, Any] | None = None,
        token: bytes = b"",
        client: str = "",
        age_s: float | None = None,
    ) -> Request:
        """A request enters: it queues in every pool that admits it, or is rejected at once (sections 2 and 3).

        The same submission again changes nothing. Values are checked by the caller (`ray_pools.core.commands`).
        age_s: how long ago its client made it; None where that is not known.

        Raises:
            Refused: the id came with other content (`id_in_use`) or another token (`wrong_token`); `too_old`,
                `clock_ahead`, `too_many_waiting`, `too_many_live` (docs/limits.md).
        """
        content = (
            requester,
            tuple(sorted(amounts.items())),
            preemptible,
            retries,
            lease_s,
            dict(options or {}),
        )
        if (known := self.state.requests.get(id)) is not None:
            check_same(known, content)
            check_token(known, token, submits=True)
            holders.adopt(self, known, client)
            return known
        positive = tuple(pair for pair in content[1] if pair[1] > 0)
        check_age(age_s, self.retention_s)
        pools, causes = self.state.admit(requester, positive, preemptible)
        if pools:
            check_room(self.state, {requester: 1})
        self._emit(
            ev.Submitted(
                id,
                requester,
                [list(pair) for pair in content[1]],
                preemptible,
                retries,
                lease_s,
                self.state.ages + 1,
                content[5],
                token,
                client,
                list(pools),
                causes,
            )
        )
        request = self.state.requests[id]
        for pool in pools:
            self._link(pool).note(id, self.state.seq)
        if pools:
            self._start_lease(request)
        self.touched[id] = None
        return request

    def find(self, id: str, token: bytes | None = None) -> Request:
        """The request; with a token, only for who holds it (None: an operator).

        Raises:
            Refused: no such request (`unknown_id`), or another token (`wrong_token`).
        """
        request = self.state.requests.get(id)
        if request is None:
            raise Refused("unknown_id", f"there is no request {id!r}", {"id": id})
        if token is not None:
            check_token(request, token)
        return request

    def release(self, request: Request, by: str = "") -> bool:
        """Its holder is done; what still waits is cancelled (section 8). True once it is final. `by`: an operator."""
        return self._ask_end(request, "release", by)

    def cancel(self, request: Request, by: str = "") -> bool:
        """Wanted no more, in any attempt to come (section 8). True once it is final. `by`: an operator."""
        return self._ask_end(request, "cancel", by)

    def _ask_end(self, request: Request, what: str, by: str = "") -> bool:
        if request.phase == FINAL:
            return True
        if not request.asked:
            self.commanded(what, by, request.id)
        if request.phase == OPEN:  # no pool was told to run it: none can hold it
            self._finish(request, "cancelled")
            return True
        if not request.asked:
            self._emit_for(request, ev.Asked(request.id, request.k, what))
        return False

    def stopped(self, request: Request, by: str = "") -> None:
        """The holder of a preempting grant has stopped; without effect on any other. `by`: an operator says so."""
        if request.phase == TAKEN and request.told == "preempting" and not request.asked:
            directive = request.directives.get(request.owner)
            if directive is None or directive.k != request.k or directive.what not in ("stopped", "lost"):
                self.commanded("stopped", by, request.id)
                self._emit_for(request, ev.Asked(request.id, request.k, "stopped"))

    def _finish(self, request: Request, state: str, causes: dict[str, str] | None = None) -> None:
        self._emit_for(request, ev.Finished(request.id, state, causes or {}))
        self.leases.drop(request.id)

    # --- who may (docs/protocol.md)

    def commanded(self, what: str, by: str, id: str = "", detail: str = "") -> None:
        """An operator `by` that name does something; "" is none."""
        if by:
            self._emit(ev.Commanded(id, what, by, detail))

    def denied(self, id: str, what: str, by: str, why: str) -> None:
        """Somebody was refused: logged, but not each time (`Denials`)."""
        if found := self.denials.note(self.now, id, what, by, why):
            self._emit(ev.Denied(*found))

    # --- leases (section 8)

    def renew(self, request: Request) -> None:
        """Its holder is alive; a final request is not revived."""
        self.leases.renew(request.id, self.now + request.lease_s)

    def _start_lease(self, request: Request) -> None:
        if request.lease_s > 0 and request.phase != FINAL:
            self.leases.start(request.id, request.age, self.now + request.lease_s)

    def next_event_at(self) -> float | None:
        """The time at which a tick could change something, if nothing else happens."""
        found = [at for at in (self.leases.next_at(), announcements.next_end(self.state)) if at is not None]
        return min(found, default=None)

    def tick(self) -> None:
        """Leases that ran out: a holder's grant expires, a waiter is cancelled (section 8); and announcements."""
        announcements.end_due(self)
        while (id := self.leases.pop_due(self.now)) is not None:
            self._ask_end(self.state.requests[id], "expire")

    def forget(self) -> None:
        """Final requests leave the state when every pool has acknowledged and the retention time has passed. Called
        once a minute; refusals that were only counted are logged then, too."""
        for found in self.denials.due(self.now):
            self._emit(ev.Denied(*found))
        ids = [
            r.id
            for r in self.state.requests.values()
            if r.phase == FINAL
            and r.finished_at + self.retention_s <= self.now
            and all(
                p not in self.state.pools or self._link(p).acked >= d.seq for p, d in r.directives.items()
            )
        ]
        if ids:
            self._emit(ev.Forgotten(ids))

    # --- messages of a pool

    def check(self, pool: str, message: Message, asked_in: int = 0) -> None:
        """Whether the pool may be listened to. Raises Refused, as `lost.check`."""
        check(self, pool, message, asked_in)

    def exchange(self, pool: str, message: Message, asked_in: int = 0) -> None:
        """A message of a pool: what became of what it has taken, and its bids (docs/protocol.md). Raises as `check`."""
        self.check(pool, message, asked_in)
        link = self._link(pool)
        items = link.receive(message, asked_in)
        if link.went_back:
            self._rebuild(pool)
        was_silent = pool in self.silent
        self.silent.discard(pool)
        for _, id, k, told, detail in items:
            self._told(pool, id, k, told, detail)
        if message.to_epoch == self.epoch:  # else these bids were made to another run, and will be made again
            self.greeted.add(pool)
            self._bids(pool, message)
        if was_silent:  # what it answered before counts again
            self._decide_all_of(pool)

    def _bids(self, pool: str, message: Message) -> None:
        epoch, newest = self.bids_seen.get(pool, (0, 0))
        if message.epoch > epoch:
            newest = 0
        concerned: dict[str, Request] = {}
        for number, id, k, answer, in_share in message.bids:
            if number <= newest:  # R2
                continue
            request = self.state.requests.get(id)
            if request is not None and request.phase == OPEN and request.k == k and pool in request.pools:
                request.answers[pool] = (answer, in_share)
                concerned[id] = request
        self.bids_seen[pool] = (message.epoch, max(newest, message.bids_upto))
        for request in concerned.values():
            self.decide(request)

    def outgoing(self, pool: str) -> Message:
        """All that the pool does not have yet."""
        return message_to(self, pool)

    def has_news(self, pool: str) -> bool:
        """There is something that the pool was not told, or did not acknowledge."""
        return bool(self._link(pool).index) or pool not in self.greeted

    def unanswered(self) -> set[str]:
        """Pools whose answer some open attempt waits for: they must be reachable, or count as silent."""
        found: set[str] = set()
        for request in self.state.waiting_or_holding.values():
            if request.phase == OPEN:
                found.update(p for p in request.pools if p not in request.answers and p not in self.silent)
        return found

    def _told(self, pool: str, id: str, k: int, told: str, detail: dict[str, Any]) -> None:
        request = self.state.requests.get(id)
        if request is None or request.k != k or request.phase != TAKEN or request.owner != pool:
            return
        if told == "ended":
            self._attempt_ended(request, detail["how"], detail["why"])
        elif told != "ending" and (told, detail) != (request.told, request.detail):
            self._emit_for(request, ev.Told(id, k, told, detail))

    def _attempt_ended(self, request: Request, how: str, why: str) -> None:
        """Its attempt is over and durable at its pool: the next one opens, or the request is final (section 8)."""
        if request.asked:
            held = request.told in ("granted", "placed", "preempting") or how in (
                "released",
                "expired",
                "stopped",
            )
            asked = {"release": "released", "cancel": "cancelled", "expire": "expired"}[request.asked]
            self._finish(request, asked if held else "cancelled")
        elif how == "stopped":
            if request.retries > 0:
                self._reopen(request, request.retries - 1)
            else:
                self._finish(request, "preempted")
        elif how in ("returned", "withdrawn"):
            self._reopen(
                request, request.retries, paused=request.owner if why.startswith("not placed") else ""
            )
        else:
            self._finish(request, how)

    def _reopen(self, request: Request, retries: int, paused: str = "") -> None:
        """The next attempt, in every pool that admits the request now; none: rejected (sections 6 and 9)."""
        pools, causes = self.state.admit(request.requester, request.positive, request.preemptible)
        if not pools:
            self._finish(request, "rejected", causes)
            return
        not_before = {p: at for p, at in request.not_before.items() if p in pools}
        pauses = {p: n for p, n in request.pauses.items() if p in pools}
        if paused in pools:
            pauses[paused] = pauses.get(paused, 0) + 1
            doublings = min(pauses[paused] - 1, PAUSE_DOUBLINGS_MAX)
            not_before[paused] = self.now + PAUSE_FIRST_S * 2**doublings
        self._emit_for(
            request, ev.Opened(request.id, request.k + 1, list(pools), not_before, pauses, retries)
        )

    # --- which pool (section 7)

    def decide(self, request: Request) -> None:
        """The best pool with room once no better one is unknown; else, once none is unknown, the best to preempt."""
        if request.phase == OPEN:
            pool = best_pool(request.pools, request.answers, self.silent)
            if pool is not None:
                self._emit_for(request, ev.Taken(request.id, request.k, pool))

    def decide_by(self, request: Request, answers: Mapping[str, tuple[str, bool]]) -> None:
        """The same, by answers that were all asked for at once."""
        request.answers = dict(answers)
        self.decide(request)

    def set_silent(self, pool: str) -> None:
        """The pool can't be reached: its answers count as no until it speaks again."""
        self.silent.add(pool)
        self._decide_all_of(pool)

    def _decide_all_of(self, pool: str) -> None:
        for request in list(self.state.waiting_or_holding.values()):
            if request.phase == OPEN and pool in request.pools:
                self.decide(request)

    # --- pools and policies (section 9)

    def change(
        self, changes: Sequence[Sequence[Any]], id: str = "", by: str = "", since: int | None = None
    ) -> int:
        """Change pools, policies, keys and limits, all of it or nothing; then each waiting request is admitted anew.
        Returns the version. With the id of a change that was made before nothing changes: the answer is its version.

        Changes: as of `merge`. `by`: an operator. `since`: the version that they were made for.

        Raises:
            BadInput: what would come out breaks a rule of section 9; names field, value and what would be right.
            Refused: no such pool or policy to take away; the id belongs to other changes (`id_in_use`);
                the version is another by now (`changed_meanwhile`).
        """
        state = self.state
        if (made := state.made_before(id, changes)) is not None:
            return made
        if since not in (None, state.version):
            raise Refused(
                "changed_meanwhile", f"the configuration is at {state.version} by now, not at {since}"
            )
        self._emit(ev.Changed(state.version + 1, merge(state, changes), id, by))
        for kind, *rest in changes:
            # one that comes back under this name, perhaps with its old log, is told everything
            if kind == "unpool":
                self._link(rest[0]).acked = 0
        for pool, seq in state.configured.items():
            if seq == state.seq:
                self._link(pool).note("", seq)
        self._admit_anew()
        return state.version

    def _admit_anew(self) -> None:
        """Each waiting request joins the pools that admit it now, leaves those that don't, or is rejected."""
        for request in sorted(self.state.waiting_or_holding.values(), key=lambda r: r.age):
            if request.asked:
                continue
            pools, causes = self.state.admit(request.requester, request.positive, request.preemptible)
            if request.phase == OPEN:
                if not pools:
                    self._finish(request, "rejected", causes)
                elif pools != request.pools:  # nobody was told to run it: the attempt can be replaced at once
                    self._reopen(request, request.retries)
            elif request.told in ("", "nominated"):
                if request.owner not in pools:
                    self._emit_for(request, ev.Asked(request.id, request.k, "yield"))
                elif not request.told and pools != (request.owner,):
                    self._emit_for(request, ev.Asked(request.id, request.k, "give"))
