"""The workload of `pools demo`, as drivers would write it: jobs that wait for slots, work in them and give them back.

Each job is a thread with a ticket. Its work is a row of short Ray tasks inside the grant; told to stop, it finishes
the task, keeps the number of steps done as its checkpoint, says stopped, and goes on from there in its next slot.
Meanwhile the main thread tells what the pools log (`..demo_story`), which nodes Ray has, and why someone waits.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ..demo_story import CAUSES, Line, LogFollower, Story, and_list, gpus_text
from ..errors import PoolsError, SlotPreempted, WaitTimeout
from ..trace import TraceJob
from .client import Client, connect
from .slot import Slot
from .ticket import Ticket

STEP_S = 1.0
RETRIES = 5
"""So often a job queues again after it was preempted."""

TELL_EVERY_S = 0.2
EXPLAIN_AFTER_S = 1.0
EXPLAIN_EVERY_S = 1.0
# A log is read before another that is ahead of it: what is younger than this waits for the next look.
SETTLED_AFTER_S = 0.3
GIVE_UP_S = 240.0
TASK_TIMEOUT_S = 60.0
LOOK_EVERY_S = 0.2
NEWS_WAIT_S = 3.0
STOP_WAIT_S = 10.0
NODE_TYPE_LABEL = "ray-pools.io/node-type"

Tell = Callable[[Line], None]


def work_one_step(seconds: float) -> list[str]:
    """What runs on the GPUs: a piece of training would be here. The ids of the GPUs that Ray gave it."""
    import ray

    time.sleep(seconds)
    return sorted(str(gpu) for gpu in ray.get_gpu_ids())


class Job(threading.Thread):
    """One row of the workload."""

    def __init__(
        self, name: str, row: TraceJob, client: Client, stopping: threading.Event, tell: Tell
    ) -> None:
        super().__init__(name=f"demo-{name}", daemon=True)
        self.id, self.row, self.client, self.stopping = name, row, client, stopping
        self.ticket: Ticket | None = None
        self.problem = ""
        self.steps_done = 0
        self.steps = max(1, math.ceil(row.duration_s / STEP_S))
        self._tell = tell

    def run(self) -> None:
        if self.stopping.wait(self.row.submit_s):
            return
        try:
            self.ticket = self.client.submit(
                self.row.requester, gpus=self.row.gpus, retries=RETRIES, id=self.id
            )
            while self.steps_done < self.steps:
                try:
                    with self.ticket.wait(GIVE_UP_S) as slot:
                        self._work(slot)
                except SlotPreempted:
                    if self.ticket.done:
                        raise
        except PoolsError as problem:
            self.problem = str(problem)
        except Exception as problem:  # noqa: BLE001 - what Ray raises when the cluster goes; told at the end
            self.problem = f"{type(problem).__name__}: {str(problem).splitlines()[0][:200]}"

    def _work(self, slot: Slot) -> None:
        import ray

        # max_calls: a task with GPUs otherwise gets a new process each time
        step = ray.remote(num_cpus=0, num_gpus=self.row.gpus, max_calls=0, max_retries=0)(work_one_step)
        from_step = self.steps_done
        while self.steps_done < self.steps:
            if slot.preempting.is_set():
                self._say(
                    "save", f"{self.id} saves a checkpoint after {self.steps_done} of {self.steps} steps"
                )
                slot.check()
            task = step.options(scheduling_strategy=slot.scheduling_strategy).remote(STEP_S)
            gpu_ids = self._result(task, slot)
            if self.steps_done == from_step:
                again = f", on from step {from_step}" if from_step else ""
                self._say("work", f"{self.id} works in its placement group, GPUs {','.join(gpu_ids)}{again}")
            self.steps_done += 1

    def _result(self, task: Any, slot: Slot) -> list[str]:
        """Looks again and again: no call of Ray's may be under way when the process leaves Ray (it would end the
        process), and a task that was sent to a group that is gone by now may never answer.
        """
        import ray

        ends_at = time.monotonic() + TASK_TIMEOUT_S
        while not ray.wait([task], timeout=LOOK_EVERY_S)[0]:
            if self.stopping.is_set():
                raise PoolsError("the demo was stopped")
            if slot.over:
                slot.check()
            if time.monotonic() > ends_at:
                raise WaitTimeout(f"a task of {self.id} is not over after {TASK_TIMEOUT_S:g} s")
        try:
            found: list[str] = ray.get(task)
        except ray.exceptions.RayError:
            if slot.preempting.wait(NEWS_WAIT_S):  # it was taken by force: the step is lost, no more
                slot.check()
            raise
        return found

    def _say(self, kind: str, text: str) -> None:
        self._tell(Line(time.time(), kind, self.row.requester, text))


class Nodes:
    """The worker nodes that Ray shows, and what is new about them."""

    def __init__(self) -> None:
        self.ups: Counter[str] = Counter()
        self._alive: dict[str, str] = {}

    def look(self) -> Iterator[Line]:
        import ray

        now = {}
        for node in ray.nodes():
            kind = node["Labels"].get(NODE_TYPE_LABEL)
            if node["Alive"] and kind is not None:
                now[node["NodeID"]] = kind
                if node["NodeID"] not in self._alive:
                    self.ups[kind] += 1
                    gpus = gpus_text(int(node["Resources"].get("GPU", 0)))
                    yield Line(time.time(), "node", "", f"a node comes up: {kind} with {gpus}")
        for node_id in set(self._alive) - set(now):
            yield Line(time.time(), "node", "", f"a node is gone: {self._alive[node_id]}")
        self._alive = now


class DemoRun:
    """Jobs, and all that is told of them."""

    def __init__(self, client: Client, store: str, pools: Sequence[str], tell: Tell) -> None:
        self.client, self.tell = client, tell
        self.story, self.nodes = Story(), Nodes()
        self.jobs: list[Job] = []
        self.stopping = threading.Event()
        self.follower = LogFollower(store, pools)
        self._said: list[Line] = []
        self._causes: dict[str, str] = {}
        self._explain_at = 0.0

    def run(self, rows: Sequence[TraceJob]) -> None:
        """Until all jobs are over. WaitTimeout if they are not within minutes."""
        started_at = time.monotonic()
        for number, row in enumerate(rows, 1):
            name = f"{row.requester}-{number}"
            self.jobs.append(Job(name, row, self.client, self.stopping, self._said.append))
        for job in self.jobs:
            job.start()
        while any(job.is_alive() for job in self.jobs):
            if time.monotonic() - started_at > GIVE_UP_S:
                waiting = and_list([job.id for job in self.jobs if job.is_alive()])
                raise WaitTimeout(f"after {GIVE_UP_S:g} s these jobs are not over: {waiting}")
            self.tell_news(time.time() - SETTLED_AFTER_S)
            time.sleep(TELL_EVERY_S)
        self.tell_news(math.inf)

    def stop(self) -> None:
        """After this no job calls Ray any more."""
        self.stopping.set()
        self.client.close()
        ends_at = time.monotonic() + STOP_WAIT_S
        for job in self.jobs:
            if job.ident is not None:
                job.join(max(0.0, ends_at - time.monotonic()))
        self.follower.close()

    def tell_news(self, until: float) -> None:
        """What the logs, the nodes and the jobs say up to that time, in the order of its time."""
        self._said += [line for row in self.follower.read(until) for line in self.story.hear(row)]
        self._said += [*self.nodes.look(), *self._whys()]
        said, self._said[:] = self._said[:], []
        for line in sorted(said, key=lambda line: line.at):
            if line.at <= until:
                self.tell(line)
            else:
                self._said.append(line)

    def _whys(self) -> Iterator[Line]:
        """Why those wait that have waited for a while; again when the cause changes."""
        if time.monotonic() < self._explain_at:
            return
        self._explain_at = time.monotonic() + EXPLAIN_EVERY_S
        for job in self.jobs:
            ticket = job.ticket
            if ticket is None or ticket.state != "queued":
                self._causes.pop(job.id, None)
                continue
            if time.time() - ticket.view.get("submitted_at", time.time()) < EXPLAIN_AFTER_S:
                continue
            why = self._why(ticket)
            if why and why != self._causes.get(job.id):
                self._causes[job.id] = why
                yield Line(time.time(), "wait", job.row.requester, f"{job.id} waits: {why}")

    @staticmethod
    def _why(ticket: Ticket) -> str:
        by_cause: dict[str, list[str]] = {}
        for pool, answer in ticket.explain().items():
            if answer.get("cause"):
                by_cause.setdefault(answer["cause"], []).append(pool)
        return "; ".join(
            f"{CAUSES.get(cause, cause)} (in {and_list(pools)})" for cause, pools in by_cause.items()
        )

    def problems(self) -> list[str]:
        """Which jobs did not end well, and why."""
        return [f"{job.id}: {job.problem}" for job in self.jobs if job.problem]

    def summary(self) -> dict[str, Any]:
        """Figures for people and programs."""
        teams = {
            name: {
                "requests": team.requests,
                "finished": team.finished,
                "grants_in_share": team.in_share,
                "grants_borrowed": team.borrowed,
                "grants_fallback": team.fallback,
                "preempted": team.preempted,
                "wait_mean_s": round(sum(team.waits_s) / max(len(team.waits_s), 1), 2),
                "wait_max_s": round(max(team.waits_s, default=0.0), 2),
            }
            for name, team in sorted(self.story.teams.items())
        }
        return {
            "teams": teams,
            "reclaims": self.story.reclaims,
            "fallbacks": self.story.fallbacks,
            "scale_ups": dict(sorted(self.nodes.ups.items())),
            "problems": self.problems(),
        }


def run_demo(
    namespace: str, store: str, pools: Sequence[str], rows: Sequence[TraceJob], tell: Tell
) -> Mapping[str, Any]:
    """Plays the workload through the pools that run in this process's cluster.

    Returns the summary, and under `digests` the actors' states at the end, for a check of their logs.
    """
    logging.getLogger("ray_pools").setLevel(logging.ERROR)  # what matters of it is told
    with connect(None, namespace, quiet=True) as client:
        run = DemoRun(client, store, pools, tell)
        try:
            run.run(rows)
            digests = {f"pool:{name}": client.pool(name, {"op": "digest"}) for name in pools}
            digests["coordinator"] = client.coordinator({"op": "digest"})
        finally:
            run.stop()
        return {**run.summary(), "digests": digests}
