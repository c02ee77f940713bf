"""A whole system in one process and in lockstep: coordinator and pools, with every message delivered at once.

The cores and the protocol are those that live actors run. What is added is the one thing that live pools, walking side
by side, have no need of: the order in which pools take turns (docs/rules.md section 5). Scenarios, simulation and
property tests run on it. It keeps each log in memory, as bytes, so that a restart is a real fold.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ray_pools.core import explain
from ray_pools.core import records as ev
from ray_pools.core.changes import raise_first
from ray_pools.core.choice import decide_one
from ray_pools.core.config_rules import CORDONED, PolicyConfig, PoolConfig
from ray_pools.core.coordinator import Coordinator
from ray_pools.core.coordinator_state import CoordinatorState
from ray_pools.core.eviction import evict
from ray_pools.core.pool import Place, Pool, Unplace
from ray_pools.core.pool_state import PoolState
from ray_pools.core.requests import FINAL
from ray_pools.errors import BadInput, Refused

Log = list[tuple[float, bytes]]


class System:
    """See the module's docstring. Each verb settles everything; one that is refused raises and changes nothing."""

    def __init__(self, pools: Mapping[str, PoolConfig], policies: Iterable[PolicyConfig]) -> None:
        policies = list(policies)
        raise_first(pools, policies)
        self.now = 0.0
        self.logs: dict[str, Log] = {"coordinator": []}
        self.epochs: dict[str, int] = {}
        self.coordinator = self._open_coordinator()
        self.pools: dict[str, Pool] = {}
        self.decisions = 0
        changes: list[tuple[Any, ...]] = [("pool", pool, name + "#1") for name, pool in pools.items()]
        self.coordinator.change([*changes, *(("policy", policy) for policy in policies)])
        for name in sorted(pools):
            self.logs[name] = []
            self.pools[name] = self._open_pool(name)
        self.settle()

    @classmethod
    def copy_of(
        cls,
        coordinator: CoordinatorState,
        pools: Mapping[str, PoolState],
        now: float,
        deadlines: Mapping[str, Mapping[str, float]] | None = None,
    ) -> System:
        """Running actors as of one moment, to see what would come of something; it can't be restarted. Pools that are
        not given count as unreachable. Placement groups come up and go at once. `deadlines`: of victims, per pool.

        Raises:
            Refused: the states are not of one moment (`shorter_log`): one remembers more of another than there is.
        """
        world = cls.__new__(cls)
        world.now = max(now, coordinator.clock, *(pool.clock for pool in pools.values()))
        world.logs = {"coordinator": [], **{name: [] for name in pools}}
        seen = [peer.epoch for peer in coordinator.peers.values()]
        seen += [pool.peer.epoch for pool in pools.values()]
        world.epochs = dict.fromkeys(world.logs, max(seen, default=0) + 1)
        world.decisions = 0
        world.coordinator = Coordinator(coordinator, world.epochs["coordinator"], world.now)
        world.pools = {name: Pool(name, pools[name], world.epochs[name], world.now) for name in sorted(pools)}
        for name, pool in world.pools.items():
            pool.deadlines.update((deadlines or {}).get(name, {}))
            pool.effects = []  # what comes up just now, or goes, is not there yet
        for name in set(coordinator.pools) - set(pools):
            world.coordinator.set_silent(name)
        world.settle()
        return world

    # --- opening, and opening again

    def _next_epoch(self, who: str) -> int:
        self.epochs[who] = self.epochs.get(who, 0) + 1
        return self.epochs[who]

    def _open_coordinator(self) -> Coordinator:
        state = CoordinatorState()
        for at, body in self.logs["coordinator"]:
            state.apply(ev.unpack(body), at)
        return Coordinator(state, self._next_epoch("coordinator"), self.now)

    def _open_pool(self, name: str) -> Pool:
        state = PoolState()
        for at, body in self.logs[name]:
            state.apply(ev.unpack(body), at)
        return Pool(name, state, self._next_epoch(name), self.now)

    def restart(self, who: str) -> None:
        """The actor forgets all but its log: `coordinator`, a pool, or `all`."""
        if who in ("all", "coordinator"):
            self.coordinator = self._open_coordinator()
        for name in self.pools if who == "all" else [who] if who != "coordinator" else []:
            if name not in self.pools:
                raise BadInput("restart", name, f"all, coordinator or a pool: {', '.join(self.pools)}")
            self.pools[name] = self._open_pool(name)
        self.settle()

    # --- settling

    def _persist(self) -> None:
        step = self.coordinator.take_step()
        self.logs["coordinator"].extend((self.now, ev.pack(event)) for event in step.events)
        for name, pool in self.pools.items():
            events, effects = pool.take_step()
            self.logs[name].extend((self.now, ev.pack(event)) for event in events)
            for effect in effects:
                if isinstance(effect, Place):
                    pool.placed(effect.id, effect.k, {})
                elif isinstance(effect, Unplace):
                    pool.gone(effect.id, effect.k)

    def deliver(self) -> None:
        """Every message, until nobody has news."""
        coordinator = self.coordinator
        while True:
            self._persist()
            talking = [(n, p) for n, p in self.pools.items() if coordinator.has_news(n) or p.link.index]
            if not talking:
                return
            for name, pool in talking:
                pool.exchange(coordinator.outgoing(name))
                self._persist()
                coordinator.exchange(name, pool.outgoing()._replace(bids=[], bids_upto=0))
                self._persist()
                pool.exchange(coordinator.outgoing(name))

    def settle(self) -> None:
        """Leases, then deadlines, then the walk: grants while there are any, else one preemption, and all anew."""
        self.coordinator.set_time(self.now)
        for pool in self.pools.values():
            pool.set_time(self.now)
        while True:
            self.deliver()
            self.coordinator.tick()
            self.deliver()
            for pool in self.pools.values():
                pool.tick()
            self.deliver()
            if not decide_one(self.pools.values(), self._ask_all):
                return
            self.decisions += 1

    def _ask_all(self, id: str) -> None:
        request = self.coordinator.state.requests[id]
        answers: dict[str, tuple[str, bool]] = {}
        for name in request.pools:
            if name not in self.pools:  # of a copy: it does not answer
                continue
            pool = self.pools[name]
            attempt = pool.state.attempts[id]
            answer, _ = pool.judge(attempt)
            answers[name] = (answer, pool.state.queue.kind(attempt).share)
        before = request.k, request.phase
        self.coordinator.decide_by(request, answers)
        if (request.k, request.phase) == before:
            raise AssertionError(f"nobody took {id}, answers {answers}")

    # --- verbs (docs/rules.md section 11)

    def submit(
        self,
        id: str,
        requester: str,
        amounts: Mapping[str, int],
        preemptible: bool = True,
        retries: int = 0,
        lease_s: float | None = None,
    ) -> None:
        """A request enters."""
        self.coordinator.submit(
            id, requester, amounts, preemptible=preemptible, retries=retries, lease_s=lease_s or 0.0
        )
        self.settle()

    def release(self, id: str) -> None:
        """Its holder is done."""
        self.coordinator.release(self.coordinator.find(id))
        self.settle()

    def cancel(self, id: str) -> None:
        """It is not wanted any more."""
        self.coordinator.cancel(self.coordinator.find(id))
        self.settle()

    def renew(self, id: str) -> None:
        """Its holder is alive."""
        self.coordinator.renew(self.coordinator.find(id))
        self.settle()

    def stopped(self, id: str) -> None:
        """The holder of a preempting grant has stopped."""
        request = self.coordinator.state.requests.get(id)
        if request is not None:
            self.coordinator.stopped(request)
        self.settle()

    def advance(self, seconds: float) -> None:
        """Time passes, and stops wherever it changes something."""
        until = self.now + seconds
        while True:
            asked = [
                self.coordinator.next_event_at(),
                *(pool.next_event_at() for pool in self.pools.values()),
            ]
            times = [at for at in asked if at is not None]
            if not times or min(times) > until:
                break
            self.now = max(self.now, min(times))
            self.settle()
        self.now = until
        self.settle()

    def attach(self, policy: PolicyConfig) -> None:
        """The policy is in force, in place of the one before."""
        self.coordinator.change([("policy", policy)])
        self.settle()

    def detach(self, requester: str, pool: str) -> None:
        """The requester has no policy on the pool any more."""
        self.coordinator.change([("unpolicy", requester, pool)])
        self.settle()

    def set_capacity(self, pool: str, capacity: Mapping[str, int | None]) -> None:
        """The pool's totals change; keys that are not named stay, None takes a key out."""
        state = self.coordinator.state
        if pool not in state.pools:
            raise Refused("unknown_pool", f"there is no pool {pool!r}", {"pool": pool})
        merged = {**state.pools[pool].capacity, **capacity}
        now = {key: amount for key, amount in merged.items() if amount is not None}
        config = state.pools[pool]._replace(capacity=now)
        self.change([("pool", config, state.uids[pool])])

    def cordon(self, pool: str, state: str = CORDONED) -> None:
        """The pool grants nothing (cordoned), admits nothing either (draining), or is open again."""
        known = self.coordinator.state
        if pool not in known.pools:
            raise Refused("unknown_pool", f"there is no pool {pool!r}", {"pool": pool})
        self.change([("pool", known.pools[pool]._replace(state=state), known.uids[pool])])

    def evict(self, pool: str) -> None:
        """What a draining pool has granted is called back."""
        evict(self.coordinator, pool)
        self.settle()

    def change(self, changes: Sequence[Sequence[Any]]) -> None:
        """Any changes (`changes.merge`), all of them or nothing; pools may come and go."""
        state, before = self.coordinator.state, set(self.coordinator.state.pools)
        self.coordinator.change(changes)
        for name in set(state.pools) - before:
            self.logs[name] = []
            self.pools[name] = self._open_pool(name)
        self.pools = {name: self.pools[name] for name in sorted(self.pools) if name in state.pools}
        self.settle()

    # --- what is to be seen

    def states(self) -> dict[str, str]:
        """Id to state, with `@pool` where it holds."""
        return {
            id: f"{r.shown}@{r.owner}" if r.shown in ("allocated", "preempting") else r.shown
            for id, r in self.coordinator.state.requests.items()
        }

    def usage(self) -> dict[str, dict[str, int]]:
        """Pool to metered key to what is held."""
        return {name: pool.state.usage() for name, pool in self.pools.items()}

    def queue(self) -> dict[str, list[str]]:
        """Pool to the ids that wait there, in order."""
        return {name: [a.id for a in pool.state.in_order()] for name, pool in self.pools.items()}

    def reasons(self, id: str) -> dict[str, str]:
        """Pool to cause: of a rejected request each pool's, of a waiting one those of the pools that it waits in."""
        request = self.coordinator.state.requests[id]
        if request.phase == FINAL:
            return dict(request.causes)
        causes: dict[str, str] = {}
        for name, pool in self.pools.items():
            attempt = pool.state.attempts.get(id)
            if attempt is not None and request.shown == "queued":
                cause = explain.cause(pool, attempt)
                if cause is not None:
                    causes[name] = cause
        return causes

    def explain(self, id: str) -> dict[str, str]:
        """Pool to a sentence: why it waits there, was refused there, or may lose what it holds there."""
        request, state = self.coordinator.state.requests[id], self.coordinator.state
        said = {
            name: explain.admission_text(
                cause,
                request.requester,
                name,
                request.positive,
                request.preemptible,
                state.pools[name].capacity,
                state.policies.get(request.requester, {}).get(name),
            )
            for name, cause in request.causes.items()
            if request.shown == "rejected" and name in state.pools
        }
        for name, pool in self.pools.items():
            attempt = pool.state.attempts.get(id)
            if attempt is not None:
                said[name] = explain.why(pool, attempt)["text"]
        return said

    def amounts(self, id: str) -> dict[str, int]:
        """What the request asks for."""
        return dict(self.coordinator.state.requests[id].amounts)

    def close(self) -> None:
        """Nothing to let go of."""


def make_world(pools: dict[str, PoolConfig], policies: list[PolicyConfig]) -> System:
    """The factory that the scenario runner asks for. Raises BadInput for a configuration that breaks a rule."""
    return System(pools, policies)
