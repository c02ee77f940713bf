"""A log played again (`pools simulate --from-log`): the same policy gives the same decisions, another one others.

Faults it stands for: a rerun that is only like the log; turns, ages, graces, placement groups or later attempts that
are not where they were; what the log can't know taken for known; a request that is told changed and is not.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from live_style import LiveStyle

from ray_pools.cli.app import pools as cli
from ray_pools.core.config_rules import PolicyConfig, PoolConfig
from ray_pools.core.system import System
from ray_pools.simulate.differences import differences
from ray_pools.simulate.history import read_history
from ray_pools.simulate.rerun import Rerun
from ray_pools.store import open_store

PLACEMENT = {"strategy": "PACK", "provision_timeout_s": 60.0}


class Ticking(LiveStyle):
    """A real clock moves between any two turns."""

    def turn(self, who: str, command: Callable[[Any], Any] | None = None) -> Any:
        self.now += 0.0001
        return super().turn(who, command)


class Life:
    """Actors as they run live, with messages and placement groups that take time, and jobs that hold and release."""

    def __init__(self, seed: int, pools: int = 1) -> None:
        rng = self.rng = random.Random(seed)
        self.several = pools > 1
        self.pools = {
            "p": PoolConfig(
                "p",
                {"gpu": 8},
                queueing=rng.choice(["backfill", "strict"]),
                starvation_after_s=rng.choice([0.0, 20.0, 300.0]),
                grace_s=rng.choice([5.0, 30.0]),
                placement=rng.choice([None, PLACEMENT]),
            )
        }
        self.policies = [PolicyConfig("p", f"t{n}", rng.choice([0, 0, 2]), {"gpu": n}) for n in range(4)]
        if self.several:  # and each team may run in both
            self.pools["q"] = self.pools["p"]._replace(name="q", capacity={"gpu": 6})
            self.policies += [PolicyConfig("q", f"t{n}", rng.choice([0, 1, 3]), {"gpu": 1}) for n in range(4)]
        self.live = Ticking(self.pools, self.policies)
        self.ends: dict[str, float] = {}
        self.stops: dict[str, float] = {}
        self.impatient: dict[str, float] = {}
        self.left: dict[str, float] = {}

    def play(self, steps: int) -> None:
        """Every step a little time goes by, and then something may happen."""
        rng, live = self.rng, self.live
        for n in range(steps):
            live.now += rng.choice([0.001, 0.1, 1.0, 3.0])
            if rng.random() < 0.35:
                id = f"r{n}"
                live.submit(
                    id, f"t{rng.randint(0, 3)}", rng.choice([1, 1, 2, 4, 7]), retries=rng.choice([0, 1, 3])
                )
                self.left[id] = rng.choice([1.0, 10.0, 40.0])
                if rng.random() < 0.1:
                    self.impatient[id] = live.now + 5.0
            self.holders()
            self.network()

    def network(self) -> None:
        """Some messages arrive and some errands are done; the rest later. Between several pools all is quick."""
        rng, live = self.rng, self.live
        if self.several:
            live.run()
            return
        for who in list(live.cores):
            live.turn(who)
            for to in live.peers(who):
                if live.has_news(who, to) and not any(f.sender == who for f in live.air):
                    live.send(who, to)
        for _ in range(rng.randint(0, 6)):
            live.now += 0.002
            if live.air:
                live.deliver(live.air.pop(0))
            if live.errands and rng.random() < 0.5:
                live.settle_errand(rng.randrange(len(live.errands)))

    def holders(self) -> None:
        live = self.live
        for id, request in list(live.coordinator.state.requests.items()):
            if request.told == "placed" and request.shown == "allocated":
                self.ends.setdefault(f"{id}/{request.k}", live.now + self.left[id])
                if live.now >= self.ends[f"{id}/{request.k}"]:
                    live.about("release", id)
            elif request.shown == "preempting":
                if live.now >= self.stops.setdefault(
                    f"{id}/{request.k}", live.now + self.rng.choice([0.5, 4.0, 99.0])
                ):
                    live.about("stopped", id)
            elif request.shown == "queued" and live.now >= self.impatient.get(id, 1e9):
                live.about("cancel", id)


@pytest.mark.parametrize("seed", range(12))
def test_the_same_policy_gives_the_same_decisions_at_the_same_times(seed: int) -> None:
    life = Life(seed)
    life.play(150)
    history = read_history(life.live.address, ["p"])
    rerun = Rerun(life.pools, life.policies, history).run()
    assert rerun.decisions == history.decisions
    assert len(history.decisions) > 12
    said = differences(rerun)
    assert said["decisions"]["identical"]
    assert said["changed"] == []
    assert said["assumed_run_times"] <= said["requests"] / 2
    life.live.close()


@pytest.mark.parametrize("seed", range(6))
def test_likewise_where_several_pools_may_run_each_request(seed: int) -> None:
    """Which pool takes it follows from bids: they cross messages, and a grant comes after it."""
    life = Life(seed, pools=2)
    life.play(120)
    history = read_history(life.live.address, ["p", "q"])
    rerun = Rerun(life.pools, life.policies, history).run()
    assert [each.what for each in rerun.decisions] == [each.what for each in history.decisions]
    said = differences(rerun)
    assert said["decisions"]["identical"]
    assert said["decisions"]["latest_by_s"] < 0.01
    assert said["changed"] == []
    life.live.close()


@pytest.mark.slow
def test_the_same_policy_gives_the_same_decisions_in_many_lives() -> None:
    for seed in range(100, 400):
        life = Life(seed)
        life.play(150)
        history = read_history(life.live.address, ["p"])
        assert Rerun(life.pools, life.policies, history).run().decisions == history.decisions, f"seed {seed}"
        life.live.close()


# --- another policy, by the command

POOL = PoolConfig("p", {"gpu": 4}, grace_s=10.0)


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    """guest holds all for 100 s; owner asks at 40, waits for the rest of it, runs 20 s; late is rejected."""
    world = System({"p": POOL}, [PolicyConfig("p", "owner", 1, {"gpu": 4}), PolicyConfig("p", "guest", 5)])
    world.coordinator.change([("policy", PolicyConfig("p", "owner", 1))])
    world.settle()
    world.submit("held", "guest", {"gpu": 4}, retries=3)
    world.advance(40.0)
    world.submit("asks", "owner", {"gpu": 4}, retries=3)
    world.submit("large", "guest", {"gpu": 64})
    world.advance(60.0)
    world.release("held")
    world.advance(20.0)
    world.release("asks")
    world.advance(200.0)
    world.submit("last", "guest", {"gpu": 1})
    for name, rows in world.logs.items():
        store = open_store(f"sqlite://{tmp_path}/store", name if name == "coordinator" else f"pool:{name}")
        store.open()
        store.append(rows, 0)
        store.close()
    return tmp_path


def invoke(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli, ["simulate", *map(str, arguments)])


CONFIG = """
pools:
  p: {capacity: {gpu: 4}, placement: none, grace_s: 10}
policies:
  - {pool: p, requester: owner, priority: 1, reserved: {gpu: 4}}
  - {pool: p, requester: guest, priority: 5}
"""


def test_another_policy_request_by_request(logs: Path) -> None:
    config = logs / "shares.yaml"
    config.write_text(CONFIG)
    result = invoke(config, "--from-log", "--store", logs / "store", "--json")
    assert result.exit_code == 0, result.output
    said = json.loads(result.output)
    assert not said["decisions"]["identical"]
    assert said["decisions"]["the_same_up_to"] == 1
    changed = {change["id"]: change for change in said["changed"]}
    assert set(changed) == {"asks", "held"}
    assert changed["asks"]["was"] == {"state": "released", "pool": "p", "wait_s": 60.0, "preempted": 0}
    # nobody was ever stopped in the log, so it is taken to stop at once
    assert changed["asks"]["now"] == {"state": "released", "pool": "p", "wait_s": 0.0, "preempted": 0}
    assert changed["held"]["now"]["preempted"] == 1
    assert said["total"]["now"]["rejected"] == said["total"]["was"]["rejected"] == 1
    text = invoke(config, "p", "--from-log", "--store", logs / "store").output
    assert (
        "asks (owner, gpu 4): in the log waited 60 s, released in p; now waited 0 s, released in p\n" in text
    )
    assert "now waited 0 s, was preempted once, released in p\n" in text
    assert "the log has 2 configurations, one after the other" in text
    table = text.partition("decisions in the log")[0].splitlines()
    assert max(len(line.rstrip()) for line in table) <= 80


def test_the_logs_own_policy(logs: Path) -> None:
    config = logs / "same.yaml"
    config.write_text(CONFIG.replace(", reserved: {gpu: 4}", ""))
    result = invoke(config, "--from-log", "--store", logs / "store")
    assert result.exit_code == 0, result.output
    assert "the same 3 decisions, in the same order" in result.output


def test_bad_input(logs: Path) -> None:
    config = logs / "shares.yaml"
    config.write_text(CONFIG)
    for arguments, code, said in (
        (["q", "--from-log", "--store", logs / "store"], 2, "a pool of"),
        (["--from-log", "--store", logs / "nowhere"], 2, "--store = "),
        (["--from-log", "--store", logs / "store", "--against", config], 2, "--from-log takes CONFIG"),
        (["--from-log", "--store", logs / "store", "--stop-after", "0"], 2, "--from-log takes CONFIG"),
        ([], 2, "one TRACE is needed"),
        (["a.csv", "b.csv"], 2, "one TRACE is needed"),
        (["a.csv", "--store", logs / "store"], 2, "--store goes with --from-log"),
    ):
        result = invoke(config, *arguments)
        assert result.exit_code == code, result.output
        assert said in result.output
        assert "Traceback" not in result.output
