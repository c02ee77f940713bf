"""Looks once a second whether Ray knows that a holder's process is gone; its leases need not run out then.

Only what is sure counts, everything else is left to the lease (docs/rules.md section 8):

- Ray's own table says that this very worker process (a driver is one, too) is dead. Its id is never used again, so
  neither can a job id that a fresh head gives out anew, nor a process that took a pid, be mistaken for it.
- A driver that *left* the cluster in good order (`ray.shutdown()`) may live on and come back under another id. One
  that ends in good order says so itself, as it leaves (`leave`).
- A node that is gone takes its processes with it, seconds later: Ray calls it dead before they have all ended.
- Whoever is of another cluster than this one (the head was replaced), or is not in the tables, is not judged.

Detached actors, and whatever else outlives a job, are judged by their own process, never by the job.

Ray's tables are a private interface. If it is not what it was, the leases alone decide, and one line in the log
says so.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, Protocol

from ray_pools.core.holders import short_node
from ray_pools.errors import shown

log = logging.getLogger("ray_pools")

Holder = Mapping[str, str]
Known = Sequence[tuple[str, Holder]]
"""(client, what it said of its process)."""

PERIOD_S = 1.0
# Processes of a node that Ray has just called dead were seen to live on for up to 2.5 s.
NODE_ENDS_S = 3.0
# So many processes are looked up in one round: each costs a call of a millisecond.
LOOKUPS_MAX = 500

_NOT_THERE = (AttributeError, ImportError, TypeError)


class Worker(NamedTuple):
    """A process as Ray's table of workers has it. `left`: it took its leave, and may live on without Ray."""

    alive: bool
    left: bool
    why: str


class Tables(Protocol):
    """What is asked of Ray. Each may block while the GCS is away."""

    def cluster(self) -> str:
        """The id of this cluster, or ""."""
        ...

    def dead_nodes(self) -> set[str]: ...

    def dead_jobs(self) -> set[str]: ...

    def worker(self, worker_id: str) -> Worker | None: ...


class RayTables:
    """Ray's tables at the GCS, each by one call that costs it less than a millisecond."""

    def cluster(self) -> str:
        from ray._private.worker import global_worker

        return str(global_worker.node.cluster_id.hex())

    def dead_nodes(self) -> set[str]:
        import ray

        return {node["NodeID"] for node in ray.nodes() if not node["Alive"]}

    def dead_jobs(self) -> set[str]:
        from ray._private import state

        return {job["JobID"] for job in state.jobs() if job["IsDead"]}

    def worker(self, worker_id: str) -> Worker | None:
        import ray
        from ray._private import state
        from ray.core.generated import common_pb2, gcs_pb2

        found = state.state._connect_and_get_accessor().get_worker_info(
            ray.WorkerID(bytes.fromhex(worker_id))
        )
        if found is None:
            return None
        entry = gcs_pb2.WorkerTableData.FromString(found)
        left = entry.worker_type == common_pb2.DRIVER and entry.exit_type in (
            common_pb2.INTENDED_USER_EXIT,
            common_pb2.INTENDED_SYSTEM_EXIT,
        )
        return Worker(entry.is_alive, left, shown(entry.exit_detail.partition(". ")[0], 120))


class Judge:
    """Which of the holders are gone for sure. Remembers between two looks what costs a call to know."""

    def __init__(self, tables: Tables, clock: Callable[[], float] = time.monotonic) -> None:
        self._tables, self._clock = tables, clock
        # node -> when it was first seen to be dead
        self._node_died: dict[str, float] = {}
        # workers that left in good order: nothing more will be known of them
        self._left: set[str] = set()
        self._next = 0

    def gone(self, known: Known) -> list[tuple[str, Holder, str]]:
        """(client, its process, why) of those that are gone. May block, and raises what Ray raises."""
        cluster = self._tables.cluster()
        mine = [each for each in known if cluster and each[1].get("cluster") == cluster]
        if not mine:
            return []
        found = self._on_dead_nodes(mine)
        settled = {client for client, _, _ in found}
        rest = [each for each in mine if each[0] not in settled and each[1].get("worker")]
        self._left &= {holder["worker"] for _, holder in rest}
        drivers = [each for each in rest if each[1].get("kind") == "driver"]
        # the table of jobs has all drivers in one call: only those that are dead there are looked up
        jobs = self._tables.dead_jobs() if drivers else set()
        asked = [
            each for each in drivers if each[1].get("job") in jobs and each[1]["worker"] not in self._left
        ]
        asked += self._turn_of([each for each in rest if each[1].get("kind") != "driver"])
        for client, holder in asked:
            worker = self._tables.worker(holder["worker"])
            if worker is not None and not worker.alive:
                if worker.left:
                    self._left.add(holder["worker"])
                else:
                    found.append((client, holder, worker.why or "Ray calls it dead"))
        return found

    def _on_dead_nodes(self, mine: Known) -> list[tuple[str, Holder, str]]:
        dead, now = self._tables.dead_nodes(), self._clock()
        self._node_died = {node: self._node_died.get(node, now) for node in dead}
        over = {node for node, died_at in self._node_died.items() if now - died_at >= NODE_ENDS_S}
        return [
            (client, holder, f"its node {short_node(holder['node'])} is gone")
            for client, holder in mine
            if holder.get("node") in over
        ]

    def _turn_of(self, workers: list[tuple[str, Holder]]) -> list[tuple[str, Holder]]:
        """All of them, or where there are too many the next in turn."""
        if len(workers) <= LOOKUPS_MAX:
            return workers
        self._next %= len(workers)
        chosen = (workers[self._next :] + workers[: self._next])[:LOOKUPS_MAX]
        self._next += LOOKUPS_MAX
        return chosen


class HolderWatch:
    """Asks `known` who has something to lose, and tells `report` who of them is gone. Lives on the actor's loop; Ray
    is asked in a thread, one look at a time, since any of its calls may block.
    """

    def __init__(
        self,
        known: Callable[[], Known],
        report: Callable[[list[tuple[str, Holder, str]]], None],
        tables: Tables | None = None,
        period_s: float = PERIOD_S,
    ) -> None:
        self._known, self._report, self._period_s = known, report, period_s
        self._judge = Judge(tables or RayTables())
        self._loop = asyncio.get_running_loop()
        self._thread = ThreadPoolExecutor(1, "ray-pools-holders")
        self._look_begins: asyncio.TimerHandle | None = self._loop.call_later(period_s, self._look)
        # why nobody is judged, if so; shown in status
        self.trouble = ""

    def close(self) -> None:
        """Nobody is looked for any more."""
        if self._look_begins is not None:
            self._look_begins.cancel()
        self._look_begins = None
        self._thread.shutdown(wait=False)

    def _look(self) -> None:
        known = self._known()
        if not known:
            self._again()
            return
        looking = self._loop.run_in_executor(self._thread, self._judge.gone, known)
        looking.add_done_callback(self._looked)

    def _looked(self, looked: asyncio.Future[list[tuple[str, Holder, str]]]) -> None:
        if looked.cancelled() or self._look_begins is None:
            return
        problem = looked.exception()
        if isinstance(problem, _NOT_THERE):
            self.trouble = (
                f"Ray's tables can't be read ({type(problem).__name__}: {shown(str(problem), 200)})"
            )
            log.warning("%s: a dead holder is found by its lease alone", self.trouble)
            self.close()
            return
        if problem is not None:  # the GCS is away: the next look may do
            self.trouble = f"{type(problem).__name__}: {shown(str(problem), 200)}"
            log.info("looking for dead holders: %s", self.trouble)
        else:
            self.trouble = ""
            if found := looked.result():
                self._report(found)
        self._again()

    def _again(self) -> None:
        self._look_begins = self._loop.call_later(self._period_s, self._look)
