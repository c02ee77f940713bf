"""Ray's GCS on redis, killed and started anew: a delay for who holds and who waits (docs/operations.md).

Faults it stands for: a cluster that comes back with an empty memory of who was alive, by which the living are called
gone; a slot or a place in the queue that goes with the GCS's process; a coordinator that finds its pools no more.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from live_pools import WAIT_S, LivePools, Process, live_pools
from store.redis_server import RedisServer

from ray_pools.core import records as ev
from ray_pools.log_check import check_logs

pytestmark = [pytest.mark.ray, pytest.mark.slow]

CONFIG = """
pools:
  seats: {capacity: {seat: 2}, placement: none}
  nodes: {capacity: {mcpu: 1000}}
policies:
  - {requester: vision, pool: seats}
  - {requester: speech, pool: nodes}
lease: {default_s: 60, renew_s: 1}
"""


@pytest.fixture
def live(tmp_path: Path) -> Iterator[LivePools]:
    redis = RedisServer(tmp_path / "redis")
    assert redis.start()
    try:
        at = {"RAY_REDIS_ADDRESS": f"127.0.0.1:{redis.port}"}
        with live_pools(tmp_path / "pools", CONFIG, env=at) as live:
            yield live
    finally:
        redis.kill()


class Gcs:
    """The cluster's GCS: what its process was started with is what it is started anew with."""

    def __init__(self, live: LivePools) -> None:
        (self.pid,) = [
            pid
            for pid in live.cluster.pids()
            if Path(f"/proc/{pid}/comm").read_text().startswith("gcs_server")
        ]
        proc = Path(f"/proc/{self.pid}")
        self.command = [os.fsdecode(word) for word in (proc / "cmdline").read_bytes().split(b"\0")[:-1]]
        pairs = (os.fsdecode(pair) for pair in (proc / "environ").read_bytes().split(b"\0")[:-1])
        self.env = dict(pair.split("=", 1) for pair in pairs)
        self.cwd = os.readlink(proc / "cwd")
        self.log = live.folder / "gcs.log"

    def kill_and_start(self) -> subprocess.Popen[bytes]:
        os.kill(self.pid, signal.SIGKILL)
        with self.log.open("wb") as log:
            return subprocess.Popen(self.command, env=self.env, cwd=self.cwd, stdout=log, stderr=log)


def test_a_killed_gcs_that_starts_anew_on_redis_costs_nobody_a_slot(live: LivePools) -> None:
    """The holders of seats are a process of their own and an actor of it; the placed one is of this process."""
    import ray

    holder, actor = Process(live, "holders_live.py", "driver"), Process(live, "holders_live.py", "actor")
    _, held, _ = holder.line("held ").split()
    _, held_by_actor, _ = actor.line("held ").split()
    slot = live.client.submit("speech", cpus=1).wait(WAIT_S)

    @ray.remote(num_cpus=1)
    def work() -> str:
        return "done"

    waiter = live.client.submit("vision", pool_resources={"seat": 1})
    coordinator = live.ask("coordinator", "ping")["pid"]
    gcs = Gcs(live).kill_and_start()
    try:
        # a grant and a placed group that can be worked in need the new one
        slot.release()
        with live.client.submit("speech", cpus=1).wait(WAIT_S) as again:
            assert ray.get(work.options(**again.options()).remote(), timeout=WAIT_S) == "done"
        # killed now, the coordinator is started anew by it
        os.kill(coordinator, signal.SIGKILL)
        assert live.ask("coordinator", "ping")["pid"] != coordinator
        assert (waiter.status() or {})["state"] == "queued"
        states = [(live.client.get(id) or {}).get("state") for id in (held, held_by_actor)]
        assert states == ["allocated", "allocated"]
        # and it knows who lives: only the one that is killed loses its seat, to who waited
        actor.popen.kill()
        assert waiter.wait(WAIT_S).pool == "seats"
        assert (live.client.get(held) or {}).get("state") == "allocated"
        assert (live.client.get(held_by_actor) or {}).get("state") == "expired"
        gone = [event.ids for _, event in live.events("coordinator") if isinstance(event, ev.HolderGone)]
        assert gone == [[held_by_actor]]
        holder.do("release")
        waiter.release()
        report = check_logs(live.store, ["seats", "nodes"])
        assert report.ok, "\n".join(str(problem) for problem in report.problems)
    finally:
        holder.close()
        actor.close()
        gcs.kill()
        gcs.wait()
