"""Random scenarios, and two worlds compared on them step by step (docs/rules.md sections 2 to 9).

`random_case(seed)` is an ordinary Scenario: a small, valid configuration in which things are scarce, and
steps of every verb, some of which must be refused. `compare` plays it on two worlds and gives the first step after
which they differ in anything visible; `minimised` drops what the difference does not need.

    python tests/random_cases.py --seeds 0-500
"""

from __future__ import annotations

import argparse
import importlib
import random
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import yaml
from reference import Reference
from reference import make_world as make_reference

from ray_pools.core.config_rules import PolicyConfig, PoolConfig
from ray_pools.errors import PoolsError
from ray_pools.scenario import World, WorldFactory, build_world, play_step
from ray_pools.scenario_files import Scenario, Step

VERB_WEIGHTS = {
    "submit": 42,
    "release": 9,
    "advance": 9,
    "stopped": 7,
    "cancel": 4,
    "renew": 3,
    "attach": 5,
    "set_capacity": 6,
    "restart": 2,
    "detach": 1,
}
ADVANCES_S = (0, 1, 5, 10, 15, 20, 30, 60)

# ---------------------------------------------------------------- one case


def random_case(seed: int) -> Scenario:
    """A scenario out of a seed, played on the reference as it is made, so that steps find what they need."""
    rng = random.Random(seed)
    long = rng.random() < 0.07  # few are long: what needs a crowded queue shows only there
    pools = _pools(rng, rng.choice([2, 3] if long else [1, 1, 2, 2, 3]))
    requesters = [f"t{number}" for number in range(1, rng.randint(2, 5) + 1)]
    policies = _policies(rng, pools, requesters)
    case = Scenario(name=f"seed-{seed}", pools=pools, policies=[*policies], steps=[])
    world = build_world(case, make_reference)
    assert isinstance(world, Reference)
    fixed = rng.random() < 0.4  # no change of pools or policies in these
    weights = {verb: 0 if fixed and verb in _CONFIGURES else weight for verb, weight in VERB_WEIGHTS.items()}
    maker = _StepMaker(rng, world, case, requesters)
    for _ in range(rng.randint(45, 75) if long else rng.randint(8, 40)):
        verb = rng.choices(list(weights), list(weights.values()))[0]
        if not fixed and rng.random() < 0.1 and any(world.nominees(pool) for pool in world.capacity):
            verb = "set_capacity"
        if verb == "stopped" and not world.with_deadline() and rng.random() < 0.9:
            verb = "submit"
        step = maker.make(verb)
        case.steps.append(replace(step, refused=play_step(world, step) is not None))
    return case


_CONFIGURES = ("attach", "detach", "set_capacity")


def _pools(rng: random.Random, count: int) -> dict[str, dict[str, Any]]:
    second = rng.choice([None, None, "lic", "step_run", "mcpu"])
    pools: dict[str, dict[str, Any]] = {}
    for name in ("a", "b", "c")[:count]:
        capacity = {"gpu": rng.randint(2, 8)}
        if second is not None and rng.random() < 0.8:
            capacity[second] = rng.randint(1, 5)
        pools[name] = {"capacity": capacity, "grace": rng.choice([0, 10, 10, 30, 30])}
        if rng.random() < 0.3:
            pools[name]["queueing"] = "strict"
        if rng.random() < 0.4:
            pools[name]["min_runtime"] = rng.choice([10, 20, 60])
        if rng.random() < 0.5:
            pools[name]["starvation_after"] = rng.choice([0, 10, 40])
    return pools


def _policies(
    rng: random.Random, pools: Mapping[str, Mapping[str, Any]], requesters: list[str]
) -> list[dict[str, Any]]:
    policies: list[dict[str, Any]] = []
    for pool, options in pools.items():
        left = dict(options["capacity"])
        for requester in rng.sample(requesters, len(requesters)):
            if rng.random() < 0.12:
                continue
            policy = _policy(rng, pool, requester, left, options["capacity"])
            for key, amount in policy.get("reserved", {}).items():
                left[key] -= amount
            policies.append(policy)
    return policies


def _policy(
    rng: random.Random, pool: str, requester: str, left: Mapping[str, int], capacity: Mapping[str, int]
) -> dict[str, Any]:
    reserved = {
        key: rng.randint(0, min(left[key], 1 + capacity[key] // 2)) for key in left if rng.random() < 0.6
    }
    limit = {
        key: rng.randint(max(reserved.get(key, 0), total // 2), total + 1)
        for key, total in capacity.items()
        if rng.random() < 0.25 and reserved.get(key, 0) <= total + 1
    }
    policy: dict[str, Any] = {
        "pool": pool,
        "requester": requester,
        "priority": rng.choice([0, 0, 1, 1, 5, -1]),
    }
    if reserved:
        policy["reserved"] = reserved
    if limit:
        policy["limit"] = limit
    return policy


@dataclass
class _StepMaker:
    rng: random.Random
    world: Reference
    case: Scenario
    requesters: list[str]
    submitted: int = 0

    def make(self, verb: str) -> Step:
        return Step(verb, getattr(self, f"_{verb}")())

    def _id(self, *prefixes: str) -> str:
        """An id in one of these states, mostly; else any; rarely one that is unknown."""
        states = self.world.states()
        wanted = [id for id, state in states.items() if state.startswith(prefixes)]
        if not states or self.rng.random() < 0.02:
            return "nobody"
        return self.rng.choice(wanted if wanted and self.rng.random() < 0.85 else list(states))

    def _submit(self) -> dict[str, Any]:
        rng = self.rng
        earlier = [step.argument for step in self.case.steps if step.verb == "submit"]
        if earlier and rng.random() < 0.05:  # again: the same, or with other content
            again = dict(rng.choice(earlier))
            if rng.random() < 0.5:
                again["retries"] = again.get("retries", 0) + 1
            return again
        self.submitted += 1
        submit: dict[str, Any] = {"id": f"r{self.submitted}", "requester": rng.choice(self.requesters)}
        if rng.random() < 0.25:
            submit["resources"] = self._amounts((1, 1, 1, 2, 2, 3))
            submit["preemptible"] = False
        else:
            submit["resources"] = self._amounts((1, 1, 2, 2, 3, 3, 4, 6))
        if rng.random() < 0.4:
            submit["retries"] = rng.randint(1, 3)
        if rng.random() < 0.25:
            submit["lease"] = rng.choice([10, 20, 45])
        if rng.random() < 0.02:
            submit.update(rng.choice(_BAD))
        return submit

    def _amounts(self, sizes: tuple[int, ...]) -> dict[str, int]:
        rng = self.rng
        keys = sorted({key for totals in self.world.capacity.values() for key in totals} - {"step_run"})
        amounts = {key: rng.choice([0, 1, 1, 2]) for key in keys if key != "gpu" and rng.random() < 0.6}
        if rng.random() < 0.9 or not amounts:
            amounts["gpu"] = rng.choice(sizes)
        return amounts

    def _release(self) -> str:
        return self._id("allocated")

    def _cancel(self) -> str:
        return self._id("queued", "preempting")

    def _stopped(self) -> str:
        return self._id("preempting")

    def _renew(self) -> str:
        with_lease = [one.id for one in self.world.with_lease()]
        return self.rng.choice(with_lease) if with_lease and self.rng.random() < 0.9 else self._id("queued")

    def _advance(self) -> float:
        return self.rng.choice(ADVANCES_S)

    def _restart(self) -> str:
        return self.rng.choice(["all", "coordinator", *self.world.capacity])

    def _pool(self) -> str:
        return "nowhere" if self.rng.random() < 0.03 else self.rng.choice(list(self.world.capacity))

    def _attach(self) -> dict[str, Any]:
        pool, requester = self._pool(), self.rng.choice(self.requesters)
        capacity = self.world.capacity.get(pool, {"gpu": 4})
        left = dict(capacity)  # now and then too much, which is refused
        if self.rng.random() < 0.65:
            for (where, whose), policy in self.world.policies.items():
                if where == pool and whose != requester:
                    left = {key: left[key] - policy.reserved.get(key, 0) for key in left}
        return _policy(self.rng, pool, requester, left, capacity)

    def _detach(self) -> dict[str, str]:
        return {"requester": self.rng.choice(self.requesters), "pool": self._pool()}

    def _set_capacity(self) -> dict[str, Any]:
        pool = self._pool()
        nominating = [one for one in self.world.capacity if self.world.nominees(one)]
        if nominating and self.rng.random() < 0.7:  # rare, and what a shrunk pool undoes
            pool = self.rng.choice(nominating)
        total = self.world.capacity.get(pool, {}).get("gpu", 0)
        if total and self.rng.random() < 0.5:
            return {"pool": pool, "capacity": {"gpu": max(0, total - self.rng.choice([1, 1, 2, -1]))}}
        key = self.rng.choice([*self.world.capacity.get(pool, {}), "gpu", "step_run", "lic"])
        return {"pool": pool, "capacity": {key: self.rng.choice([None, 0, 1, 2, 3, 4, 6, 8])}}


_BAD: tuple[dict[str, Any], ...] = (
    {"resources": {"gpu": -1}},
    {"resources": {"gpu": True}},
    {"resources": {"gpu": 1.5}},
    {"requester": ""},
    {"id": ""},
    {"lease": 0},
    {"retries": -1},
    {"preemptible": "no"},
    {"priority": 3},
)


# ---------------------------------------------------------------- two worlds


@dataclass(frozen=True)
class Difference:
    """The first step (from 1; 0 is the configuration) after which two worlds are not the same."""

    case: Scenario
    step: int
    what: str
    a: Any
    b: Any

    def text(self) -> str:
        return f"{self.case.name}, step {self.step}: {self.what}\n    a: {self.a}\n    b: {self.b}"


def view(world: World) -> dict[str, Any]:
    """Everything visible of a world."""
    states = dict(world.states())
    return {
        "states": states,
        "usage": {pool: dict(held) for pool, held in world.usage().items()},
        "queue": {pool: list(ids) for pool, ids in world.queue().items()},
        "reasons": {id: dict(world.reasons(id)) for id in states},
    }


def compare(seed: int, make_a: WorldFactory, make_b: WorldFactory) -> Difference | None:
    return difference(random_case(seed), make_a, make_b)


def difference(case: Scenario, make_a: WorldFactory, make_b: WorldFactory) -> Difference | None:
    """Plays the case on both worlds; the first difference, or None. A crash of either is a difference."""
    worlds: list[World] = []
    try:
        made = [_outcome(partial(build_world, case, make)) for make in (make_a, make_b)]
        worlds = [value for value, problem in made if problem == ""]
        if len(worlds) < 2:
            problems = [problem for _, problem in made]
            same = problems[0] == problems[1] == "refused"
            return None if same else Difference(case, 0, "configuration", *problems)
        for number, step in enumerate(case.steps, 1):
            views = [_outcome(partial(_played, world, step)) for world in worlds]
            for _, problem in views:
                if problem:
                    return Difference(
                        case, number, "a world failed", *(problem or "fine" for _, problem in views)
                    )
            a, b = (value for value, _ in views)
            for part in a:
                if a[part] != b[part]:
                    return Difference(case, number, part, *_unlike(a[part], b[part]))
        return None
    finally:
        for world in worlds:
            world.close()


def _played(world: World, step: Step) -> dict[str, Any]:
    refusal = play_step(world, step)
    return {"refused": refusal is not None, **view(world)}


def _outcome(call: Callable[[], Any]) -> tuple[Any, str]:
    """(value, ""), or (None, what went wrong)."""
    try:
        return call(), ""
    except PoolsError:
        return None, "refused"
    except Exception:  # noqa: BLE001  # a world that crashes is what is looked for
        return None, traceback.format_exc()


def _unlike(a: Any, b: Any) -> tuple[Any, Any]:
    """Only the entries that differ."""
    if not isinstance(a, dict) or not isinstance(b, dict):
        return a, b
    keys = [key for key in sorted({*a, *b}) if a.get(key) != b.get(key)]
    return {key: a.get(key) for key in keys}, {key: b.get(key) for key in keys}


# ---------------------------------------------------------------- a smaller case with the same trouble


def minimised(case: Scenario, fails: Callable[[Scenario], bool]) -> Scenario:
    """Drops steps, policies and pools as long as `fails` stays true of what is left."""
    shrunk = True
    while shrunk:
        shrunk = False
        size = max(1, len(case.steps) // 2)
        while size:
            start = 0
            while start < len(case.steps):
                smaller = replace(case, steps=case.steps[:start] + case.steps[start + size :])
                if fails(smaller):
                    case, shrunk = smaller, True
                else:
                    start += size
            size //= 2
        for smaller in _simpler_configurations(case):
            if fails(smaller):
                case, shrunk = smaller, True
                break
    return case


def _simpler_configurations(case: Scenario) -> list[Scenario]:
    found: list[Scenario] = []
    for pool in case.pools:
        pools = {name: options for name, options in case.pools.items() if name != pool}
        found.append(
            replace(case, pools=pools, policies=[one for one in case.policies if one["pool"] != pool])
        )
    for index in range(len(case.policies)):
        found.append(replace(case, policies=case.policies[:index] + case.policies[index + 1 :]))
    for index, policy in enumerate(case.policies):
        for word in ("reserved", "limit", "priority"):
            if policy.get(word):
                without = {key: value for key, value in policy.items() if key != word}
                found.append(
                    replace(case, policies=case.policies[:index] + [without] + case.policies[index + 1 :])
                )
    for index, step in enumerate(case.steps):
        for word in ("preemptible", "retries", "lease") if step.verb == "submit" else ():
            if word in step.argument:
                argument = {key: value for key, value in step.argument.items() if key != word}
                steps = case.steps[:index] + [replace(step, argument=argument)] + case.steps[index + 1 :]
                found.append(replace(case, steps=steps))
    return found


def to_yaml(case: Scenario, states: bool = True) -> str:
    """The case as a scenario file; with `states`, each step says what the reference makes of it."""
    steps: list[dict[str, Any]] = []
    world = build_world(case, make_reference)
    for step in case.steps:
        written: dict[str, Any] = {step.verb: step.argument}
        if play_step(world, step) is not None:
            written["refused"] = True
        elif states:
            written["expect"] = world.states()
        steps.append(written)
    data = {"name": case.name, "pools": dict(case.pools), "policies": list(case.policies), "steps": steps}
    text: str = yaml.dump([data], sort_keys=False, default_flow_style=None, width=110, allow_unicode=True)
    return text


# ---------------------------------------------------------------- the command


def _named(dotted: str) -> WorldFactory:
    module, _, name = dotted.partition(":")
    made: WorldFactory = getattr(importlib.import_module(module), name or "make_world")
    return made


def _core_world(pools: dict[str, PoolConfig], policies: list[PolicyConfig]) -> World:
    return _named("ray_pools.core.system:make_world")(pools, policies)


def _seeds(text: str) -> range:
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Compare two worlds on random cases.")
    parser.add_argument("--seeds", type=_seeds, default=range(200), help="A-B, or one seed")
    parser.add_argument("--world", type=_named, default=_core_world)
    parser.add_argument("--against", type=_named, default=make_reference)
    parser.add_argument("--failures", type=int, default=1, help="stop after so many differing seeds")
    parser.add_argument("--show", action="store_true", help="print the case of each seed, compare nothing")
    options = parser.parse_args(arguments)
    found = 0
    for seed in options.seeds:
        if options.show:
            print(to_yaml(random_case(seed)))
            continue
        first = compare(seed, options.world, options.against)
        if first is None:
            continue
        found += 1
        print(first.text())
        small = minimised(first.case, lambda case: _differs(case, options))
        last = difference(small, options.world, options.against)
        assert last is not None
        print(f"in its smallest form, with a = --world and b = --against:\n{last.text()}\n\n{to_yaml(small)}")
        if found >= options.failures:
            break
    print(f"{len(options.seeds)} seeds asked for, {found} found to differ")
    return 1 if found else 0


def _differs(case: Scenario, options: argparse.Namespace) -> bool:
    return difference(case, options.world, options.against) is not None


if __name__ == "__main__":
    sys.exit(main())
