"""Simulation beside the actors' own shells in real time, without Ray: real turns, clocks, messages and sqlite logs.

Faults it stands for: a rerun that does not know how actors batch commands into turns, how late a timer is, or how bids
cross messages; an estimate that has nothing to do with the wait that follows.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from statistics import median

import pytest
from estimated_waits import estimated_waits
from test_shells import Shells

from ray_pools import wire
from ray_pools.actors import shell as shell_module
from ray_pools.actors.coordinator import CoordinatorShell
from ray_pools.actors.pool import PoolShell
from ray_pools.core.config_rules import PolicyConfig, PoolConfig
from ray_pools.simulate.differences import differences
from ray_pools.simulate.history import read_history
from ray_pools.simulate.rerun import Rerun

TEAMS = ("t1", "t2", "t3", "t3")
LIMIT_S = 100.0


class RealTime(Shells):
    """Coordinator and pools by the wall clock, each with a log on disk."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path, pools: dict[str, PoolConfig]) -> None:
        make_clock = shell_module.make_clock
        super().__init__(monkeypatch)
        monkeypatch.setattr(shell_module, "make_clock", make_clock)
        self.address = f"sqlite://{folder}"
        self.pools = pools

    def start(self) -> None:
        options = {"clock": "wall", "prewarm": False, "holder_watch": False, "resend_s": 0.01}
        self.actors = {wire.coordinator_actor_name(): CoordinatorShell(self.address, "ns", options)}
        for name in self.pools:
            self.actors[wire.pool_actor_name(name)] = PoolShell(self.address, "ns", name, options)

    def stop(self) -> None:
        for name, shell in self.actors.items():
            for peer in getattr(shell, "_peers", {}).values():
                peer.close()
            if name != wire.coordinator_actor_name():
                shell.coordinator.close()
                shell.placer.close()

    async def job(self, id: str, requester: str, gpus: int, seconds: float, retries: int) -> None:
        """Waits for its slot, holds it for so long in all, stops when it is told to, and releases."""
        options = {"expected_run_s": seconds}
        amounts = {"gpu": gpus, "step_run": 1}
        await self.ask(
            "submit", id=id, requester=requester, amounts=amounts, retries=retries, options=options
        )
        request, held_from, k = self.coordinator.state.requests[id], 0.0, 0
        loop, left_s = asyncio.get_running_loop(), seconds
        while request.phase != "final":
            await asyncio.sleep(0.004)
            if request.told == "placed" and request.k != k:
                k, held_from = request.k, loop.time()
            elif request.told == "placed" and loop.time() - held_from >= left_s:
                await self.ask("release", id=id)
            elif request.told == "preempting" and request.k == k:
                left_s, k = max(left_s - (loop.time() - held_from), 0.0), 0
                await asyncio.sleep(0.02)
                await self.ask("stopped", id=id)


def played(shells: RealTime, policies: list[PolicyConfig], count: int, seed: int) -> None:
    rng = random.Random(seed)

    async def play() -> None:
        shells.start()
        changes = [["pool", pool.to_wire(), f"{name}#1"] for name, pool in shells.pools.items()]
        await shells.ask("change", changes=[*changes, *(["policy", policy.to_wire()] for policy in policies)])
        tasks = []
        for n in range(count):
            await asyncio.sleep(rng.choice([0.0, 0.01, 0.05, 0.1]))
            job = shells.job(
                f"r{n}",
                rng.choice(TEAMS),
                rng.choice([1, 1, 2, 4]),
                rng.choice([0.1, 0.3, 0.8]),
                rng.choice([0, 9]),
            )
            tasks.append(asyncio.create_task(job))
        await asyncio.gather(*tasks)
        shells.stop()

    asyncio.run(asyncio.wait_for(play(), LIMIT_S))


@pytest.mark.slow
@pytest.mark.parametrize("names", [["p"], ["p", "q"]])
def test_real_actors_logs_again_and_their_waits_as_they_were_estimated(
    names: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pools = {name: PoolConfig(name, {"gpu": 6}, grace_s=0.2, starvation_after_s=0.5) for name in names}
    policies = [
        PolicyConfig(name, team, priority, {"gpu": share})
        for name in names
        for team, priority, share in (("t1", 0, 3), ("t2", 1, 1), ("t3", 0, 0))
    ]
    shells = RealTime(monkeypatch, tmp_path, pools)
    played(shells, policies, 60, seed=3)
    history = read_history(shells.address, names)
    rerun = Rerun(pools, policies, history).run()
    said = differences(rerun)
    assert [each.what for each in rerun.decisions] == [each.what for each in history.decisions]
    assert said["decisions"]["identical"]
    assert said["changed"] == []
    assert said["total"]["was"]["preempted"] > 0
    waits = list(estimated_waits(shells.address, names, 0.05))
    assert len(waits) > 5
    # better than nothing: nearer to what came than 0 s is
    assert median(each.error_s for each in waits) < median(each.wait_s for each in waits)
