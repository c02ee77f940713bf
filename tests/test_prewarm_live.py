"""Nodes come and go as the pools want, with Ray's real autoscaler over pretended nodes (docs/prewarming.md).

Faults it stands for: nodes of the wrong kind; a floor that goes with another pool's demand; one pool's impossible wish
that stops all; a wish that is gone with a GCS, or that somebody else wrote over, and stays so; two who erase each
other's wish for ever; an announcement that brings nothing up, or never ends; GPUs that are used behind the pools' back.

The order of what happens is asserted; the times are printed (-s shows them).
"""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import ray
from live_pools import WAIT_S, LivePools, Process, live_pools
from store.redis_server import RedisServer
from test_gcs_restart_ray import Gcs

from ray_pools.actors import deploy
from ray_pools.actors.autoscaler import COORDINATOR, RayAutoscaler, Wanted, wanted_of

pytestmark = [pytest.mark.ray, pytest.mark.slow]

ROOT = Path(__file__).parent.parent
LOOK_S = 0.1
DATA_S = 120.0

# Where labels are not looked at (v1), each type has a resource of its own.
NODE_TYPES = """
head_node_type: ray.head.default
available_node_types:
  ray.head.default: {resources: {CPU: 3}, node_config: {}, max_workers: 0}
  a: {resources: {CPU: 3, GPU: 4, a_node: 1}, labels: {kind: a}, node_config: {}, max_workers: 2}
  b: {resources: {CPU: 3, GPU: 4, b_node: 1}, labels: {kind: b}, node_config: {}, max_workers: 2}
  cpu: {resources: {CPU: 3, cpu_node: 1}, labels: {kind: cpu}, node_config: {}, max_workers: 2}
"""

CONFIG = """
namespace: ahead
pools:
  reserved:
    capacity: {{gpu: {gpus}}}
    placement: {{labels: {{kind: a}}, node: {{gpu: 4}}, warm: {{gpu: {warm_a}}}}}
  spot:
    capacity: {{gpu: 8}}
    placement: {{labels: {{kind: b}}, node: {{gpu: 4}}, warm: {{gpu: {warm_b}}}}}
policies:
  - {{requester: vision, pool: reserved}}
  - {{requester: research, pool: spot}}
"""


class Timeline:
    """What happened when: nodes that come and go, seen by a thread, and what a test notes."""

    def __init__(self) -> None:
        self.events: list[tuple[float, str]] = []
        self._begun = time.monotonic()
        self._changed = threading.Condition()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def note(self, text: str) -> None:
        with self._changed:
            self.events.append((time.monotonic() - self._begun, text))
            self._changed.notify_all()
        print(f"{self.events[-1][0]:7.1f} s  {text}")

    def count(self, text: str) -> int:
        return sum(each == text for _, each in self.events)

    def until(self, text: str, count: int = 1) -> None:
        with self._changed:
            there = self._changed.wait_for(lambda: self.count(text) >= count, WAIT_S)
        assert there, f"never: {text}; but {self.events}"

    def stays(self, *texts: str, for_s: float) -> None:
        """None of these happens within that time."""
        with self._changed:
            found = self._changed.wait_for(lambda: any(self.count(text) for text in texts), for_s)
        assert not found, self.events

    def in_order(self, *texts: str) -> None:
        happened = [text for _, text in self.events]
        places = [happened.index(text) for text in texts]
        assert places == sorted(places), self.events

    def close(self) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        before: Counter[str] = Counter()
        while not self._over.wait(LOOK_S):
            try:
                nodes = [node for node in ray.nodes() if node["Alive"]]
            except Exception as problem:  # noqa: BLE001 - the GCS is away, on purpose
                print(f"no look at the nodes: {problem}")
                continue
            now = Counter(kind for node in nodes if (kind := node["Labels"].get("kind")))
            for kind, more in (now - before).items():
                for _ in range(more):
                    self.note(f"{kind} up")
            for kind, fewer in (before - now).items():
                for _ in range(fewer):
                    self.note(f"{kind} gone")
            before = now


@contextmanager
def cluster(
    folder: Path,
    *,
    warm: tuple[int, int] = (0, 0),
    gpus: int = 8,
    linger_s: float = 2.0,
    **options: Any,
) -> Iterator[tuple[LivePools, Timeline]]:
    """A cluster of these node types with the pools in it, and what happens in it."""
    (folder / "types.yaml").write_text(NODE_TYPES)
    config = CONFIG.format(gpus=gpus, warm_a=warm[0], warm_b=warm[1])
    times = {"prewarm_period_s": 5.0, "prewarm_linger_s": linger_s, "watch_s": 0.5, "metrics_every_s": 0.5}
    given = {"cluster_yaml": folder / "types.yaml", "idle_timeout_s": 5.0, **options}
    with live_pools(folder / "pools", config, times, **given) as live:
        line = Timeline()
        try:
            yield live, line
        finally:
            line.close()


def coordinator(live: LivePools) -> dict[str, Any]:
    found: dict[str, Any] = live.client.coordinator({"op": "status"})
    return found


def eventually(live: LivePools, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """What the coordinator says once it says so."""
    until = time.monotonic() + WAIT_S
    while not holds(said := coordinator(live)):
        assert time.monotonic() < until, said
        time.sleep(LOOK_S)
    return said


def standing() -> Wanted:
    found = RayAutoscaler("a test").standing()
    assert found is not None
    return found.wanted


@ray.remote(num_gpus=1)
def work() -> list[int]:
    return list(ray.get_gpu_ids())


@pytest.mark.parametrize("autoscaler", ["v1", "v2"])
def test_demand_on_one_pool_brings_up_its_nodes_alone_and_the_others_floor_stays(
    tmp_path: Path, autoscaler: str
) -> None:
    with cluster(tmp_path, warm=(0, 4), autoscaler=autoscaler) as (live, line):
        line.until("b up")
        line.note("demand")
        with live.client.submit("vision", gpus=4).wait(WAIT_S) as slot:
            line.note("granted")
            ray.get(work.options(**slot.options(num_gpus=1)).remote(), timeout=WAIT_S)
            line.note("ran")
            said = eventually(live, lambda said: said["nodes"]["reserved"]["ready"] == 1)
            assert said["nodes"] == {
                "reserved": {"wanted": 1, "ready": 1, "starting": 0},
                "spot": {"wanted": 1, "ready": 1, "starting": 0},
            }
            assert said["prewarm"]["autoscaler"] == autoscaler
            assert (said["prewarm"]["cut"], said["prewarm"]["labels_ignored"]) == ({}, [])
        line.note("released")
        eventually(live, lambda said: "reserved" not in said["prewarm"]["wanted"])
        line.note("wanted no more")
        line.until("a gone")
        line.in_order("b up", "demand", "a up", "granted", "ran", "released", "wanted no more", "a gone")
        assert (line.count("a up"), line.count("b up"), line.count("b gone")) == (1, 1, 0)


@pytest.mark.parametrize("autoscaler", ["v1", "v2"])
def test_a_wish_above_max_workers_stops_no_other_pools_and_is_shown(tmp_path: Path, autoscaler: str) -> None:
    with cluster(tmp_path, warm=(16, 4), gpus=16, autoscaler=autoscaler) as (live, line):
        line.until("b up")
        line.until("a up", 2)
        said = eventually(live, lambda said: said["nodes"]["reserved"]["ready"] == 2)
        assert said["prewarm"]["cut"] == {
            "reserved": {"bundles": 2, "gpus": 8.0, "why": "max_workers 2 of a"}
        }
        assert said["prewarm"]["wanted"]["reserved"]["gpus"] == 8
        assert said["nodes"]["reserved"]["wanted"] == 2
        # a request that needs the second node of the other pool's kind is not held up by that
        with live.client.submit("research", gpus=8).wait(WAIT_S):
            line.until("b up", 2)
        assert line.count("a up") == 2
        deploy.down("ahead", force=True)
        assert standing() == Counter(), "whatever was asked for is taken back"


def test_announced_capacity_comes_up_before_the_first_request_and_goes_by_itself(tmp_path: Path) -> None:
    with cluster(tmp_path, linger_s=0.0) as (live, line):
        client = live.client
        client.prewarm("spot", gpus=4, for_s=12, id="soon")
        line.note("announced")
        line.until("b up")
        said = eventually(live, lambda said: said["nodes"]["spot"]["ready"] == 1)
        assert [each["id"] for each in said["announced"]] == ["soon"]
        eventually(live, lambda said: not said["announced"])
        line.note("over")
        line.until("b gone")
        line.in_order("announced", "b up", "over", "b gone")

        # what comes after it uses it up: no node more
        client.prewarm("spot", gpus=4, for_s=3600, id="long")
        line.until("b up", 2)
        killed = live.ask("coordinator", "ping")["pid"]
        os.kill(killed, signal.SIGKILL)
        line.note("the coordinator is killed")
        said = eventually(live, lambda said: said["prewarm"]["wanted"])
        assert live.ask("coordinator", "ping")["pid"] != killed
        assert [each["id"] for each in said["announced"]] == ["long"]
        line.note("submitted")
        with client.submit("research", gpus=4).wait(WAIT_S) as slot:
            ray.get(work.options(**slot.options(num_gpus=1)).remote(), timeout=WAIT_S)
            line.note("ran")
            assert eventually(live, lambda said: said["nodes"]["spot"]["wanted"] == 1)
        # also the page's own example: it announces more, and takes it back
        (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "prewarming.md").read_text(), re.DOTALL)
        namespace: dict[str, Any] = {}
        exec(code.replace("pools.connect()", "pools.connect(namespace='ahead')"), namespace)
        namespace["client"].close()
        assert client.cancel_prewarm("long")[0]["over"] == "taken back"
        line.note("taken back")
        line.until("b gone", 2)
        line.in_order("submitted", "ran", "taken back")
        assert coordinator(live)["announced"] == []


def test_gpus_that_a_job_uses_without_a_slot_are_shown_with_the_job(tmp_path: Path) -> None:
    with cluster(tmp_path, warm=(0, 4)) as (live, line):
        line.until("b up")
        with live.client.submit("research", gpus=1).wait(WAIT_S):
            beside = Process(live, "beside_live.py", "outside")
            try:
                job = beside.line("ready").split()[1]
                # a task that is about to begin has its GPU before Ray says whose it is
                said = eventually(
                    live, lambda said: [each["gpus"] for each in said["outside"]["jobs"]] == [3.0]
                )
                (found,) = said["outside"]["jobs"]
                assert (found["job"], found["pools"]) == (job, ["spot"])
                assert "beside_live.py outside" in found["entrypoint"]
                assert found["what"] == ["a task", "actor Trainer", "placement group aside"]
            finally:
                beside.close()
            eventually(live, lambda said: not said["outside"]["jobs"])
            line.note("nobody uses any without a slot; the slot's own is not one")


def test_a_wish_outlives_the_gcs_and_is_put_right_where_somebody_wrote_over_it(tmp_path: Path) -> None:
    redis = RedisServer(tmp_path / "redis")
    assert redis.start()
    try:
        at = {"RAY_REDIS_ADDRESS": f"127.0.0.1:{redis.port}"}
        with cluster(tmp_path, warm=(0, 4), env=at) as (live, line):
            line.until("b up")
            ours = wanted_of([{"CPU": 1.0, "GPU": 4.0}], [{"kind": "b"}])
            assert standing() == ours
            gcs = Gcs(live).kill_and_start()
            try:
                line.note("the GCS is killed, and started anew")
                until_it_stands(ours)
                line.note("the wish is back")
                told = int(coordinator(live)["prewarm"]["overwritten"])
                beside = Process(live, "beside_live.py", "foreign")
                try:
                    beside.line("ready")
                    line.note("somebody else called request_resources")
                    eventually(live, lambda said: said["prewarm"]["overwritten"] > told)
                    line.note("noticed")
                    until_it_stands(ours)
                    line.note("put right")
                finally:
                    beside.close()
                said = coordinator(live)["prewarm"]
                assert (said["overwritten_by"], said["through"]) == ("CPU 1", "register")
                # nodes are counted by what the autoscaler lost meanwhile: they may have gone, and are back
                eventually(live, lambda said: said["nodes"]["spot"]["ready"] == 1)
            finally:
                gcs.kill()
                gcs.wait()
    finally:
        redis.kill()


def until_it_stands(wanted: Wanted) -> None:
    until = time.monotonic() + WAIT_S
    while True:
        with suppress(Exception):  # the GCS may be away
            if standing() == wanted:
                return
        assert time.monotonic() < until, f"never: {wanted}"
        time.sleep(LOOK_S)


def test_ray_data_beside_the_pools_and_both_have_their_nodes(tmp_path: Path) -> None:
    """Ray Data's actor writes the register every 20 s, for two minutes; idle nodes go after 5."""
    with cluster(tmp_path, warm=(0, 4)) as (live, line):
        line.until("b up")
        ours = wanted_of([{"CPU": 1.0, "GPU": 4.0}], [{"kind": "b"}])
        beside = Process(live, "beside_live.py", "data")
        try:
            line.note("a job of Ray Data begins")
            beside.line("ready")
            line.note("it runs")
            eventually(live, lambda said: said["prewarm"]["through"] == COORDINATOR)
            line.note("the wish is registered with Ray's actor")
            line.until("cpu up")
            line.stays("b gone", for_s=DATA_S)
            line.note("two minutes later")
            stands = standing()
            assert ours <= stands, "the pools' wish is there at the end"
            assert stands - ours, "and so is Ray Data's"
            said = coordinator(live)
            assert said["prewarm"]["overwritten"] <= 1, said["prewarm"]
            line.in_order("b up", "a job of Ray Data begins", "cpu up", "two minutes later")
        finally:
            beside.close()
