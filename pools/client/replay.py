"""Plays a job trace through live pools: each job asks as its team, runs as Ray work inside its grant, and releases.

One thread drives all jobs: it looks at what the coordinator pushed to the tickets, starts and stops work, and leaves
calls that take a while (submit, release, stopped) to a few threads. So thousands of waiting jobs cost thousands of
small objects, no threads. Work is one task per bundle of the grant, with all GPUs of the bundle. It sleeps; nothing
else is pretended: queueing, preemption, placement groups, nodes and workers are real.

A preempted job stops its tasks, says so, and, with retries left, waits again and then does what is left of its
duration, as a job does that writes a checkpoint when it is told to stop.
"""

from __future__ import annotations

import contextlib
import queue
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from .. import wire
from ..errors import PoolsError, SlotError, SlotOver, WaitTimeout
from ..limits import BATCH_MAX
from ..trace import TraceJob
from .authentication import one_line
from .client import Client
from .slot import Slot, log
from .ticket import Ticket

TICK_S = 0.05
"""Between two looks at all jobs. What ends a task or a call wakes the loop at once."""

LAUNCHES_MAX = 3
_PROGRESS_S = 0.5
_NODES_S = 1.0
_CANCEL_S = 30.0
_THREADS = 16
_COORDINATOR = wire.coordinator_actor_name()

SUBMITTING, WAITING, RUNNING, STOPPING, ASKING, ENDING, OVER = (
    "submitting",
    "waiting",
    "running",
    "stopping",
    "asking",
    "ending",
    "over",
)
DONE, FAILED = "done", "failed"


class Progress(NamedTuple):
    """How far the replay is. Numbers of jobs; preempted: how often a job had to stop."""

    total: int
    submitted: int
    waiting: int
    running: int
    done: int
    rejected: int
    preempted: int
    nodes: int

    def text(self) -> str:
        """One line."""
        rejected = f", {self.rejected} rejected" if self.rejected else ""
        return (
            f"{self.submitted}/{self.total} submitted, {self.waiting} waiting, {self.running} running, {self.done} done"
            f"{rejected}, {self.preempted} preemptions, {self.nodes} nodes"
        )


class Played(NamedTuple):
    """What came of it. outcomes: trace row -> done, failed, rejected, preempted, cancelled or expired; rows that a
    timeout left are not in it. failures: why jobs failed.
    """

    outcomes: dict[str, str]
    failures: dict[str, str]
    seconds: float
    nodes_max: int
    timed_out: bool


def play(
    client: Client,
    jobs: Sequence[TraceJob],
    *,
    speed: float = 1.0,
    retries: int = 3,
    timeout_s: float | None = None,
    on_progress: Callable[[Progress], object] = lambda progress: None,
    work: Work | None = None,
) -> Played:
    """Plays the jobs `speed` times as fast as the trace, the first one at once. All of them are over when it returns or
    raises: what still waits or runs then is cancelled, after Ctrl-C too. `work`: Ray tasks, if not given.
    """
    player = _Player(client, jobs, speed, retries, on_progress, work or RayWork())
    try:
        return player.run(timeout_s)
    finally:
        player.close()


class Part(Protocol):
    """One task of a job."""

    @property
    def ended(self) -> Future[Any]:
        """Set when the task is over: with an error if it did not come to its end."""
        ...

    def cancel(self) -> None:
        """Ends it soon; harmless if it is over."""
        ...


class Work(Protocol):
    """What runs in a slot. Called in the loop's thread only."""

    def start(self, slot: Slot, seconds: float) -> Sequence[Part]:
        """Starts the job's tasks. Raises SlotOver, and leaves none behind, when the slot is over."""
        ...

    def nodes(self) -> int:
        """Nodes of the cluster, the head among them."""
        ...


@dataclass(eq=False)
class _Job:
    """One job on its way. `left_s`: what it still has to do; parts: its running tasks."""

    trace: TraceJob
    left_s: float
    state: str = SUBMITTING
    ticket: Ticket | None = None
    slot: Slot | None = None
    parts: set[Part] = field(default_factory=set)
    launches: int = 0
    launched_at: float = 0.0
    problem: str = ""


class _Player:
    def __init__(
        self,
        client: Client,
        jobs: Sequence[TraceJob],
        speed: float,
        retries: int,
        on_progress: Callable[[Progress], object],
        work: Work,
    ) -> None:
        self._work = work
        self._client, self._speed, self._retries, self._on_progress = client, speed, retries, on_progress
        self._jobs = [_Job(trace, trace.duration_s / speed) for trace in jobs]
        self._first_s = jobs[0].submit_s if jobs else 0.0
        self._run_id = uuid.uuid4().hex[:8]
        self._next = 0
        self._live: dict[str, _Job] = {}
        self._outcomes: dict[str, str] = {}
        self._failures: dict[str, str] = {}
        self._preempted = 0
        self._nodes = self._nodes_max = 0
        # what tasks and calls have to say; each is called in the loop's thread
        self._news: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        # one after the other, so that ages follow the trace
        self._submitter = ThreadPoolExecutor(1, "replay-submit")
        self._callers = ThreadPoolExecutor(_THREADS, "replay-call")
        self._told_at = self._counted_at = -1e9

    # --- the loop

    def run(self, timeout_s: float | None) -> Played:
        began = time.monotonic()
        timed_out = False
        while self._next < len(self._jobs) or self._live:
            now = time.monotonic() - began
            self._submit_due(now)
            trouble = self._client._trouble()
            if trouble is not None:
                raise trouble
            for job in list(self._live.values()):
                self._look(job)
            self._tell()
            self._hear()
            if timeout_s is not None and now > timeout_s:
                timed_out = True
                break
        seconds = time.monotonic() - began
        self._told_at = -1e9
        self._tell()
        return Played(dict(self._outcomes), dict(self._failures), seconds, self._nodes_max, timed_out)

    def _hear(self) -> None:
        """Waits for news for a tick at most, and works in all that there is."""
        try:
            self._news.get(timeout=TICK_S)()
            while True:
                self._news.get_nowait()()
        except queue.Empty:
            return

    def _background(
        self, pool: ThreadPoolExecutor, call: Callable[[], Any], then: Callable[[Any], None]
    ) -> None:
        """`then` gets the call's result in the loop's thread; an error ends the replay there."""
        future: Future[Any] = pool.submit(call)
        future.add_done_callback(lambda done: self._news.put(lambda: then(done.result())))

    def _tell(self) -> None:
        now = time.monotonic()
        if now - self._counted_at >= _NODES_S:
            self._counted_at = now
            self._nodes = self._work.nodes()
            self._nodes_max = max(self._nodes, self._nodes_max)
        if now - self._told_at < _PROGRESS_S:
            return
        self._told_at = now
        states = [job.state for job in self._live.values()]
        outcomes = list(self._outcomes.values())
        waiting = states.count(WAITING) + states.count(SUBMITTING)
        self._on_progress(
            Progress(
                len(self._jobs),
                self._next,
                waiting,
                len(states) - waiting,
                outcomes.count(DONE),
                outcomes.count("rejected"),
                self._preempted,
                self._nodes,
            )
        )

    # --- a job's way

    def _submit_due(self, now: float) -> None:
        due: list[_Job] = []
        while self._next < len(self._jobs):
            job = self._jobs[self._next]
            if (job.trace.submit_s - self._first_s) / self._speed > now:
                break
            due.append(job)
            self._live[job.trace.id] = job
            self._next += 1
        if not due:
            return
        wanted = [
            {
                "requester": job.trace.requester,
                "gpus": job.trace.gpus,
                "retries": self._retries,
                "expected_run_s": job.left_s,
                "id": f"replay-{self._run_id}-{job.trace.id}",
            }
            for job in due
        ]

        def submitted(tickets: list[Ticket]) -> None:
            for job, ticket in zip(due, tickets, strict=True):
                job.ticket, job.state = ticket, WAITING

        self._background(self._submitter, lambda: self._client.submit_many(wanted), submitted)

    def _look(self, job: _Job) -> None:
        if job.state == WAITING:
            self._look_at_waiter(job)
        elif job.state == RUNNING:
            assert job.slot is not None
            if not job.parts and not job.problem:  # all done, also if it is to stop by now
                job.state = ENDING
                self._background(self._callers, job.slot.release, lambda _: self._released(job))
            elif job.slot.preempting.is_set():
                self._stop(job)
            elif not job.parts:
                self._broken(job)
        elif job.state == STOPPING:
            assert job.slot is not None
            if not job.parts or job.slot.over:
                job.parts = set()
                job.state = ENDING
                slot = job.slot
                self._background(self._callers, slot.stopped, lambda _: self._wait_again(job))

    def _look_at_waiter(self, job: _Job) -> None:
        ticket = job.ticket
        assert ticket is not None
        if ticket.state in ("queued", "preempting") and ticket._lost is None:
            return
        try:
            slot = ticket.wait(0)
        except WaitTimeout:
            return
        except SlotError:
            self._over(job, ticket.state if ticket.done else FAILED)
            return
        job.slot, job.launches = slot, 0
        self._launch(job)

    def _launch(self, job: _Job) -> None:
        """Starts the job's tasks in its slot."""
        slot = job.slot
        assert slot is not None
        job.state, job.problem, job.parts = RUNNING, "", set()
        job.launches += 1
        job.launched_at = time.monotonic()
        try:
            parts = self._work.start(slot, job.left_s)
        except SlotOver as problem:  # preempted or lost meanwhile
            job.problem = str(problem)
            return
        job.parts = set(parts)
        for part in parts:
            self._when_ended(job, part)

    def _when_ended(self, job: _Job, part: Part) -> None:
        part.ended.add_done_callback(
            lambda ended: self._news.put(lambda: self._part_ended(job, part, ended.exception()))
        )

    def _part_ended(self, job: _Job, part: Part, problem: BaseException | None) -> None:
        if part not in job.parts:
            return  # of an earlier attempt
        job.parts.discard(part)
        if problem is not None and job.state == RUNNING:
            job.problem = job.problem or f"{type(problem).__name__}: {one_line(str(problem))}"
            self._cancel_tasks(job)

    def _broken(self, job: _Job) -> None:
        """A worker died: by itself, or with its group, which was taken before we heard of it. Ask which."""
        slot, ticket = job.slot, job.ticket
        assert slot is not None
        assert ticket is not None
        job.state = ASKING
        self._background(self._callers, ticket.status, lambda _: self._asked(job, slot))

    def _asked(self, job: _Job, slot: Slot) -> None:
        if slot.over or slot.preempting.is_set():
            self._stop(job)
        elif job.launches < LAUNCHES_MAX:
            self._launch(job)
        else:
            self._failures[job.trace.id] = job.problem
            job.state = ENDING
            self._background(self._callers, slot.release, lambda _: self._over(job, FAILED))

    def _released(self, job: _Job) -> None:
        assert job.ticket is not None
        state = job.ticket.state
        self._over(job, DONE if state == "released" else state)

    def _stop(self, job: _Job) -> None:
        """The job was told to stop: it does, and keeps what it has done."""
        self._preempted += 1
        job.left_s = max(job.left_s - (time.monotonic() - job.launched_at), 0.0)
        job.state = STOPPING
        self._cancel_tasks(job)

    def _wait_again(self, job: _Job) -> None:
        job.slot, job.state = None, WAITING

    def _over(self, job: _Job, outcome: str) -> None:
        job.state = OVER
        self._outcomes[job.trace.id] = outcome
        del self._live[job.trace.id]

    @staticmethod
    def _cancel_tasks(job: _Job) -> None:
        for part in job.parts:
            part.cancel()

    # --- the end

    def close(self) -> None:
        """Nothing of the replay is left, however it ended."""
        self._submitter.shutdown(wait=True, cancel_futures=True)
        self._callers.shutdown(wait=False, cancel_futures=True)
        live = list(self._live.values())
        for job in live:
            self._cancel_tasks(job)
        # those of a submission that was under way have no ticket in their job yet, but the client knows them
        ours = f"replay-{self._run_id}-"
        tickets = [t for t in self._client._live() if t.id.startswith(ours)]
        for start in range(0, len(tickets), BATCH_MAX):
            ops = [
                {"op": "cancel", "id": ticket.id, "token": ticket._token}
                for ticket in tickets[start : start + BATCH_MAX]
            ]
            try:
                results = self._client._caller.call(_COORDINATOR, ops, _CANCEL_S)
            except PoolsError as problem:
                log.warning("%d jobs were not cancelled, their leases will do it: %s", len(ops), problem)
                continue
            for ticket, result in zip(tickets[start : start + BATCH_MAX], results, strict=True):
                if "ok" in result:
                    ticket._apply(result["ok"])


# --- Ray


class _RayPart:
    """One Ray task."""

    def __init__(self, ref: Any) -> None:
        self._ref = ref
        self.ended: Future[Any] = ref.future()

    def cancel(self) -> None:
        import ray

        with contextlib.suppress(Exception):  # it ended by itself, or its worker did
            ray.cancel(self._ref)


class RayWork:
    """One task per bundle of the grant, with all of the bundle's devices. It sleeps."""

    def __init__(self) -> None:
        import ray

        # inside a function, so that it is sent by value and workers need not import this module
        def sleep(seconds: float) -> None:
            import time

            ends_at = time.monotonic() + seconds
            while (left_s := ends_at - time.monotonic()) > 0:
                time.sleep(min(left_s, 0.1))  # a cancel does not wake a sleep

        # max_calls=0: by default Ray starts a worker for each task with GPUs, lest a framework keeps their memory
        self._sleep: Any = ray.remote(num_cpus=0, max_retries=0, max_calls=0)(sleep)

    def start(self, slot: Slot, seconds: float) -> list[_RayPart]:
        parts: list[_RayPart] = []
        try:
            for index, bundle in enumerate(slot.bundles or [{}]):
                strategy = slot.scheduling_strategy_for(index) if bundle else slot.scheduling_strategy
                devices = {name: n for name, n in bundle.items() if name not in ("CPU", "memory")}
                gpus = devices.pop("GPU", 0.0)
                sleep = self._sleep.options(num_gpus=gpus, resources=devices, scheduling_strategy=strategy)
                parts.append(_RayPart(sleep.remote(seconds)))
        except SlotOver:
            for part in parts:
                part.cancel()
            raise
        return parts

    def nodes(self) -> int:
        import ray

        return sum(bool(node["Alive"]) for node in ray.nodes())
