"""The reference (docs/rules.md sections 2 to 10): it holds every scenario and what always holds, and the core
decides as it does.

The invariants are computed here from states and amounts alone, so that a mistake in the reference's own accounting
shows.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from random_cases import difference, minimised, random_case, to_yaml
from reference import Reference, make_world
from reference_ledger import Request

from ray_pools.core.config_rules import PolicyConfig, PoolConfig
from ray_pools.core.system import make_world as make_core_world
from ray_pools.scenario import World, build_world, play_step, run_scenario
from ray_pools.scenario_files import POOL_VERBS, Scenario, Step, load_scenarios, parse_scenarios

SCENARIOS = [
    one
    for path in sorted((Path(__file__).parent / "scenarios").glob("*.yaml"))
    for one in load_scenarios(path)
]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_scenario_holds_on_the_reference(scenario: Scenario) -> None:
    assert [failure.text() for failure in run_scenario(scenario, make_world)] == []


case_of = cache(random_case)  # making one costs as much as playing it

# ---------------------------------------------------------------- section 10, items 1 to 3

Held = dict[tuple[str, str, str, bool], int]  # (pool, requester, key, preemptible) -> held


def held_by_states(world: World, preemptible: Mapping[str, bool], requesters: Mapping[str, str]) -> Held:
    held: Held = {}
    for request, state in world.states().items():
        word, at, pool = state.partition("@")
        assert bool(at) == (word in ("allocated", "preempting")), state
        for key, amount in world.amounts(request).items() if at else ():
            where = (pool, requesters[request], key, preemptible[request])
            held[where] = held.get(where, 0) + amount
    return held


def total(held: Held, pool: str, key: str, requester: str | None = None, hard_only: bool = False) -> int:
    return sum(
        amount
        for (where, whose, what, soft), amount in held.items()
        if (where, what) == (pool, key) and requester in (None, whose) and not (hard_only and soft)
    )


def broken_invariants(world: Reference, before: Held, now: Held) -> list[str]:
    """Each excess that was not there before: after a change of capacity or policy an old one may only fall."""
    broken: list[str] = []
    for pool, totals in world.capacity.items():
        for key, capacity in totals.items():
            held = total(now, pool, key)
            if world.usage()[pool][key] != held:
                broken.append(f"usage of {key} on {pool} is {world.usage()[pool][key]}, states say {held}")
            if held > max(capacity, total(before, pool, key)):
                broken.append(f"{held} {key} held on {pool} of {capacity}")
    for (pool, requester), policy in world.policies.items():
        for key in world.capacity[pool]:
            held, hard = total(now, pool, key, requester), total(now, pool, key, requester, hard_only=True)
            if key in policy.limit and held > max(policy.limit[key], total(before, pool, key, requester)):
                broken.append(f"{requester} holds {held} {key} on {pool}, limit {policy.limit[key]}")
            share = policy.reserved.get(key, 0)
            if hard > max(share, total(before, pool, key, requester, hard_only=True)):
                broken.append(f"{requester} holds {hard} {key} on {pool} for good, reserved {share}")
    queued = world.queue()
    for request, state in world.states().items():
        places = [pool for pool, ids in queued.items() if request in ids]
        if bool(places) != (state == "queued"):
            broken.append(f"{request} is {state} and stands in the queues of {places}")
    return broken


def play_checked(case: Scenario, make: type[Reference] = Reference) -> list[str]:
    world = build_world(case, make)
    assert isinstance(world, Reference)
    before: Held = {}
    for number, step in enumerate(case.steps, 1):
        play_step(world, step)
        requests = world.requests
        now = held_by_states(
            world,
            {id: one.preemptible for id, one in requests.items()},
            {id: one.requester for id, one in requests.items()},
        )
        broken = broken_invariants(world, before, now)
        broken += [
            f"{one.id} is nominated to {one.nominated} and stands in {one.queues}"
            for one in requests.values()
            if one.nominated is not None and (one.queues != [one.nominated] or one.pool is not None)
        ]
        if broken:
            return [f"step {number}: {one}" for one in broken]
        before = now
    return []


@pytest.mark.parametrize("block", range(10))
def test_what_always_holds_on_random_cases(block: int) -> None:
    for seed in range(block * 30, block * 30 + 30):
        assert play_checked(case_of(seed)) == [], f"seed {seed}"


class IgnoresLimits(Reference):
    def cause(self, pool: str, request: Request) -> str | None:
        found = super().cause(pool, request)
        return None if found in ("at_limit", "reserved_in_use", "awaiting_preemption") else found


def test_the_invariants_catch_a_world_that_breaks_them() -> None:
    assert any(play_checked(case_of(seed), IgnoresLimits) for seed in range(50))


# ---------------------------------------------------------------- section 10, item 4


class WatchesShares(Reference):
    """Notes since when each requester's oldest request in its share waits, and those that wait too long."""

    def __init__(self, pools: Mapping[str, PoolConfig], policies: Iterable[PolicyConfig]) -> None:
        super().__init__(pools, policies)
        self.since: dict[tuple[str, str], float] = {}
        self.late: list[str] = []

    def settle(self) -> None:
        super().settle()
        waiting: dict[tuple[str, str], float] = {}
        for pool, options in self.options.items():
            seen: set[str] = set()
            for one in sorted(self.queue_of(pool), key=lambda one: one.age):
                if one.requester in seen or not self.in_share(pool, one):
                    continue
                seen.add(one.requester)
                since = waiting[pool, one.id] = self.since.get((pool, one.id), self.now)
                if self.now - since > 2 * options.grace_s + options.min_runtime_s:
                    self.late.append(f"{one.id} waits on {pool} since {since}, it is {self.now}")
        self.since = waiting


@pytest.mark.parametrize("block", range(4))
def test_a_reserved_share_is_granted_in_time(block: int) -> None:
    """Pools and policies stay as they are here, and so do deadlines: no restarts."""
    shared = 0
    for seed in range(block * 75, block * 75 + 75):
        case = case_of(seed)
        case = replace(case, steps=[step for step in case.steps if step.verb in _KEEP_THE_TERMS])
        world = build_world(case, WatchesShares)
        assert isinstance(world, WatchesShares)
        for step in case.steps:
            play_step(world, step)
            shared += len(world.since)
        assert world.late == [], f"seed {seed}"
    assert shared > 50


_KEEP_THE_TERMS = ("submit", "release", "cancel", "stopped", "renew", "advance")

# ---------------------------------------------------------------- the comparison


@pytest.mark.parametrize("block", range(10))
def test_the_core_decides_as_the_reference_does(block: int) -> None:
    for seed in range(block * 30, block * 30 + 30):
        found = difference(case_of(seed), make_core_world, make_world)
        assert found is None, f"{found.text()}\npython tests/random_cases.py --seeds {seed} makes it small"


@pytest.mark.slow
@pytest.mark.parametrize("block", range(20))
def test_the_core_decides_as_the_reference_does_at_length(block: int) -> None:
    for seed in range(1000 + block * 200, 1200 + block * 200):
        found = difference(case_of(seed), make_core_world, make_world)
        assert found is None, f"{found.text()}\npython tests/random_cases.py --seeds {seed} makes it small"


def test_a_case_comes_out_of_its_seed_alone() -> None:
    assert random_case(7) == random_case(7)
    assert case_of(7).steps != case_of(8).steps


def test_random_cases_have_every_verb_and_refusals() -> None:
    steps = [step for seed in range(120) for step in case_of(seed).steps]
    seen = {(step.verb, step.refused) for step in steps}
    assert {verb for verb, _ in seen} == {*_VERBS}
    assert {"submit", "release", "attach", "set_capacity"} <= {verb for verb, refused in seen if refused}


_VERBS = [
    "submit",
    "release",
    "cancel",
    "stopped",
    "renew",
    "advance",
    "attach",
    "detach",
    "set_capacity",
    "restart",
]


class NobodyIsHeldBack(Reference):
    def holds_back(self, pool: str, request: Request) -> str | None:
        return None


class OldestVictimFirst(Reference):
    def victim_place(self, pool: str, request: Request, grant: Request) -> tuple[float, bool, int]:
        priority, others, newest_first = super().victim_place(pool, request, grant)
        return (priority, others, -newest_first)


class FirstPoolByName(Reference):
    def own_order(self, request: Request) -> list[str]:
        return sorted(request.queues)


class NominationsForEver(Reference):
    def overbooked_nominees(self, pool: str) -> list[Request]:
        return []


class SharesMayBeTaken(Reference):
    def borrows(self, pool: str, request: Request, requester: str, key: str, chosen: list[Request]) -> bool:
        return True


class DeadlinesBeforeLeases(Reference):
    def fire_what_is_due(self) -> None:
        for one in self.with_deadline():
            if one.deadline is not None and one.deadline <= self.now:
                self.victim_stops(one)
        super().fire_what_is_due()


class RestartsKeepDeadlines(Reference):
    def restart(self, who: str) -> None:
        pass


@pytest.mark.parametrize(
    "wrong",
    [
        NobodyIsHeldBack,
        OldestVictimFirst,
        FirstPoolByName,
        NominationsForEver,
        SharesMayBeTaken,
        DeadlinesBeforeLeases,
        RestartsKeepDeadlines,
    ],
)
def test_a_world_with_one_wrong_rule_is_found(wrong: type[Reference]) -> None:
    assert any(difference(case_of(seed), wrong, make_world) is not None for seed in range(300))


def with_gates(case: Scenario, seed: int) -> Scenario:
    """The same case, with pools that are cordoned, drained, emptied and opened again on the way."""
    rng = random.Random(seed)
    steps: list[Step] = []
    for step in case.steps:
        steps.append(step)
        if rng.random() < 0.25:
            steps.append(
                Step(rng.choice(POOL_VERBS), rng.choice([*case.pools, "nowhere"][: len(case.pools)]))
            )
    return replace(case, name=f"{case.name}-gates", steps=steps)


@pytest.mark.parametrize("start", [0, 20])
def test_cordoned_and_draining_pools_decide_as_the_reference(start: int) -> None:
    """Section 9: no grant, no admission, undone nominations, evictions; whatever else happens meanwhile."""
    seeds = range(start, start + 20)
    cases = [with_gates(case_of(seed), seed) for seed in seeds]
    found = [difference(case, make_core_world, make_world) for case in cases]
    assert [one.text() for one in found if one is not None] == []


def test_equal_worlds_do_not_differ() -> None:
    assert [seed for seed in range(20) if difference(case_of(seed), make_world, make_world)] == []


class Crashes(Reference):
    def cancel(self, id: str) -> None:
        raise ZeroDivisionError(id)


def test_a_crash_is_a_difference_and_is_minimised_to_one_step() -> None:
    case = case_of(4)
    case = replace(case, steps=[*case.steps, Step("cancel", "r1")])
    first = difference(case, Crashes, make_world)
    assert first is not None
    assert "ZeroDivisionError" in first.a
    assert first.b == "fine"
    small = minimised(case, lambda one: difference(one, Crashes, make_world) is not None)
    assert [step.verb for step in small.steps] == ["cancel"]


def test_a_minimised_case_is_a_scenario_file_that_holds_on_the_reference() -> None:
    def differs(case: Scenario) -> bool:
        return difference(case, OldestVictimFirst, make_world) is not None

    case = next(one for one in map(case_of, range(300)) if differs(one))
    small = minimised(case, differs)
    assert len(small.steps) < len(case.steps)
    (parsed,) = parse_scenarios(to_yaml(small), "case.yaml")
    assert run_scenario(parsed, make_world) == []
    assert run_scenario(parsed, OldestVictimFirst) != []
