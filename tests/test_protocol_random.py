"""Random faults on cores that run as live actors do (docs/protocol.md), all of them at once.

Faults it stands for: messages that are lost, repeated, late, or of zombies; processes that end between any two turns;
appends that fail; groups that don't come up, or are lost; pools that are silent, join, change or begin to place, while
clients submit, release, cancel and confirm. Every row is audited as it becomes durable (docs/rules.md 10.1 to 10.3,
and who may grant what); what a client was told stays so; and once messages flow again and holders release, every
request is final and no pool keeps anything.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from live_style import COORDINATOR, Flight, LiveStyle, Stopped

from ray_pools.core import explain
from ray_pools.core import records as ev
from ray_pools.core.config_rules import CORDONED, DRAINING, OPEN, PolicyConfig, PoolConfig
from ray_pools.core.eviction import evict
from ray_pools.core.pool import Place, Pool
from ray_pools.core.queue import GRANTED, PREEMPTING
from ray_pools.core.requests import FINAL
from ray_pools.core.system import System
from ray_pools.errors import PoolsError
from ray_pools.store.memory import memory_log

PLACEMENT = {"strategy": "PACK", "provision_timeout_s": 60.0}
TEAMS = ("t1", "t2", "t3")


def random_pool(rng: random.Random, name: str) -> PoolConfig:
    return PoolConfig(
        name,
        {"gpu": rng.randint(2, 5)},
        queueing=rng.choice(["backfill", "strict"]),
        starvation_after_s=rng.choice([0.0, 20.0, 300.0]),
        grace_s=rng.choice([0.0, 10.0, 30.0]),
        min_runtime_s=rng.choice([0.0, 0.0, 20.0]),
        placement=rng.choice([None, PLACEMENT]),
    )


def random_policy(rng: random.Random, pool: str, team: str) -> PolicyConfig:
    reserved = rng.choice([{}, {}, {"gpu": 1}])
    limit = rng.choice([{}, {}, {}, {"gpu": rng.randint(1, 4)}])
    return PolicyConfig(pool, team, rng.choice([0, 0, 1, 5]), reserved, limit)


class Adversary:
    """Plays one seed. `seen` counts what happened."""

    def __init__(self, seed: int) -> None:
        rng = self.rng = random.Random(seed)
        self.seen: Counter[str] = Counter()
        names = ["p", "q", "r"][: rng.choice([1, 2, 2, 3])]
        pools = {name: random_pool(rng, name) for name in names}
        policies = [random_policy(rng, n, t) for n in names for t in TEAMS if rng.random() < 0.85]
        fits = dict.fromkeys(names, 0)
        for policy in policies:
            fits[policy.pool] += policy.reserved.get("gpu", 0)
        pools = {n: p._replace(capacity={"gpu": max(p.capacity["gpu"], fits[n])}) for n, p in pools.items()}
        self.world = LiveStyle(pools, policies)
        self.acknowledged: set[str] = set()
        self.final: dict[str, str] = {}
        self.pools_made = 1
        self.zombies: list[tuple[str, Stopped]] = []

    def play(self, commands: int = 22) -> None:
        """Everything goes wrong; then nothing does any more."""
        for number in range(commands):
            for _ in range(self.rng.randrange(14)):
                self.shake()
                self.look()
            self.command(number)
            self.look()
        self.calm()
        self.look()

    def look(self) -> None:
        """What must hold at any moment."""
        assert self.world.auditor.problems == []
        requests = self.world.coordinator.state.requests
        for id in self.acknowledged:
            assert id in requests, f"{id} was acknowledged and is forgotten"
            request = requests[id]
            before = self.final.get(id)
            assert before is None or before == request.state, f"{id} was {before}, and is {request.shown}"
            if request.phase == FINAL:
                self.final[id] = request.state

    # --- what clients and operators do

    def command(self, number: int) -> None:
        rng, world = self.rng, self.world
        what = rng.random()
        known = list(world.coordinator.state.requests)
        if what < 0.5 or not known:
            hard = rng.random() < 0.15
            options = {
                "preemptible": not hard,
                "retries": rng.choice([0, 1, 3]),
                "lease_s": rng.choice([0.0, 0.0, 0.0, 45.5]),
            }
            id, team, gpu = f"r{number}", rng.choice(TEAMS), 1 if hard else rng.choice([1, 1, 2, 3])
            if world.try_to(lambda: world.submit(id, team, gpu, **options)):
                self.acknowledged.add(id)
        elif what < 0.8:
            method = rng.choice(["release", "release", "cancel", "stopped", "renew"])
            world.try_to(lambda: world.about(method, rng.choice(known)))
        elif what < 0.9:
            self.change()
        else:
            world.now += rng.choice([1.0, 10.0, 31.0, 100.0])

    def change(self) -> None:
        """Other numbers for a pool or a policy, a policy less, a pool more or less; many are refused."""
        rng, world = self.rng, self.world
        state = world.coordinator.state
        name = rng.choice(list(state.pools) or ["p"])
        team = rng.choice(TEAMS)
        what = rng.random()
        change: tuple[Any, ...]
        if what < 0.35:
            change = ("pool", random_pool(rng, name), state.uids.get(name, "p#0"))
        elif what < 0.7:
            change = ("policy", random_policy(rng, name, team))
        elif what < 0.85:
            change = ("unpolicy", team, name)
        elif what < 0.93:  # one that was taken away may come back, with another uid and its old log
            name = rng.choice(["z", *(name for name in world.pools if name not in state.pools)])
            if name in state.pools:
                return
            world.restart(name)
            self.pools_made += 1
            self.seen["pool joins"] += 1
            policy = random_policy(rng, name, team)
            new = ("pool", random_pool(rng, name), f"{name}#{self.pools_made}")
            world.try_to(lambda: world.ask("change", [new, ("policy", policy)]))
            return
        else:
            change = ("unpool", name)
        if world.try_to(lambda: world.ask("change", [change])):
            self.seen[f"change {change[0]}"] += 1

    # --- what goes wrong

    def shake(self) -> None:
        rng, world = self.rng, self.world
        what = rng.random()
        who = rng.choice(list(world.cores))
        if what < 0.28:
            self.speak(who)
        elif what < 0.32:
            zombie = world.restart(who)
            if zombie is not None:
                self.zombies.append((who, zombie))
            self.seen["restart"] += 1
        elif what < 0.36:
            world.fails_in[who] = rng.randrange(3)
        elif what < 0.4:
            world.try_to(lambda: world.turn(who))
        elif what < 0.42:
            self.zombie_speaks()
        elif what < 0.44:
            self.lose_group()
        elif what < 0.46 and who != COORDINATOR:
            world.try_to(lambda: world.ask("set_silent", who))
        elif what < 0.56:
            self.errand()
        elif world.air:
            self.arrive(rng.choice(world.air), what)

    def speak(self, who: str) -> None:
        world = self.world
        for to in world.peers(who):
            if world.has_news(who, to):
                world.send(who, to)

    def arrive(self, flight: Flight, what: float) -> None:
        """Lost, or worked in; then gone, or in the air for ever."""
        if what < 0.65:
            self.seen["lost"] += 1
            self.world.air.remove(flight)
            return
        self.world.try_to(lambda: self.world.deliver(flight))
        if what < 0.72:
            self.seen["repeated"] += 1
        else:
            self.world.air.remove(flight)

    def zombie_speaks(self) -> None:
        """What a process that was replaced still has to say goes out."""
        if not self.zombies:
            return
        who, zombie = self.rng.choice(self.zombies)
        self.seen["zombie"] += 1
        core, before = zombie.core, (self.world.cores[who], self.world.stores[who])
        self.world.cores[who], self.world.stores[who] = core, zombie.store
        for to in [COORDINATOR] if isinstance(core, Pool) else core.state.pools:
            self.world.send(who, to)
        self.world.cores[who], self.world.stores[who] = before

    def errand(self) -> None:
        rng, world = self.rng, self.world
        if not world.errands:
            return
        place = rng.randrange(len(world.errands))
        effect = world.errands[place].effect
        if isinstance(effect, Place) and rng.random() < 0.25:
            self.seen["not placed"] += 1
            world.try_to(lambda: world.not_placed(effect.id))
        else:
            world.try_to(lambda: world.settle_errand(place))

    def lose_group(self) -> None:
        world = self.world
        name = self.rng.choice(world.pools)
        grants = [a for a in world.pool(name).state.attempts.values() if a.state in (GRANTED, PREEMPTING)]
        grants = [a for a in grants if a.placed and a.placed.get("pg")]
        if grants:
            one = self.rng.choice(grants)
            self.seen["group lost"] += 1
            world.try_to(
                lambda: world.turn(name, lambda core: core.unplaced(one.id, one.k, "its node is gone"))
            )

    # --- the end

    def stuck(self) -> str:
        """One of two nominations of which a limit (or share) that was lowered allows only one: by section 4 each
        waits for the other. Nobody else may wait when nobody holds.
        """
        for name in self.world.peers(COORDINATOR):
            pool = self.world.pool(name)
            for attempt in pool.state.nominated.values():
                if explain.cause(pool, attempt) in ("at_limit", "reserved_in_use"):
                    self.seen["stuck"] += 1
                    return attempt.id
        raise AssertionError(f"all wait, and nobody holds: {self.world.states()}")

    def calm(self) -> None:
        """Nothing goes wrong any more, and whoever holds releases."""
        world = self.world
        world.fails_in.clear()
        for who in world.cores:
            log = memory_log(world.address, who if who == COORDINATOR else "pool:" + who)
            assert log is not None
            log.next_fault = ""
        for _ in range(60):
            world.run()
            holding = [id for id, state in world.states().items() if "@" in state]
            if not world.coordinator.state.waiting_or_holding:
                break
            if not holding and not any(world.pool(name).state.paused for name in world.pools):
                world.about("cancel", self.stuck())
            for id in holding:
                world.about("release", id)
            world.run()
            world.advance(world.now + 50.0)
        world.run()
        assert world.left_behind() == []


@pytest.mark.parametrize("block", range(6))
def test_whatever_goes_wrong_no_rule_is_broken_and_nothing_is_left_behind(block: int) -> None:
    """300 seeds; with `Adversary(seed).play()` one of them can be played alone."""
    seen: Counter[str] = Counter()
    for seed in range(block * 50, block * 50 + 50):
        adversary = Adversary(seed)
        try:
            adversary.play()
        except BaseException as error:
            error.args = (f"seed {seed}: {error}",)
            raise
        seen += adversary.seen
        seen["failed turn"] += adversary.world.failed_turns
        seen["refused"] += len(adversary.world.refusals)
        adversary.world.close()
    assert min(seen[what] for what in _FAULTS) > 5, seen


class Closing(Adversary):
    """With an operator who cordons, drains, empties and opens pools again (docs/rules.md section 9)."""

    def command(self, number: int) -> None:
        if self.rng.random() < 0.3:
            self.change()
        else:
            super().command(number)

    def change(self) -> None:
        rng, world = self.rng, self.world
        state = world.coordinator.state
        if not state.pools or rng.random() < 0.4:
            super().change()
            return
        name, to = rng.choice(list(state.pools)), rng.choice([CORDONED, DRAINING, DRAINING, OPEN])
        change = ("pool", state.pools[name]._replace(state=to), state.uids[name])
        if world.try_to(lambda: world.ask("change", [change])):
            self.seen[to] += 1
        for _ in range(rng.choice([0, 1, 2]) if to == DRAINING else 0):
            world.try_to(lambda: world.turn(COORDINATOR, lambda core: evict(core, name, "alice@host")))
            self.shake()

    def calm(self) -> None:
        state = self.world.coordinator.state
        self.seen["evicted"] += sum(
            isinstance(ev.unpack(row.body), ev.Evicted)
            for who, store in self.world.stores.items()
            if who != COORDINATOR
            for row in store.read()
        )
        for name, pool in list(state.pools.items()):
            opened = ("pool", pool._replace(state=OPEN), state.uids[name])
            while not self.world.try_to(lambda: self.world.ask("change", [opened])):  # noqa: B023 - called at once
                pass
        super().calm()


@pytest.mark.parametrize(
    "block", [0, *(pytest.param(block, marks=pytest.mark.slow) for block in range(1, 10))]
)
def test_pools_that_are_closed_and_emptied_break_no_rule_and_leave_nothing_behind(block: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(block * 20, block * 20 + 20):
        adversary = Closing(seed)
        try:
            adversary.play(40)
        except BaseException as error:
            error.args = (f"seed {seed}: {error}",)
            raise
        seen += adversary.seen
        adversary.world.close()
    assert min(seen[what] for what in (CORDONED, DRAINING, OPEN, "evicted", "lost", "restart")) > 2, seen


_FAULTS = (
    *("lost", "repeated", "restart", "zombie", "failed turn", "refused", "not placed", "group lost"),
    *("change pool", "change policy", "change unpolicy"),
)


# ---------------------------------------------------------------- every append of a day, one after the other


def a_day(world: LiveStyle) -> None:
    """Something of everything: sharing, preemption, a retry, a change, a cancel, releases."""

    def again(act: Callable[[], Any]) -> None:
        while not world.try_to(act):
            pass
        world.run()

    again(lambda: world.submit("low", "a", 2, retries=1))
    again(lambda: world.submit("low2", "a", 2))
    again(lambda: world.submit("wait", "a", 1))
    again(lambda: world.submit("high", "b", 2))
    again(lambda: world.about("stopped", "low"))
    again(lambda: world.ask("change", [("policy", PolicyConfig("q", "b", 3))]))
    again(lambda: world.submit("third", "b", 1))
    again(lambda: world.about("stopped", "low2"))
    again(lambda: world.about("cancel", "wait"))
    for id in ("high", "third", "low", "low2"):
        again(lambda: world.about("release", id))  # noqa: B023 - called at once


def day(who: str, fails_in: int | None) -> LiveStyle:
    pools = {"p": PoolConfig("p", {"gpu": 2}, placement=PLACEMENT), "q": PoolConfig("q", {"gpu": 2})}
    world = LiveStyle(pools, [PolicyConfig("p", "a", 1), PolicyConfig("q", "a"), PolicyConfig("p", "b", 9)])
    if fails_in is not None:
        world.fails_in[who] = fails_in
    a_day(world)
    assert world.left_behind() == []
    assert world.auditor.problems == []
    world.close()
    return world


@pytest.mark.parametrize("who", [COORDINATOR, "p", "q"])
def test_whichever_append_fails_the_day_ends_the_same(who: str) -> None:
    """Fault: a link, a bid or a placement group that a turn had moved stays where it was, and something hangs."""
    smooth = day(who, None)
    assert smooth.failed_turns == 0
    for number in range(1000):
        world = day(who, number)
        if not world.failed_turns:
            assert number > 10
            return
        assert world.states() == smooth.states(), f"append {number} of {who}"
    raise AssertionError("a day without an end")


# ---------------------------------------------------------------- the same as in lockstep


def shaken(world: LiveStyle, rng: random.Random) -> None:
    """Messages are lost, repeated and late; what arrives brings turns. Then all arrives."""
    for _ in range(rng.randrange(10)):
        who = rng.choice(list(world.cores))
        if rng.random() < 0.5 and world.has_news(who, next(iter(world.peers(who)))):
            world.send(who, world.peers(who)[0])
        elif world.air:
            flight = rng.choice(world.air)
            if rng.random() < 0.6:
                world.try_to(lambda: world.deliver(flight))  # noqa: B023 - called at once
            if rng.random() < 0.6:
                world.air.remove(flight)
    world.run()


def both(seed: int) -> None:
    """One pool, live and in lockstep: after each command both show the same."""
    rng = random.Random(seed)
    pool = random_pool(rng, "p")._replace(placement=None, capacity={"gpu": rng.randint(3, 6)})
    policies = [random_policy(rng, "p", team) for team in TEAMS]
    system, world = System({"p": pool}, policies), LiveStyle({"p": pool}, policies)
    for number in range(25):
        ids = list(system.states()) or ["nobody"]
        what, id, team = rng.random(), rng.choice(ids), rng.choice(TEAMS)
        if what < 0.5:
            hard, gpu = rng.random() < 0.2, rng.choice([1, 1, 2, 3])
            # retries: a live pool walks before it hears that its victim waits again. Half a second: no two ends at once
            lease_s = rng.choice([0.0, 0.0, 30.5])
            name = f"r{number}"
            system.submit(name, team, {"gpu": gpu}, preemptible=not hard, lease_s=lease_s)
            world.submit(name, team, gpu, preemptible=not hard, lease_s=lease_s)
        elif what < 0.75:
            verb = rng.choice(["release", "cancel", "renew", "stopped"])
            refused = [outcome(lambda: getattr(system, verb)(id)), outcome(lambda: world.about(verb, id))]  # noqa: B023
            assert refused[0] == refused[1] or verb == "stopped"
        elif what < 0.85:
            policy = random_policy(rng, "p", team)
            assert outcome(lambda: system.attach(policy)) == outcome(  # noqa: B023
                lambda: world.ask("change", [("policy", policy)])  # noqa: B023
            )
        elif what < 0.9:
            who = rng.choice(["coordinator", "p"])
            system.restart(who)
            world.restart(who)
        else:
            seconds = rng.choice([1.0, 10.0, 31.0])
            system.advance(seconds)
            world.advance(world.now + seconds)
        shaken(world, rng)
        in_order = [attempt.id for attempt in world.pool("p").state.in_order()]
        live = world.states(), world.held("p"), in_order
        assert live == (system.states(), system.usage()["p"], system.queue()["p"]), (
            f"seed {seed}, step {number}"
        )
    assert world.auditor.problems == []
    world.close()


def outcome(act: Callable[[], Any]) -> str:
    """What refused it, or nothing."""
    try:
        act()
    except PoolsError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("block", range(3))
def test_one_pool_live_decides_as_in_lockstep(block: int) -> None:
    """Fault: loss, repetition or order of messages, or a restart, changes who is granted and who is stopped."""
    for seed in range(block * 100, block * 100 + 100):
        both(seed)
