"""The operators' commands on a live cluster: `pools why` for each cause, pools that come and go with their actors and
placement groups.

Faults it stands for: a text without the numbers; a pool that `apply` names and nobody makes; a deleted pool whose actor
or groups stay.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from live_pools import WAIT_S, LivePools, live_pools

from ray_pools.actors import deploy
from ray_pools.errors import SlotPreempted

pytestmark = [pytest.mark.ray, pytest.mark.slow]

CONFIG = """\
namespace: operate
pools:
  p: {capacity: {gpu: 4}, placement: none, grace_s: 600}
policies:
  - {pool: p, requester: a, priority: 1, reserved: {gpu: 2}}
  - {pool: p, requester: b, priority: 9, limit: {gpu: 3}}
  - {pool: p, requester: c}
"""
PLACED = """\
  r: {capacity: {gpu: 2}, grace_s: 1, placement: {labels: {ray.io/market-type: spot}}}
policies:
  - {pool: r, requester: d}
"""


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LivePools]:
    with live_pools(tmp_path_factory.mktemp("operate"), CONFIG) as made:
        yield made


def cli(live: LivePools, *arguments: str, code: int = 0) -> str:
    command = [str(Path(sys.executable).parent / "pools"), *arguments]
    env = {**live.env, "RAY_POOLS_NAMESPACE": "operate", "RAY_POOLS_STORE": live.store}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout if code == 0 else done.stderr


def submit(live: LivePools, id: str, requester: str, gpus: int, **more: Any) -> Any:
    ticket = live.client.submit(requester, gpus=gpus, id=id, lease_s=0, **more)
    until = time.monotonic() + WAIT_S
    while ticket.status()["state"] == "queued" and not any(
        each.get("cause") for each in ticket.explain().values()
    ):
        assert time.monotonic() < until
        time.sleep(0.05)
    return ticket


def test_why_names_the_numbers_for_each_cause(live: LivePools) -> None:
    submit(live, "stranger", "nobody", 1)
    submit(live, "key", "a", 1, pool_resources={"tpu": 3})
    submit(live, "large", "b", 5)
    submit(live, "over", "b", 4)
    submit(live, "fixed", "a", 3, preemptible=False)
    held = submit(live, "b1", "b", 3)
    submit(live, "b2", "b", 1)
    submit(live, "f1", "a", 1, preemptible=False)
    submit(live, "f2", "a", 1, preemptible=False)
    submit(live, "f3", "a", 1, preemptible=False)
    wanted = {
        "stranger": "no_policy: requester nobody has no policy on p",
        "key": "no_capacity_for_key: it asks for 3 tpu, which p does not list",
        "large": "exceeds_capacity: it asks for 5 gpu; p has 4 in all",
        "over": "exceeds_limit: it asks for 4 gpu; the limit of b on p is 3",
        "fixed": "exceeds_reserved: it is not preemptible and asks for 3 gpu; a has 2 reserved on p",
        "b2": "at_limit: b has 3 of its limit of 3 gpu, and it asks for 1 more",
        "f2": "awaiting_preemption: 1 gpu are held by work that is stopping (b1), ",
        "f3": "reserved_in_use: it is not preemptible, and non-preemptible work of a has 2 of its 2 reserved gpu",
    }
    for id, words in wanted.items():
        assert words in cli(live, "why", id)
    live.client.release(held.id)
    submit(live, "w", "b", 2)
    assert "waiting_capacity: 1 gpu more needed in p; nobody borrows any" in cli(live, "why", "w")
    cancel_all(live)
    cli(live, "pool", "update", "p", "--queueing", "strict")
    submit(live, "b3", "b", 2)
    submit(live, "a1", "a", 1)
    submit(live, "head", "a", 2)
    submit(live, "last", "c", 1)
    said = "it could be granted, but head of a, of priority 1, waits before it for 1 gpu more"
    assert f"2 of 2 in the queue, behind_head: {said}" in cli(live, "why", "last")
    cancel_all(live)


def cancel_all(live: LivePools) -> None:
    for view in live.client.list(states=["queued", "allocated", "preempting"]):
        live.client.cancel(view["id"])


def test_pools_come_by_apply_and_go_by_delete(live: LivePools) -> None:
    file = live.folder / "more.yaml"
    file.write_text(CONFIG.replace("policies:\n", PLACED))
    assert "+ pool r: capacity gpu 2" in cli(live, "apply", str(file))
    cli(live, "pool", "update", "p", "--queueing", "backfill")
    assert "nothing to do" in cli(live, "apply", str(file))
    exported = live.folder / "exported.yaml"
    cli(live, "export", "-o", str(exported))
    assert "nothing to do" in cli(live, "apply", str(exported))
    slot = submit(live, "d1", "d", 1).wait(WAIT_S)
    cli(live, "pool", "cordon", "r")
    waiting = submit(live, "d2", "d", 1)
    assert "cordoned" in cli(live, "why", "d2")
    said = json.loads(cli(live, "pool", "delete", "r", "--yes", "--force", "--json"))
    with pytest.raises(SlotPreempted):  # its holder hears of it
        slot.check()
    assert said["deleted"]
    assert waiting.status()["state"] == "rejected"
    assert live.client.get("d1")["state"] == "preempted"
    assert deploy.running_actors("operate") == ["ray-pools:coordinator", "ray-pools:pool:p"]
    history = json.loads(cli(live, "history", "--request", "d1", "--json"))
    assert any(each["event"] == "Evicted" for each in history)
    assert "preemption: request d1 of d must stop in r" in cli(live, "events", "--from-start", "--once")
