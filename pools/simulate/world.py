"""Pools in virtual time: their real cores, with a front that hands each request on at once.

What decides is `ray_pools.core`: admission, the choice among pools, and each pool's ledger, queue, walk and victims.
The front here is what is left of the coordinator where no message is late and nobody crashes: it numbers requests,
opens their attempts, and opens the next one after a preemption. So an attempt costs a few function calls instead of six
messages, and no event is encoded. `tests/test_simulate.py` compares it with a whole system (`ray_pools.core.system`),
decision by decision, on random worlds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ..core import records as ev
from ..core.changes import raise_first
from ..core.choice import best_pool, decide_one
from ..core.config_rules import PolicyConfig, PoolConfig
from ..core.coordinator import Coordinator
from ..core.coordinator_state import CoordinatorState
from ..core.pool import Place, Pool, Unplace
from ..core.pool_state import PoolState
from ..core.records import Amounts

# So many events of a pool are kept for a coordinator that is not there.
_ACKNOWLEDGE_EVERY = 4096

Listener = Callable[[str, list[Any]], None]


class Request:
    """A request on its way. `asked`: its holder is done with it, so that nothing follows when its attempt is over.
    `rejected`: no pool admits it, for `causes`; then it never was among the world's requests.
    """

    __slots__ = (
        "age",
        "answers",
        "asked",
        "causes",
        "fields",
        "id",
        "k",
        "owner",
        "pools",
        "positive",
        "preemptible",
        "rejected",
        "requester",
        "retries",
    )

    def __init__(
        self, id: str, requester: str, positive: Amounts, preemptible: bool, retries: int, age: int, at: float
    ) -> None:
        self.id, self.requester, self.positive = id, requester, positive
        self.preemptible, self.retries, self.age = preemptible, retries, age
        self.k = 0
        self.pools: tuple[str, ...] = ()
        self.owner = ""
        # what its pools bid, where they do
        self.answers: dict[str, tuple[str, bool]] = {}
        self.asked = False
        self.rejected = False
        self.causes: dict[str, str] = {}
        # as a directive has them (docs/protocol.md)
        self.fields: list[Any] = [
            requester,
            [list(pair) for pair in positive],
            preemptible,
            age,
            at,
            0.0,
            {},
        ]


class World:
    """See the module's docstring. Verbs change what is asked for; `settle` lets the pools decide.

    listener: hears each pool's events, in order. reopens: a request whose attempt is over and that has another one
    goes there instead of being queued again at once; whoever takes it calls `open`. live: as live
    pools are. They make placement groups, as configured, which `effect` brings up and removes; and they walk side by
    side and bid for what several may run. By default grants only count, and pools take turns as section 5 has it.
    send: brings a directive to a pool, at once if it is left as it is.
    """

    def __init__(
        self,
        pools: Mapping[str, PoolConfig],
        policies: Iterable[PolicyConfig],
        listener: Listener,
        *,
        now: float = 0.0,
        live: bool = False,
    ) -> None:
        policies = list(policies)
        raise_first(pools, policies)
        self.now = now
        self.listener = listener
        self.reopens: Callable[[Request], None] | None = None
        self.effect: Callable[[Pool, Any], None] = _at_once
        self.send: Callable[[str, list[Any]], None] = self.deliver
        self._bids = live
        self.requests: dict[str, Request] = {}
        self.ages = 0
        coordinator = Coordinator(CoordinatorState(), 1, now)
        if not live:  # grants only count
            pools = {name: pool._replace(placement=None) for name, pool in pools.items()}
        changes: list[tuple[Any, ...]] = [("pool", pool, name + "#1") for name, pool in pools.items()]
        coordinator.change([*changes, *(("policy", policy) for policy in policies)])
        self.admit = coordinator.state.admit
        self.pools = {name: Pool(name, PoolState(), 1, now) for name in sorted(pools)}
        for name, pool in self.pools.items():
            pool.exchange(coordinator.outgoing(name))
            pool.take_step()
        # pools where time alone makes victims of grants
        self._timed = {name: pool.min_runtime_s > 0 for name, pool in pools.items()}
        counts: dict[str, int] = {}
        for policy in policies:
            counts[policy.requester] = counts.get(policy.requester, 0) + 1
        # else a pool walks by itself, to its end: without shared requests, and where nobody is stopped and queued again
        # in the middle of a walk, that comes to the same, and is quicker
        self._one_by_one = not live and (
            max(counts.values(), default=0) > 1 or any(p.grace_s <= 0 for p in pools.values())
        )

    # --- verbs

    def submit(
        self,
        id: str,
        requester: str,
        positive: Amounts,
        *,
        preemptible: bool = True,
        retries: int = 0,
        age: int = 0,
        submitted_at: float | None = None,
    ) -> Request:
        """A request enters (docs/rules.md 2 and 3). positive: its amounts above 0, by key. age: 0 for the next one."""
        at = self.now if submitted_at is None else submitted_at
        pools, causes = self.admit(requester, positive, preemptible)
        if not pools:
            request = Request(id, requester, positive, preemptible, retries, age, at)
            request.rejected, request.causes = True, causes
            return request
        self.ages = max(self.ages, age) if age else self.ages + 1
        request = Request(id, requester, positive, preemptible, retries, age or self.ages, at)
        self.requests[id] = request
        self._open(request, pools)
        return request

    def open(self, request: Request) -> None:
        """Its next attempt stands in every pool that admits it (sections 6 and 8)."""
        pools, _ = self.admit(request.requester, request.positive, request.preemptible)
        if pools:
            self._open(request, pools)
        else:
            self.requests.pop(request.id)

    def _open(self, request: Request, pools: tuple[str, ...]) -> None:
        request.k += 1
        request.pools = pools
        alone = len(pools) == 1
        request.owner = pools[0] if alone else ""
        request.answers = {}
        for name in pools:
            self.send(name, [0, request.id, "enqueue", request.k, alone, request.fields])

    def deliver(self, name: str, directive: list[Any]) -> None:
        """The directive arrives."""
        self.pools[name].work_in([directive])

    def release(self, id: str) -> None:
        """Its holder is done."""
        self.end(id, "release")

    def stopped(self, id: str) -> None:
        """The holder of a preempting grant has stopped."""
        self.end(id, "stopped")

    def cancel(self, id: str) -> None:
        """It is not wanted any more, in whatever state."""
        self.end(id, "cancel")

    def end(self, id: str, how: str) -> None:
        """Its holder's word: release, cancel, expire or stopped (section 8)."""
        request = self.requests.get(id)
        if request is None:
            return
        request.asked |= how != "stopped"
        if request.owner:
            self.pools[request.owner].work_in([[0, id, "ask", request.k, how]])
            return
        for name in request.pools:
            self.send(name, [0, id, "close", request.k])
        self.requests.pop(id)

    # --- deciding

    def set_time(self, now: float) -> None:
        """It is `now`; it never was later."""
        self.now = now
        for pool in self.pools.values():
            pool.set_time(now)

    def settle(self) -> None:
        """Deadlines, then the walk: grants while there are any, else one preemption, and all anew (section 5)."""
        while True:
            for name, pool in self.pools.items():
                if pool.deadlines or pool.state.paused or self._timed[name]:
                    pool.tick()
            self._hear()
            if self._one_by_one:
                if not decide_one(self.pools.values(), self._choose):
                    return
            else:
                for pool in self.pools.values():
                    pool.walk()
                if not (self._hear() or (self._bids and self._decide())):
                    return

    def next_event_at(self) -> float | None:
        """When time alone could change something."""
        found = None
        for name, pool in self.pools.items():
            if self._timed[name] or pool.deadlines or pool.state.paused:
                at = pool.next_event_at()
                if at is not None and (found is None or at < found):
                    found = at
        return found

    def _hear(self) -> bool:
        """What the pools did. True if something was queued again by it."""
        again = False
        for name, pool in self.pools.items():
            while pool.events:
                events, pool.events = pool.events, []
                self.listener(name, events)
                for event in events:
                    if type(event) is ev.Ended:
                        again |= self.ended(name, event)
                if pool.effects:
                    effects, pool.effects = pool.effects, []
                    for effect in effects:
                        self.effect(pool, effect)
            if pool.state.seq - pool.link.acked > _ACKNOWLEDGE_EVERY:
                pool.link.acknowledge(pool.state.seq)
                pool.state.apply(ev.Peer("coordinator", 0, 0, 0, pool.state.seq), self.now)
        return again

    def ended(self, name: str, event: ev.Ended) -> bool:
        """An attempt is over: the next one opens, or the request is final (section 8). True if it is queued again."""
        request = self.requests.get(event.id)
        if request is None or request.owner != name or request.k != event.k:
            return False  # of a pool that did not get it
        stopped = event.how == "stopped"
        again = event.how in ("returned", "withdrawn") or (stopped and request.retries > 0)
        if request.asked or not again:
            self.requests.pop(request.id)
            return False
        request.retries -= stopped
        if self.reopens is None:
            self.open(request)
            return True
        request.owner = ""
        request.pools = ()
        self.reopens(request)
        return False

    # --- requests that several pools may run: one decision at a time, in the order of section 5

    def _decide(self) -> bool:
        """What pools bid for requests that several may run is heard, and decided on. True if something was."""
        concerned: dict[str, Request] = {}
        for name, pool in self.pools.items():
            due, pool.bids_due = pool.bids_due, {}
            for id in due:
                request, bid = self.requests.get(id), pool.bids.get(id)
                if request is not None and bid is not None and request.k == bid.k and not request.owner:
                    request.answers[name] = bid.answer, bid.in_share
                    concerned[id] = request
        decided = False
        for request in concerned.values():
            best = best_pool(request.pools, request.answers, ())
            if best is not None:
                decided = True
                self._take(request, best)
        return decided

    def _take(self, request: Request, best: str) -> None:
        request.owner = best
        for name in request.pools:
            if name != best:
                self.send(name, [0, request.id, "close", request.k])
        self.send(best, [0, request.id, "take", request.k, request.fields])

    def _choose(self, id: str) -> None:
        """Each of its pools says what it could do, and the best one takes it (section 7)."""
        request = self.requests[id]
        answers: dict[str, tuple[str, bool]] = {}
        for name in request.pools:
            pool = self.pools[name]
            attempt = pool.state.attempts[id]
            answer, _ = pool.judge(attempt)
            answers[name] = (answer, pool.state.queue.kind(attempt).share)
        best = best_pool(request.pools, answers, ())
        assert best is not None, f"nobody took {id}, answers {answers}"
        self._take(request, best)


def _at_once(pool: Pool, effect: Any) -> None:
    """Placement groups come and go without taking time."""
    if isinstance(effect, Place):
        pool.placed(effect.id, effect.k, {})
    elif isinstance(effect, Unplace):
        pool.gone(effect.id, effect.k)
