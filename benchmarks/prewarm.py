"""What announcing is worth: nodes that take 20 s to boot, and jobs that come with and without a word before.

- single: from submission to the end of a first task in the slot, with no node up, and announced 30 s before.
- burst: 8 jobs of 4 GPUs, a node each, from submission until the last one's first task has run: with the wish switched
  off (Ray's pending placement groups alone bring up nodes), with the wish, and announced 30 s before.

Both kinds of pools stand side by side in one cluster, each in a namespace of its own. Between two measurements all
nodes go. Ratios are to what is cold, of the same round.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks import live
from benchmarks.figures import Figure, middle, ratios, size, verdict
from ray_pools.client import Client, connect, connect_ray, disconnect_ray
from ray_pools.errors import BadInput
from ray_pools.local_cluster import LocalCluster
from ray_pools.local_node_types import HEAD_TYPE, NodeType

BOOT_S, AHEAD_S = 20.0, 30.0
JOBS, GPUS = 8, 4
ROUNDS = 3
ANNOUNCED_MAX = 0.25
_LABELS = {"kind": "gpu"}
_WAIT_S = 300.0

CONFIG = """
prewarm: {period_s: 10, linger_s: 0}
pools:
  gpu:
    capacity: {gpu: 32}
    placement: {labels: {kind: gpu}, node: {gpu: 4}}
policies: [{requester: team, pool: gpu}]
"""


class Bench:
    """Clients of pools whose nodes are wished for, and of pools whose are not."""

    def __init__(self, wishing: Client, silent: Client) -> None:
        import ray

        self.wishing, self.silent = wishing, silent
        self._ray = ray
        self._announced: list[str] = []
        self._task = ray.remote(num_gpus=1)(lambda: None)

    def jobs(self, client: Client, count: int) -> float:
        """Seconds from submission until the last of so many jobs has run a task."""
        begun = time.perf_counter()
        tickets = client.submit_many([{"requester": "team", "gpus": GPUS}] * count)
        slots = [ticket.wait(_WAIT_S) for ticket in tickets]
        running = [
            self._task.options(scheduling_strategy=slot.scheduling_strategy).remote() for slot in slots
        ]
        self._ray.get(running, timeout=_WAIT_S)
        took_s = time.perf_counter() - begun
        if self._announced:
            client.cancel_prewarm(*self._announced)
        self._announced.clear()
        for slot in slots:
            slot.release()
        self._none_up()
        return took_s

    def announced(self, count: int, ahead_s: float) -> float:
        """The same, announced before."""
        self._announced.append(self.wishing.prewarm("gpu", gpus=count * GPUS, for_s=600)["id"])
        time.sleep(ahead_s)  # so long before: that is what is measured
        return self.jobs(self.wishing, count)

    def _none_up(self) -> None:
        ends_at = time.monotonic() + _WAIT_S
        while any(node["Alive"] and node["Labels"].get("kind") for node in self._ray.nodes()):
            if time.monotonic() > ends_at:
                raise RuntimeError("the nodes do not go")
            time.sleep(0.2)


@contextlib.contextmanager
def bench() -> Iterator[Bench]:
    """A cluster with slow nodes, for the time of the benchmark."""
    kinds = {
        HEAD_TYPE: NodeType({"CPU": 4}, {}, 0, 0),
        "gpu": NodeType({"CPU": 2, "GPU": GPUS}, _LABELS, 0, JOBS),
    }
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ray-pools-bench-")))
        os.environ["POOLS_STATE_DIR"] = str(folder / "state")
        cluster = stack.enter_context(
            LocalCluster(kinds, dashboard=False, idle_timeout_s=3.0, node_boot_s=size(BOOT_S, 2.0))
        )
        os.environ.update(cluster.driver_env())
        connect_ray(cluster.address, quiet=True)
        stack.callback(disconnect_ray)
        clients = {
            name: stack.enter_context(contextlib.closing(_pools(folder, name, wished)))
            for name, wished in (("wishing", True), ("silent", False))
        }
        yield Bench(**clients)


def _pools(folder: Path, namespace: str, wished: bool) -> Client:
    live.up(CONFIG, folder, f"sqlite://{folder / namespace}", namespace, {"prewarm": wished})
    return connect(namespace=namespace, quiet=True)


def run() -> Iterator[Figure]:
    """The figures, medians of three rounds. BadInput with an address: nodes have to be slow ones of its own."""
    if live.CLUSTER.address is not None:
        raise BadInput("--address", live.CLUSTER.address, "left out: prewarm runs in a cluster of its own")
    live.CLUSTER.leave()
    jobs, ahead_s = size(JOBS, 2), size(AHEAD_S, 6.0)
    found: dict[str, list[float]] = {
        "one job, cold": [],
        f"one job, announced {ahead_s:g} s before": [],
        f"{jobs} jobs, without prewarming": [],
        f"{jobs} jobs, with prewarming": [],
        f"{jobs} jobs, announced {ahead_s:g} s before": [],
    }
    with bench() as pools:
        measures = (
            lambda: pools.jobs(pools.wishing, 1),
            lambda: pools.announced(1, ahead_s),
            lambda: pools.jobs(pools.silent, jobs),
            lambda: pools.jobs(pools.wishing, jobs),
            lambda: pools.announced(jobs, ahead_s),
        )
        for _ in range(size(ROUNDS, 1)):
            for values, measure in zip(found.values(), measures, strict=True):
                values.append(measure())
    cold, _, burst, *_ = found.values()
    for index, (name, values) in enumerate(found.items()):
        value, spread = middle(values)
        ratio = ratios(values, cold if index < 2 else burst)
        target, met = "", None
        if index == 1:
            target, met = f"at most {ANNOUNCED_MAX:g} of cold", verdict(ratio <= ANNOUNCED_MAX)
        yield Figure(f"prewarm: {name}", value, "s", ratio, target, met, spread)
