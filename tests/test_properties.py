"""What always holds (docs/rules.md section 10), and what follows from it, on random cases.

Each test is named after what it promises and fails when that rule is broken in the core.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from property_net import Net
from property_worlds import (
    Endless,
    Finite,
    FromSnapshots,
    KeepsBooks,
    KeepsTheRules,
    SharesInTime,
    Watched,
    everything,
    first_problem,
    folded,
    live_state,
    log_sizes,
    preempting_again,
    preemptions_in,
    random_submission,
    random_world,
    reopened,
    through_bytes,
    unlike,
)
from random_cases import difference, view

from ray_pools.core.config_rules import PolicyConfig, PoolConfig
from ray_pools.core.system import System, make_world
from ray_pools.scenario import build_world, play_step
from ray_pools.scenario_files import Scenario, Step

BLOCKS = [range(first, first + 50) for first in range(0, 300, 50)]
in_blocks = pytest.mark.parametrize("seeds", BLOCKS, ids=lambda seeds: f"{seeds[0]}-{seeds[-1]}")

REQUESTERS = ("t1", "t2", "t3", "t4")
FOR_EVER = 10**9  # retries: a victim always comes back

# ---------------------------------------------------------------- 10.1 to 10.3


def watched(case: Scenario, make: type[Watched]) -> str:
    world = build_world(case, make)
    assert isinstance(world, Watched)
    for number, step in enumerate(case.steps, 1):
        play_step(world, step)
        if world.problems:
            return f"step {number}: {world.problems[0]}"
    return ""


@in_blocks
def test_one_pool_at_most_and_no_bound_exceeded_after_every_decision(seeds: range) -> None:
    """10.1, 10.2 and 10.3; what a change left above its bound only falls."""
    assert first_problem(seeds, lambda case: watched(case, KeepsTheRules)) == ""


@in_blocks
def test_the_ledger_that_is_kept_equals_one_that_is_summed_anew(seeds: range) -> None:
    """Section 4: held, booked, claimed and pinned, per key and per requester, after every decision."""
    assert first_problem(seeds, lambda case: watched(case, KeepsBooks)) == ""


# ---------------------------------------------------------------- 10.6 and 10.7: restarts, logs and snapshots


def restarted_at_every_step(case: Scenario) -> str:
    world = build_world(case, make_world)
    assert isinstance(world, System)
    for number, step in enumerate(case.steps, 1):
        play_step(world, step)
        twin = reopened(world)
        different = unlike({**view(world), "log": log_sizes(world)}, {**view(twin), "log": log_sizes(twin)})
        if different:
            return f"step {number}, before and after a restart: {different}"
    return ""


@in_blocks
def test_a_restart_of_everything_changes_nothing_at_any_step(seeds: range) -> None:
    """10.6: states, usage, queues and causes are as before, and nothing is logged for it."""
    assert first_problem(seeds, restarted_at_every_step) == ""


def replayed(case: Scenario) -> str:
    world = build_world(case, make_world)
    assert isinstance(world, System)
    for number, step in enumerate(case.steps, 1):
        play_step(world, step)
        if number % 3 and number < len(case.steps):
            continue
        for who in world.logs:
            first, second = folded(world, who), folded(world, who)
            loaded = type(first).load(through_bytes(first.dump()))
            digests = {
                "live": live_state(world, who).digest(),
                "folded": first.digest(),
                "folded again": second.digest(),
                "loaded": loaded.digest(),
            }
            if len(set(digests.values())) > 1:
                return f"step {number}, {who}: {digests}"
    return ""


@in_blocks
def test_a_log_gives_the_state_that_wrote_it_and_so_does_a_snapshot(seeds: range) -> None:
    """10.7, byte for byte: the live state, its log folded twice, and its dump loaded."""
    assert first_problem(seeds[::2], replayed) == ""


def with_restarts(case: Scenario) -> Scenario:
    """Everything starts anew at every third step, so that what was loaded has something to decide."""
    steps: list[Step] = []
    for number, step in enumerate(case.steps):
        steps += [Step("restart", "all"), step] if number % 3 == 2 else [step]
    return replace(case, steps=steps)


def unlike_when_loaded(case: Scenario) -> str:
    found = difference(with_restarts(case), make_world, FromSnapshots)
    return "" if found is None else found.text()


@in_blocks
def test_a_state_out_of_a_snapshot_decides_as_one_out_of_the_log(seeds: range) -> None:
    """10.7: what is derived (ledger, queue, order of grants) comes back with the state."""
    assert first_problem(seeds, unlike_when_loaded) == ""


# ---------------------------------------------------------------- 10.4: the reserved-share guarantee


def crowd(seed: int) -> SharesInTime:
    """Many things that happen where pools and policies stay; no victim stops before its deadline."""
    rng = random.Random(seed)
    pools, policies = random_world(rng, REQUESTERS)
    small = seed % 2 == 1
    if (
        small
    ):  # small and short work: what is released is wanted at once by someone else, who is shielded then
        pools = {
            name: PoolConfig(name, pool.capacity, grace_s=5.0, min_runtime_s=30.0)
            for name, pool in pools.items()
        }
    world = SharesInTime(pools, policies)
    for number in range(150 if small else 40):
        what = rng.random()
        holders = [id for id, state in world.states().items() if state.startswith("allocated")]
        if what < (0.35 if small else 0.1) and holders:
            world.release(rng.choice(holders))
        elif what < 0.15 and world.states() and not small:
            world.cancel(rng.choice(list(world.states())))
        elif what < 0.75:
            retries = rng.choice([0, 2, FOR_EVER])
            one = random_submission(rng, f"r{number}", REQUESTERS, pools, retries)
            if small and rng.random() < 0.8:
                one = one._replace(amounts={"gpu": 1}, preemptible=True)
            world.submit(*one)
        else:
            world.advance(rng.choice([2.0, 6.0] if small else [1.0, 5.0, 15.0, 40.0]))
    world.advance(1000.0)
    return world


@pytest.mark.parametrize("block", range(4))
def test_a_reserved_share_is_granted_within_two_graces_and_the_shortest_runtime(block: int) -> None:
    """10.4, for each requester's oldest request in its share, on every pool and at every instant."""
    granted = 0
    for seed in range(block * 100, block * 100 + 100):
        world = crowd(seed)
        assert world.problems == [], f"seed {seed}"
        granted += world.granted_after_waiting
    assert granted > 20, "hardly anybody had to wait for its share: the cases say nothing"


# ---------------------------------------------------------------- 10.5: progress


def endless_work(seed: int) -> Finite:
    """Twelve requests that never finish and always come back, until time brings nothing new."""
    rng = random.Random(seed)
    pools, policies = random_world(rng, REQUESTERS)
    world = Finite(pools, policies)
    for number in range(12):
        world.submit(*random_submission(rng, f"r{number}", REQUESTERS, pools, FOR_EVER))
        if rng.random() < 0.3:
            world.advance(rng.choice([5.0, 30.0]))
    world.advance(1e9)
    return world


@pytest.mark.parametrize("block", range(10))
def test_preemptions_end(block: int) -> None:
    """10.5, with 5,000 cases in all: no run of more than 1,000 decisions, and then nothing is due any more."""
    preemptions = 0
    for seed in range(block * 500, block * 500 + 500):
        try:
            world = endless_work(seed)
        except Endless as endless:
            raise AssertionError(f"seed {seed}: {endless}") from endless
        assert world.decisions <= Finite.decisions_max, f"seed {seed}"
        assert not any("preempting" in state for state in world.states().values()), f"seed {seed}"
        preemptions += preemptions_in(world) if seed % 10 == 0 else 0
    assert preemptions > 25, "hardly anybody was preempted: the cases say nothing"


# ---------------------------------------------------------------- stability


def settled_again(case: Scenario) -> str:
    world = build_world(case, make_world)
    assert isinstance(world, System)
    for number, step in enumerate(case.steps, 1):
        play_step(world, step)
        for how in (world.settle, lambda: world.restart("all")) if number % 4 == 0 else (world.settle,):
            before = everything(world)
            how()
            if how == world.settle:
                different = unlike(before, everything(world))
            else:  # deadlines are soft: each has its full term again
                different = unlike({**before, "next": None}, {**everything(world), "next": None})
            if different:
                return f"step {number}: {different}"
            world.settle()
            if log_sizes(world) != before["log"] or view(world) != {k: before[k] for k in view(world)}:
                return f"step {number}: settled twice, {unlike(before, everything(world))}"
    return ""


@in_blocks
def test_a_settled_system_settled_again_changes_nothing_and_logs_nothing(seeds: range) -> None:
    """Section 5: the walk ends where nothing can be done, also after a restart of everything."""
    assert first_problem(seeds, settled_again) == ""


# ---------------------------------------------------------------- order independence


class Gathering(System):
    """While `gathering`, submissions are stamped and nobody hears of them."""

    gathering = False

    def settle(self) -> None:
        if not self.gathering:
            super().settle()

    def hear(self, rng: random.Random | None) -> None:
        """The pools hear of all that is new, in an order and in portions of `rng`; None: as it was submitted."""
        names = list(self.pools)
        for name in rng.sample(names, len(names)) if rng else names:
            message = self.coordinator.outgoing(name)
            items = rng.sample(message.items, len(message.items)) if rng else message.items
            while rng and len(items) > 1 and rng.random() < 0.7:
                cut = rng.randrange(1, len(items))
                # a portion that says nothing of how far the stream goes: what comes later is not taken as heard
                self.pools[name].exchange(message._replace(items=items[:cut], upto=0))
                items = items[cut:]
            self.pools[name].exchange(message._replace(items=items))
        self.gathering = False
        self.settle()


def gathered(seed: int, order: random.Random | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """What is visible once all is settled, at once and 60 s later."""
    rng = random.Random(seed)
    pools, policies = random_world(rng, REQUESTERS)
    world = Gathering(pools, policies)
    for number in range(rng.randrange(8)):
        retries = rng.choice([0, FOR_EVER])
        world.submit(*random_submission(rng, f"old{number}", REQUESTERS, pools, retries))
        world.advance(rng.choice([0.0, 25.0]))
    world.gathering = True
    for number in range(rng.randint(2, 14)):
        retries = rng.choice([0, FOR_EVER])
        world.submit(*random_submission(rng, f"new{number}", REQUESTERS, pools, retries))
    world.hear(order)
    at_once = view(world)
    world.advance(60.0)
    return at_once, view(world)


@pytest.mark.parametrize("block", range(4))
def test_submissions_of_the_same_ages_end_the_same_in_whatever_order_pools_hear_of_them(block: int) -> None:
    """Section 5: age is stamped once, where requests enter, and nothing else tells equals apart."""
    for seed in range(block * 100, block * 100 + 100):
        first = gathered(seed, None)
        for order in range(3):
            assert gathered(seed, random.Random(order)) == first, f"seed {seed}, order {order}"


# ---------------------------------------------------------------- idempotence


def said_twice(case: Scenario) -> str:
    world = build_world(case, make_world)
    assert isinstance(world, System)
    for number, step in enumerate(case.steps, 1):
        refusal = play_step(world, step)
        if step.verb not in ("submit", "release", "cancel", "stopped", "renew"):
            continue
        if step.verb == "stopped" and preempting_again(world, step.argument):
            continue
        before = everything(world)
        again = play_step(world, step)
        if (refusal is None) != (again is None):
            return f"step {number}: {refusal or 'accepted'}, and again: {again or 'accepted'}"
        different = unlike(before, everything(world))
        if different:
            return f"step {number} again: {different}"
    return ""


@in_blocks
def test_a_verb_said_twice_counts_once(seeds: range) -> None:
    """Sections 2 and 8: submit, release, cancel, stopped and renew, repeated at once, change and log nothing."""
    assert first_problem(seeds, said_twice) == ""


# ---------------------------------------------------------------- lost, repeated, late and reordered messages


PLACEMENT = {"strategy": "PACK", "provision_timeout_s": 60.0}


def unreliable(seed: int) -> Net:
    """Live actors that exchange messages over a bad network, with crashes; then all arrives, and time runs out."""
    rng = random.Random(seed)
    pools, policies = random_world(rng, REQUESTERS)
    placing = rng.sample(list(pools), rng.randint(0, len(pools)))
    pools.update({name: pools[name]._replace(placement=PLACEMENT) for name in placing})
    net = Net(pools, policies, rng)
    for number in range(25):
        for _ in range(rng.randrange(12)):
            net.shake()
        disturb(net, number, pools, policies)
    net.run_out()
    return net


def disturb(net: Net, number: int, pools: dict[str, PoolConfig], policies: list[PolicyConfig]) -> None:
    """One command at the coordinator, or time."""
    rng, coordinator = net.rng, net.coordinator
    known = list(coordinator.state.requests.values())
    what = rng.random()
    if what < 0.5 or not known:
        one = random_submission(rng, f"r{number}", REQUESTERS, pools, rng.choice([0, 1, 3]))
        lease_s = rng.choice([0.0, 0.0, 0.0, 40.0])
        options = {"preemptible": one.preemptible, "retries": one.retries, "lease_s": lease_s}
        net.submit(one.id, one.requester, one.amounts, **options)
    elif what < 0.65:
        ending = rng.choice([coordinator.release, coordinator.release, coordinator.cancel])
        net.turn("", lambda: ending(rng.choice(known)))
    elif what < 0.75:
        net.turn("", lambda: coordinator.stopped(rng.choice(known)))
    elif what < 0.8:
        pool = rng.choice(list(coordinator.state.pools.values()))
        total = max(1, pools[pool.name].capacity["gpu"] - rng.randint(0, 1))
        reserved = sum(one.reserved.get("gpu", 0) for one in policies if one.pool == pool.name)
        changed = pool._replace(capacity={**pool.capacity, "gpu": max(total, reserved)})
        net.turn("", lambda: coordinator.change([("pool", changed, coordinator.state.uids[pool.name])]))
    elif what < 0.85 and policies:
        policy = rng.choice(policies)
        changed_policy = policy._replace(priority=rng.choice([-1, 0, 1, 5]), limit={})
        net.turn("", lambda: coordinator.change([("policy", changed_policy)]))
    else:
        net.now += rng.choice([1.0, 10.0, 30.0])


@pytest.mark.parametrize("block", range(4))
def test_lost_repeated_late_and_reordered_messages_and_crashes_break_no_rule(block: int) -> None:
    """10.1 to 10.3 after every turn; at last both sides agree, and nothing that could go on stands still (10.6)."""
    seen: Counter[str] = Counter()
    for seed in range(block * 60, block * 60 + 60):
        net = unreliable(seed)
        assert net.problems == [], f"seed {seed}"
        assert net.loose_ends() == [], f"seed {seed}"
        seen += net.seen
    assert min(seen[what] for what in _FAULTS) > 10, seen


_FAULTS = (
    *("lost", "repeated", "restart", "stale", "crash before the append", "crash after the append"),
    *("not placed", "group lost"),
)


def test_a_bid_to_an_earlier_run_of_the_coordinator_says_nothing_of_the_bids_before_it() -> None:
    """The coordinator starts anew while a pool's second bid is under way: the first one is wanted again."""
    pools = {name: PoolConfig(name, {"gpu": 1}) for name in ("a", "b")}
    policies = [PolicyConfig("a", "t1", priority=0), PolicyConfig("b", "t1", priority=1)]
    net = Net(pools, policies, random.Random(0))
    net.submit("full", "t1", {"gpu": 1})
    net.quiet_down()
    for id in ("r1", "r2"):
        net.submit(id, "t1", {"gpu": 1})
        net.send("", "b")
        net.deliver_all()  # b has heard of it, and answered
        net.send("b", "")
        if id == "r1":
            net.deliver_all()
    net.open("")
    net.deliver_all()
    net.run_out()
    assert net.loose_ends() == []
    assert net.coordinator.state.requests["full"].owner == "b"
    assert net.coordinator.state.requests["r1"].owner == "a"


def test_an_older_bid_that_arrives_late_counts_no_more() -> None:
    """Room that a pool no longer has: who believed it would hand the request over, and get it back."""
    pools = {"a": PoolConfig("a", {"gpu": 2}), "b": PoolConfig("b", {"gpu": 1})}
    policies = [PolicyConfig("a", "t1", priority=0), PolicyConfig("b", "t1", priority=1)]
    net = Net(pools, policies, random.Random(0))
    for id in ("at b", "at a"):
        net.submit(id, "t1", {"gpu": 1})
        net.quiet_down()
    net.submit("r1", "t1", {"gpu": 1})
    net.send("", "a")
    net.deliver(0)  # a bids room; b, which comes first, has not heard of it
    (late,) = (flight for flight in net.air if flight.sender == "a")
    net.deliver_all()
    coordinator = net.coordinator
    shrunk = pools["a"]._replace(capacity={"gpu": 1})
    net.turn("", lambda: coordinator.change([("pool", shrunk, coordinator.state.uids["a"])]))
    for _ in range(2):  # the second time a hears that its answer is known: it has no reason to say it again
        net.send("", "a")
        net.deliver_all()
    net.air.append(late)
    net.deliver_all()
    net.run_out()
    assert net.states() == {"at b": "allocated", "at a": "allocated", "r1": "queued"}
    assert coordinator.state.requests["r1"].k == 1
    assert net.loose_ends() == []


def test_who_has_run_for_the_shortest_runtime_is_preempted_without_any_other_event() -> None:
    """Section 6, live: time alone makes a candidate of a grant, and a pool must look again then."""
    pools = {"a": PoolConfig("a", {"gpu": 1}, min_runtime_s=20.0)}
    policies = [PolicyConfig("a", "borrower"), PolicyConfig("a", "owner", reserved={"gpu": 1})]
    net = Net(pools, policies, random.Random(0))
    net.submit("borrowed", "borrower", {"gpu": 1})
    net.quiet_down()
    net.now = 5.0
    net.submit("due", "owner", {"gpu": 1})
    net.run_out()
    assert net.states() == {"borrowed": "preempted", "due": "allocated"}
    assert net.now == 20.0 + pools["a"].grace_s


def test_a_cancel_that_crosses_the_end_of_its_grant_finds_nothing_to_stop() -> None:
    """Sections 6 and 8, live: the group was lost and the pool has ended the attempt; then the cancel arrives."""
    pools = {"a": PoolConfig("a", {"gpu": 1}, placement=PLACEMENT)}
    net = Net(pools, [PolicyConfig("a", "t1")], random.Random(0))
    net.submit("r1", "t1", {"gpu": 1}, retries=1)
    net.quiet_down()
    pool, coordinator = net.pools["a"], net.coordinator
    net.turn("a", lambda: pool.unplaced("r1", 1, "its node is gone"))
    net.work(0)
    net.turn("", lambda: coordinator.cancel(coordinator.state.requests["r1"]))
    net.run_out()
    assert net.loose_ends() == []
    assert net.states() == {"r1": "cancelled"}
