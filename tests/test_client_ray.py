"""The client on live Ray, through live actors: work runs inside the granted placement group and only there, a
preempted holder is told by push and leaves, and a SIGKILL of the coordinator or of a pool is a delay for who waits
and who gives back (docs/rules.md section 10, item 6). Drivers run in processes of their own, as a user's do."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ray_pools.local_cluster import LocalCluster

pytestmark = pytest.mark.ray

CLUSTER_YAML = Path(__file__).parent.parent / "cluster.yaml"

CONFIG = """
pools:
  main: {capacity: {gpu: 4}, grace_s: 600}
  seats: {capacity: {seat: 1}, placement: none}
  brief: {capacity: {gpu: 2}, grace_s: 1}
policies:
  - {requester: vision, pool: main, reserved: {gpu: 2}}
  - {requester: speech, pool: main, reserved: {gpu: 2}}
  - {requester: vision, pool: seats}
  - {requester: low, pool: brief}
  - {requester: high, pool: brief, priority: 9}
"""

UP = """
import sys
from ray_pools.actors import deploy
from ray_pools.client import connect_ray
from ray_pools.config import load_config
config = load_config(sys.argv[1])
with deploy.empty_directory():
    connect_ray(sys.argv[2], quiet=True)
    deploy.up(config.core_pools(), config.core_policies(), namespace=config.namespace, store=config.store, options={})
"""

PREAMBLE = """
import os, signal, threading
import ray_pools as pools
client = pools.connect(quiet=True)
import ray
from ray.util import get_current_placement_group, placement_group_table

def refused(error, call):
    try:
        call()
    except error as problem:
        return str(problem)
    raise AssertionError(f"{error.__name__} was due")
"""

WORK = """
@ray.remote
def where():  # a default task: 1 CPU
    return get_current_placement_group().id.hex()

@ray.remote(num_cpus=0)
def parent():
    return ray.get(where.options(num_cpus=0).remote())

@ray.remote(num_gpus=2, num_cpus=0)
class Trainer:
    def where(self):
        return get_current_placement_group().id.hex(), os.environ["CUDA_VISIBLE_DEVICES"]

@ray.remote(num_cpus=0)
def nested():
    with pools.connect() as inside, inside.slot("vision", pool_resources={"seat": 1}) as slot:
        return slot.pool, slot.scheduling_strategy, slot.placement_group

with client.slot("vision", gpus=2) as slot:
    group = slot.placement_group
    assert ray.get(where.options(scheduling_strategy=slot.scheduling_strategy).remote()) == group.id.hex()
    assert ray.get(parent.options(scheduling_strategy=slot.scheduling_strategy_for(0)).remote()) == group.id.hex()
    trainer = Trainer.options(**slot.options()).remote()
    placed, devices = ray.get(trainer.where.remote())
    assert (placed, len(devices.split(","))) == (group.id.hex(), 2)
    refused(pools.BadInput, lambda: slot.scheduling_strategy_for(1))
    assert ray.get(nested.remote()) == ("seats", "DEFAULT", None)
assert placement_group_table(group)["state"] == "REMOVED"
refused(pools.SlotOver, lambda: slot.scheduling_strategy)

gang = client.submit("vision", bundles=[{"gpus": 1}, {"gpus": 1}], strategy="SPREAD")
assert [bundle["GPU"] for bundle in gang.wait().bundles] == [1.0, 1.0]
gang.release()

assert "namespace 'other'" in refused(pools.Unreachable, lambda: pools.connect(namespace="other"))
assert "no_policy" in refused(pools.SlotRejected, client.submit("nobody", gpus=1).wait)
"""

PREEMPTION = """
borrower = client.submit("speech", gpus=4, retries=1)
slot = borrower.wait()
group = slot.placement_group
told = threading.Event()
slot.on_preempt(lambda each: told.set())
with client.slot("vision", pool_resources={"seat": 1}):  # another request of the same process
    owner = client.submit("vision", gpus=2)
    assert told.wait(60)
assert 0 < slot.grace_left_s() <= 600
refused(pools.SlotPreempted, slot.check)
assert owner.explain()["main"]["cause"] == "awaiting_preemption"
slot.stopped()
assert owner.wait().pool == "main"
refused(pools.SlotOver, lambda: slot.placement_group)
owner.release()
again = borrower.wait()
assert (slot.k, again.k) == (1, 2)
assert again.placement_group != group
with again:
    pass
assert borrower.state == "released"
"""

KILLS = """
holder = client.submit("vision", gpus=4).wait()
waiter = client.submit("speech", gpus=4, preemptible=True)
found = []
waiting = threading.Thread(target=lambda: found.append(waiter.wait()))
waiting.start()
before = client.ping()
os.kill(before["pid"], signal.SIGKILL)
holder.release()
waiting.join()
assert found[0].pool == "main"
os.kill(client.pool("main", {"op": "ping"})["pid"], signal.SIGKILL)
found[0].release()
assert waiter.state == "released"
assert client.ping()["epoch"] > before["epoch"]
assert client.status()["pools"]["main"]["held"].get("gpu", 0) == 0
"""

FUNCTIONS = """
import asyncio, pathlib, tempfile, time
from concurrent.futures import ThreadPoolExecutor

def devices(*, slot):
    here = get_current_placement_group()
    return slot.pool, len(os.environ["CUDA_VISIBLE_DEVICES"].split(",")), here == slot.placement_group

def bad():
    raise KeyError("mine")

assert client.run(devices, requester="vision", gpus=2) == ("main", 2, True)
assert client.run(sum, ray.put([1, 2]), requester="vision", gpus=1) == 3
seat = client.run(lambda slot: (slot.pool, slot.counts_only), requester="vision", pool_resources={"seat": 1})
assert seat == ("seats", True)
assert refused(KeyError, lambda: client.run(bad, requester="vision", gpus=1)) == "'mine'"
refused(ray.exceptions.WorkerCrashedError, lambda: client.run(os._exit, 1, requester="vision", gpus=1))

@client.function(requester="vision", gpus=1)
def square(number):
    return number * number

assert square(3) == asyncio.run(square.run_async(3)) == 9
assert list(square.map(range(20))) == [n * n for n in range(20)]

def leaves(slot):
    if slot.k == 1:
        slot.preempting.wait()
        slot.check()
    return slot.k

def stubborn(folder):
    first = not (folder / "began").exists()
    (folder / "began").touch()
    while first:
        time.sleep(60)
    return "again"

folder = pathlib.Path(tempfile.mkdtemp())
with ThreadPoolExecutor() as aside:
    # told, it leaves within its grace of ten minutes
    borrower = aside.submit(client.run, leaves, requester="speech", gpus=4, retries=1, id="leaves")
    while client.get("leaves") is None:
        pass
    client.follow("leaves").wait()
    with client.slot("vision", gpus=2) as slot:
        assert slot.pool == "main"
    assert borrower.result() == 2
    # it does not look, and is gone after its grace of one second
    borrower = aside.submit(client.run, stubborn, folder, requester="low", gpus=2, retries=1)
    while not (folder / "began").exists():
        time.sleep(0.01)
    with client.slot("high", gpus=2) as slot:
        assert slot.pool == "brief"
    assert borrower.result() == "again"
assert all(view["state"] == "released" for view in client.list(limit=1000) if view["retries"] or view["k"] > 1)
"""

INTERRUPT = """
def interrupt():
    while client.get("mine") is None:
        pass
    os.kill(os.getpid(), signal.SIGINT)

holder = client.submit("vision", gpus=4).wait()
threading.Thread(target=interrupt).start()
try:
    with client.slot("vision", gpus=4, id="mine"):
        raise AssertionError("granted")
except KeyboardInterrupt:
    pass
assert client.get("mine")["state"] == "cancelled"
holder.release()
"""


@pytest.fixture(scope="module")
def cluster_env(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A local cluster with the pools up: the environment of its drivers."""
    folder = tmp_path_factory.mktemp("client")
    state_before = os.environ.get("POOLS_STATE_DIR")
    os.environ["POOLS_STATE_DIR"] = str(folder / "state")
    try:
        cluster = LocalCluster.from_cluster_yaml(CLUSTER_YAML, idle_timeout_s=60.0, dashboard=False)
        with cluster:
            env = {**os.environ, **cluster.driver_env(), "RAY_ADDRESS": cluster.address}
            env["RAY_POOLS_STORE"] = f"sqlite://{folder / 'store'}"
            config = folder / "pools.yaml"
            config.write_text(CONFIG)
            run(UP, env, str(config), cluster.address)
            yield env
    finally:
        os.environ.pop("POOLS_STATE_DIR")
        if state_before is not None:
            os.environ["POOLS_STATE_DIR"] = state_before


def run(code: str, env: dict[str, str], *arguments: str) -> str:
    """What a driver says; the test fails with all of it unless it ends well."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        check=False,
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


@pytest.mark.parametrize(
    "code",
    [
        pytest.param(WORK, id="work"),
        pytest.param(PREEMPTION, id="preemption", marks=pytest.mark.slow),
        pytest.param(FUNCTIONS, id="functions", marks=pytest.mark.slow),
        pytest.param(INTERRUPT, id="interrupt", marks=pytest.mark.slow),
        pytest.param(KILLS, id="kills", marks=pytest.mark.slow),
    ],
)
def test_a_driver(cluster_env: dict[str, str], code: str) -> None:
    said = run(PREAMBLE + code, cluster_env)
    assert "Traceback" not in said
