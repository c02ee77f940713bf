"""What the property tests stand on: random worlds, systems that look at themselves, and sums made anew.

Nothing here asks the core's ledger for an opinion: what is held, booked and in a share is summed from attempts. That
the ledger says the same is a property of its own.
"""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import msgpack
from random_cases import minimised, random_case, to_yaml, view

from ray_pools.core import records as ev
from ray_pools.core.config_rules import PolicyConfig, PoolConfig
from ray_pools.core.coordinator import Coordinator
from ray_pools.core.coordinator_state import CoordinatorState
from ray_pools.core.pool import Pool
from ray_pools.core.pool_state import PoolState
from ray_pools.core.queue import GRANTED, HOLDING, NOMINATED, PREEMPTING, QUEUED, Attempt
from ray_pools.core.requests import FINAL, OPEN, TAKEN
from ray_pools.core.system import System
from ray_pools.scenario_files import Scenario

case_of = cache(random_case)  # making one costs as much as playing it

# ---------------------------------------------------------------- random worlds

World = tuple[dict[str, PoolConfig], list[PolicyConfig]]


class Submission(NamedTuple):
    """What `System.submit` takes."""

    id: str
    requester: str
    amounts: dict[str, int]
    preemptible: bool
    retries: int
    lease_s: float | None = None


def random_world(rng: random.Random, requesters: Sequence[str]) -> World:
    """One to three pools in which things are scarce, and who may use them."""
    pools: dict[str, PoolConfig] = {}
    policies: list[PolicyConfig] = []
    for name in ("a", "b", "c")[: rng.choice([1, 1, 2, 2, 3])]:
        capacity = {"gpu": rng.randint(2, 8)}
        if rng.random() < 0.4:
            capacity["lic"] = rng.randint(1, 4)
        pools[name] = PoolConfig(
            name,
            capacity,
            queueing=rng.choice(["backfill", "strict"]),
            starvation_after_s=rng.choice([0.0, 20.0, 300.0]),
            grace_s=rng.choice([0.0, 10.0, 30.0]),
            min_runtime_s=rng.choice([0.0, 0.0, 20.0]),
        )
        left = dict(capacity)
        for requester in rng.sample(requesters, len(requesters)):
            if rng.random() < 0.1:
                continue
            reserved = {key: rng.randint(0, min(left[key], 3)) for key in left if rng.random() < 0.7}
            limit = {
                key: rng.randint(max(reserved.get(key, 0), total // 2), total)
                for key, total in capacity.items()
                if rng.random() < 0.2
            }
            left = {key: total - reserved.get(key, 0) for key, total in left.items()}
            policies.append(PolicyConfig(name, requester, rng.choice([-1, 0, 0, 1, 1, 5]), reserved, limit))
    return pools, policies


def random_submission(
    rng: random.Random, id: str, requesters: Sequence[str], pools: Mapping[str, PoolConfig], retries: int
) -> Submission:
    """A request of any requester; its retries are given, since they decide whether a victim comes back."""
    hard = rng.random() < 0.2
    amounts = {"gpu": rng.choice((1, 1, 2) if hard else (1, 1, 1, 2, 2, 3, 4))}
    for key in sorted({key for pool in pools.values() for key in pool.capacity} - {"gpu"}):
        if rng.random() < 0.4:
            amounts[key] = rng.choice((0, 1, 1, 2))
    return Submission(id, rng.choice(requesters), amounts, not hard, retries)


# ---------------------------------------------------------------- sums made anew

# (what is counted, whose, key) -> how much; "" is the whole pool; what is zero is left out
Sums = dict[tuple[str, str, str], int]


def _counted(sums: Counter[tuple[str, str, str]]) -> Sums:
    return {where: amount for where, amount in sums.items() if amount != 0}


def summed(state: PoolState, promised: Iterable[Attempt] = ()) -> Sums:
    """The ledger of section 4, out of nothing but the attempts (and the bids of room that stand)."""
    sums: Counter[tuple[str, str, str]] = Counter()
    promises = {attempt.id for attempt in promised}
    for attempt in state.attempts.values():
        holds, nominated = attempt.state in HOLDING, attempt.state == NOMINATED
        promise = attempt.id in promises
        assert not promise or attempt.state == QUEUED
        for key, amount in attempt.amounts:
            whose = attempt.requester
            if holds:
                sums["held", "", key] += amount
                if not attempt.preemptible:
                    sums["pinned", "", key] += amount
            if promise:
                sums["promised", "", key] += amount
            if holds or nominated or promise:
                sums["claimed", whose, key] += amount
                if not attempt.preemptible:
                    sums["pinned", whose, key] += amount
            if attempt.state == GRANTED or nominated or promise:
                sums["booked", "", key] += amount
                sums["booked", whose, key] += amount
    return _counted(sums)


def kept(state: PoolState) -> Sums:
    """The ledger that the pool keeps, in the same form."""
    sums: Counter[tuple[str, str, str]] = Counter()
    for what in ("held", "booked", "pinned", "promised"):
        for key, amount in getattr(state.ledger, what).items():
            sums[what, "", key] += amount
    for requester, use in state.ledger.uses.items():
        for what in ("claimed", "booked", "pinned"):
            for key, amount in getattr(use, what).items():
                sums[what, requester, key] += amount
    return _counted(sums)


def unlike(a: Mapping[Any, Any], b: Mapping[Any, Any]) -> dict[Any, tuple[Any, Any]]:
    """The entries that differ, as (of a, of b)."""
    return {key: (a.get(key), b.get(key)) for key in {**a, **b} if a.get(key) != b.get(key)}


# ---------------------------------------------------------------- what always holds (10.1 to 10.3)

# (pool, whose, key, only what can't be preempted) -> held
Held = Counter[tuple[str, str, str, bool]]


def held_in(states: Mapping[str, PoolState]) -> Held:
    """What every pool, and every requester in it, holds of each key."""
    held: Held = Counter()
    for pool, state in states.items():
        for attempt in state.attempts.values():
            if attempt.state in HOLDING:
                for key, amount in attempt.amounts:
                    held[pool, "", key, False] += amount
                    held[pool, attempt.requester, key, False] += amount
                    if not attempt.preemptible:
                        held[pool, attempt.requester, key, True] += amount
    return held


def _bounds(pool: str, state: PoolState, held: Held) -> dict[tuple[str, str, str, bool], int]:
    bounds: dict[tuple[str, str, str, bool], int] = {}
    for key, total in state.capacity.items():
        bounds[pool, "", key, False] = total
        for requester, policy in state.policies.items():
            bounds[pool, requester, key, True] = policy.reserved.get(key, 0)
            if key in policy.limit:
                bounds[pool, requester, key, False] = policy.limit[key]
    for where in held:  # who has no policy any more gets nothing new
        if where[0] == pool and where[1] and where[1] not in state.policies:
            bounds[where] = 0
    return bounds


def broken_rules(states: Mapping[str, PoolState], before: Held, now: Held) -> list[str]:
    """10.1: in one pool at most; 10.2 and 10.3: within every bound, or above it after a change and not rising."""
    broken: list[str] = []
    places: dict[str, list[str]] = {}
    for pool, state in states.items():
        for attempt in state.attempts.values():
            if attempt.state in HOLDING or attempt.state == NOMINATED:
                places.setdefault(attempt.id, []).append(f"{attempt.state}@{pool}")
        for where, bound in _bounds(pool, state, now).items():
            if now[where] > max(bound, before[where]):
                broken.append(f"{where} holds {now[where]} of {bound}, before it was {before[where]}")
    broken += [f"{id} is {at}" for id, at in places.items() if len(at) > 1]
    return broken


# ---------------------------------------------------------------- systems that look at themselves


class Watched(System):
    """Calls `look` after every decision and every settling."""

    def __init__(self, pools: Mapping[str, PoolConfig], policies: Iterable[PolicyConfig]) -> None:
        self._decisions = 0
        self.problems: list[str] = []
        super().__init__(pools, policies)

    @property
    def decisions(self) -> int:
        return self._decisions

    @decisions.setter
    def decisions(self, made: int) -> None:
        self._decisions = made
        if made:
            self.look()

    def settle(self) -> None:
        super().settle()
        self.look()

    def look(self) -> None:
        """What a subclass watches."""

    @property
    def pool_states(self) -> dict[str, PoolState]:
        return {name: pool.state for name, pool in self.pools.items()}


class KeepsTheRules(Watched):
    """Notes every breach of 10.1 to 10.3, between any two decisions."""

    def __init__(self, pools: Mapping[str, PoolConfig], policies: Iterable[PolicyConfig]) -> None:
        self.before: Held = Counter()
        super().__init__(pools, policies)

    def look(self) -> None:
        states = self.pool_states
        now = held_in(states)
        self.problems += broken_rules(states, self.before, now)
        self.before = now


class KeepsBooks(Watched):
    """Notes every difference between the ledger that is kept and the one that is summed."""

    def look(self) -> None:
        for name, state in self.pool_states.items():
            different = unlike(kept(state), summed(state))
            if different:
                self.problems.append(f"ledger of {name}, kept and summed: {different}")


class Endless(AssertionError):
    """More decisions in a row than any finite set of requests needs."""


def preemptions_in(system: System) -> int:
    """How often a pool stopped someone, by its log."""
    logs = (log for who, log in system.logs.items() if who != "coordinator")
    return sum(isinstance(ev.unpack(body), ev.Nominated) for log in logs for _, body in log)


class Finite(Watched):
    """Raises once there are more decisions than `decisions_max`."""

    decisions_max = 1000

    def look(self) -> None:
        if self._decisions > self.decisions_max:
            raise Endless(f"more than {self.decisions_max} decisions")


class SharesInTime(Watched):
    """Notes who waits in its share for longer than the guarantee says (10.4)."""

    def __init__(self, pools: Mapping[str, PoolConfig], policies: Iterable[PolicyConfig]) -> None:
        # (pool, id) -> since when it is its requester's oldest in its share there; not one instant is left out
        self.since: dict[tuple[str, str], float] = {}
        self.granted_after_waiting = 0
        super().__init__(pools, policies)

    def settle(self) -> None:
        System.settle(self)
        waiting: dict[tuple[str, str], float] = {}
        for pool, state in self.pool_states.items():
            assert state.config is not None
            bound = 2 * state.config.grace_s + state.config.min_runtime_s
            for attempt in oldest_in_share(state):
                where = pool, attempt.id
                since = waiting[where] = self.since.get(where, self.now)
                if self.now - since > bound:
                    self.problems.append(f"{attempt.id} waits at {pool} since {since:g}, it is {self.now:g}")
        shown = self.states()
        self.granted_after_waiting += sum(
            shown[id] == f"allocated@{pool}" for pool, id in self.since if (pool, id) not in waiting
        )
        self.since = waiting


def oldest_in_share(state: PoolState) -> list[Attempt]:
    """Of each requester the oldest that waits in its share (section 4), by sums of its own."""
    sums = summed(state)
    waiting = sorted(
        (one for one in state.attempts.values() if one.state in (QUEUED, NOMINATED)), key=lambda one: one.age
    )
    found: dict[str, Attempt] = {}
    for one in waiting:
        policy = state.policies.get(one.requester)
        if policy is None or one.requester in found:
            continue
        spent = "booked" if one.preemptible else "pinned"
        left_out = one.state == NOMINATED
        if all(
            sums.get((spent, one.requester, key), 0) + (0 if left_out else amount)
            <= policy.reserved.get(key, 0)
            for key, amount in one.amounts
            if key in state.capacity
        ):
            found[one.requester] = one
    return list(found.values())


# ---------------------------------------------------------------- logs, and systems made out of them


def log_sizes(system: System) -> dict[str, int]:
    return {who: len(log) for who, log in system.logs.items()}


def everything(system: System) -> dict[str, Any]:
    """What is visible, what is logged, and when something happens next."""
    cores: dict[str, Coordinator | Pool] = {"coordinator": system.coordinator, **system.pools}
    due = {who: core.next_event_at() for who, core in cores.items()}
    return {**view(system), "log": log_sizes(system), "next": due}


def reopened(system: System) -> System:
    """Another system out of the same logs; the first one goes on as if nothing were."""
    twin = copy.copy(system)
    twin.logs = {who: list(log) for who, log in system.logs.items()}
    twin.epochs, twin.pools = dict(system.epochs), dict(system.pools)
    twin.restart("all")
    return twin


def folded(system: System, who: str) -> PoolState | CoordinatorState:
    """The state that an actor's log tells."""
    state = CoordinatorState() if who == "coordinator" else PoolState()
    for at, body in system.logs[who]:
        state.apply(ev.unpack(body), at)
    return state


def live_state(system: System, who: str) -> PoolState | CoordinatorState:
    return system.coordinator.state if who == "coordinator" else system.pools[who].state


def through_bytes(dumped: dict[str, Any]) -> dict[str, Any]:
    """The dump as a snapshot brings it back."""
    found: dict[str, Any] = msgpack.unpackb(msgpack.packb(dumped), strict_map_key=False)
    return found


class FromSnapshots(System):
    """Whoever is opened again is opened from a snapshot of its state, not from the state that its log tells."""

    def _open_coordinator(self) -> Coordinator:
        told = super()._open_coordinator()
        return Coordinator(CoordinatorState.load(through_bytes(told.state.dump())), told.epoch, self.now)

    def _open_pool(self, name: str) -> Pool:
        told = super()._open_pool(name)
        return Pool(name, PoolState.load(through_bytes(told.state.dump())), told.epoch, self.now)


# ---------------------------------------------------------------- telling what failed


def first_problem(seeds: Iterable[int], check: Callable[[Scenario], str]) -> str:
    """Of the first random case that fails the check: what is wrong, and the case in its smallest form; else ""."""
    for seed in seeds:
        if check(case_of(seed)):
            small = minimised(case_of(seed), lambda case: check(case) != "")
            return f"{small.name}: {check(small)}\n{to_yaml(small, states=False)}"
    return ""


def preempting_again(system: System, id: str) -> bool:
    """A victim that stopped is a victim once more: saying `stopped` again would mean the new grant."""
    return any(
        (attempt := pool.state.attempts.get(id)) is not None and attempt.state == PREEMPTING
        for pool in system.pools.values()
    )


# What the coordinator was told of a taken attempt -> the attempt's state
_TOLD = {"nominated": NOMINATED, "granted": GRANTED, "placed": GRANTED, "preempting": PREEMPTING}


def disagreements(state: CoordinatorState, pools: Mapping[str, PoolState]) -> list[str]:
    """Requests of which the coordinator and the pools say different things, once all has arrived."""
    found: list[str] = []
    for id, request in state.requests.items():
        at = {name: pool.attempts[id] for name, pool in pools.items() if id in pool.attempts}
        wanted: set[str] = set()
        if request.phase == OPEN:
            wanted = set(request.pools)
        elif request.phase == TAKEN:
            wanted = {request.owner}
        if set(at) != wanted:
            found.append(f"{id} is {request.phase} in {sorted(wanted)}, and stands in {sorted(at)}")
        for name, attempt in at.items():
            if attempt.state in HOLDING or attempt.state == NOMINATED:
                if request.phase == FINAL or _TOLD.get(request.told) != attempt.state:
                    found.append(f"{id} is {attempt.state}@{name}, and the coordinator says {request.told!r}")
    return found


def still_kept(name: str, pool: Pool) -> list[str]:
    """What a pool keeps of requests; nothing, once all are final."""
    ledger = pool.state.ledger
    remains: dict[str, Any] = {
        "attempts": sorted(pool.state.attempts),
        "held": {key: n for key, n in ledger.held.items() if n},
        "booked": {key: n for key, n in ledger.booked.items() if n},
        "promised": {key: n for key, n in ledger.promised.items() if n},
        "bids": sorted(pool.bids) + sorted(pool.bids_due),
        "deadlines": sorted(pool.deadlines),
        "waiting": pool.state.queue.size or sorted(pool.state.paused),
    }
    return [f"{name} keeps {what}: {value}" for what, value in remains.items() if value]
