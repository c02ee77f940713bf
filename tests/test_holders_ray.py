"""Holders that die, on live Ray: what they held is granted to the next waiter (docs/rules.md section 8).

Faults it stands for: a process that is gone keeps its slot until its lease runs out although Ray knows; one that lives
loses it, since its job is over or it left its cluster for a while; one that hung for too long works on.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from live_pools import WAIT_S, LivePools, Process, live_pools

import ray_pools as pools
from ray_pools.core import records as ev

pytestmark = [pytest.mark.ray, pytest.mark.slow]

CONFIG = """
pools:
  seats: {capacity: {seat: 4}, placement: none}
policies:
  - {requester: vision, pool: seats}
lease: {default_s: 60, renew_s: 1}
"""
SEATS = 4


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LivePools]:
    with live_pools(tmp_path_factory.mktemp("holders"), CONFIG, dashboard=True) as live:
        yield live


Start = Callable[..., Process]


@pytest.fixture
def start(live: LivePools) -> Iterator[Start]:
    """Starts a holder; all are gone after the test."""
    started: list[Process] = []

    def begin(kind: str, lease_s: float = 60.0) -> Process:
        started.append(Process(live, "holders_live.py", kind, str(lease_s)))
        return started[-1]

    yield begin
    for process in started:
        process.close()


def taken(process: Process) -> tuple[str, int]:
    """The request that it holds, and the pid of who holds it."""
    _, id, pid = process.line("held ").split()
    return id, int(pid)


def fill(live: LivePools, but: int) -> list[Any]:
    """Others hold what is left, so that a seat is free only when one of the `but` is given back."""
    more = [{"requester": "vision", "pool_resources": {"seat": 1}}] * (SEATS - but)
    others = live.client.submit_many(more) if more else []
    for other in others:
        other.wait(WAIT_S)
    return others


def granted_after(live: LivePools, end: Callable[[], None]) -> tuple[pools.Ticket, float]:
    """One more waits; then the end comes: the waiter's ticket, and the seconds until it had the seat."""
    waiter = live.client.submit("vision", pool_resources={"seat": 1})
    assert waiter.explain()["seats"]["cause"] == "waiting_capacity"
    ended_at = time.monotonic()
    end()
    waiter.wait(WAIT_S)
    return waiter, time.monotonic() - ended_at


def story(live: LivePools, holder: str, waiter: str) -> list[str]:
    """What happened to both, in order."""
    said = []
    for _, event in live.events("coordinator"):
        if isinstance(event, ev.HolderGone) and holder in event.ids:
            said.append("gone")
        elif isinstance(event, (ev.Asked, ev.Finished)) and event.id == holder:
            said.append(getattr(event, "what", "") or getattr(event, "state", ""))
        elif isinstance(event, ev.Told) and event.id == waiter:
            said.append("the waiter is granted")
    return [*dict.fromkeys(said)]


def free(*tickets: pools.Ticket) -> None:
    for ticket in tickets:
        ticket.release()


def in_order(said: list[str], found_by: str) -> None:
    expected = ["gone"] if found_by == "ray" else []
    assert said[: len(expected) + 1] == [*expected, "expire"]
    assert sorted(said[len(expected) + 1 :]) == ["expired", "the waiter is granted"]


@pytest.fixture
def in_job(live: LivePools, tmp_path: Path) -> Iterator[Callable[[], tuple[str, int]]]:
    """Starts a holder as the driver of a job that is submitted to Ray: what it holds, and its pid."""
    from ray.job_submission import JobSubmissionClient

    jobs, heard = JobSubmissionClient(live.cluster.dashboard_address), tmp_path / "said"
    os.mkfifo(heard)
    submitted: list[str] = []

    def begin() -> tuple[str, int]:
        script = Path(__file__).parent / "holders_live.py"
        entrypoint = f"{sys.executable} {script} job 60 > {heard}"
        submitted.append(jobs.submit_job(entrypoint=entrypoint))
        fd = os.open(heard, os.O_RDWR)  # open for both, it does not wait for the job to open it
        too_late = threading.Timer(WAIT_S, os.write, (fd, b"too late\n"))
        too_late.start()
        with open(fd) as said:
            lines = iter(said.readline, "too late\n")
            held = next((line.split() for line in lines if line.startswith("held ")), None)
            too_late.cancel()
        assert held is not None, jobs.get_job_logs(submitted[-1])
        return held[1], int(held[2])

    yield begin
    for job in submitted:
        jobs.stop_job(job)


@pytest.mark.parametrize("kind", ["driver", "actor", "task"])
def test_what_a_killed_process_held_is_granted_to_the_next(live: LivePools, start: Start, kind: str) -> None:
    """An actor and a task die alone here: the driver that started them lives on."""
    process = start(kind)
    id, pid = taken(process)
    others = fill(live, but=1)
    waiter, took_s = granted_after(live, lambda: os.kill(pid, signal.SIGKILL))
    print(f"{kind} killed: granted to the next after {took_s:.2f} s, with a lease of 60 s")
    in_order(story(live, id, waiter.id), "ray")
    free(waiter, *others)


def test_what_the_killed_driver_of_a_submitted_job_held_is_granted_to_the_next(
    live: LivePools, in_job: Callable[[], tuple[str, int]]
) -> None:
    id, pid = in_job()
    others = fill(live, but=1)
    waiter, took_s = granted_after(live, lambda: os.kill(pid, signal.SIGKILL))
    print(f"driver of a job killed: granted to the next after {took_s:.2f} s, with a lease of 60 s")
    in_order(story(live, id, waiter.id), "ray")
    free(waiter, *others)


def test_what_a_process_held_that_ended_by_itself_is_granted_at_once(live: LivePools, start: Start) -> None:
    process = start("driver")
    id, _ = taken(process)
    others = fill(live, but=1)
    waiter, took_s = granted_after(live, lambda: process.tell("exit"))
    print(f"driver ended by itself: granted to the next after {took_s:.2f} s, with a lease of 60 s")
    in_order(story(live, id, waiter.id), "ray")
    free(waiter, *others)


def test_a_stopped_process_loses_its_slot_by_its_lease_and_learns_of_it(
    live: LivePools, start: Start
) -> None:
    """Ray knows nothing of a process that hangs. As it goes on it must not work in what is another's."""
    process = start("driver", lease_s=3.0)
    id, pid = taken(process)
    others = fill(live, but=1)
    try:
        waiter, took_s = granted_after(live, lambda: os.kill(pid, signal.SIGSTOP))
    finally:
        os.kill(pid, signal.SIGCONT)
    print(f"driver hangs: granted to the next after {took_s:.2f} s, with a lease of 3 s")
    in_order(story(live, id, waiter.id), "lease")
    process.do("lost")
    free(waiter, *others)


def test_who_lives_keeps_its_slot(live: LivePools, start: Start) -> None:
    """A detached actor whose job is over, and a driver that left its cluster and came back, both outlast a look at
    Ray's tables that finds another process dead."""
    detached, away, dies = start("detached"), start("driver"), start("driver")
    (kept, actor_pid), (returns, _), (_, pid) = taken(detached), taken(away), taken(dies)
    away.do("leave ray")
    detached.tell("exit")
    detached.popen.wait(WAIT_S)
    others = fill(live, but=3)
    # its death is found by a look that came after the end of the other two's jobs
    waiter, _ = granted_after(live, lambda: os.kill(pid, signal.SIGKILL))
    states = {id: (live.client.get(id) or {}).get("state") for id in (kept, returns)}
    assert states == {kept: "allocated", returns: "allocated"}
    away.do("come back")
    away.do("release")
    assert (live.client.get(returns) or {}).get("state") == "released"
    another = live.client.submit("vision", pool_resources={"seat": 1})
    another.wait(WAIT_S)
    last, took_s = granted_after(live, lambda: os.kill(actor_pid, signal.SIGKILL))
    print(f"detached actor killed after its job was over: granted to the next after {took_s:.2f} s")
    in_order(story(live, kept, last.id), "ray")
    free(waiter, another, last, *others)


def test_what_a_process_on_a_dead_node_held_is_granted_to_the_next(live: LivePools, start: Start) -> None:
    """Ray calls a node dead whose raylet it has not heard of for seconds: until then nobody can know."""
    process = start("away")
    id, pid = taken(process)
    raylet = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    assert Path(f"/proc/{raylet}/comm").read_text().strip() == "raylet"
    others = fill(live, but=1)

    def end() -> None:
        for each in (raylet, pid):
            os.kill(each, signal.SIGKILL)

    waiter, took_s = granted_after(live, end)
    print(f"node killed: granted to the next after {took_s:.2f} s, with a lease of 60 s")
    in_order(story(live, id, waiter.id), "ray")
    free(waiter, *others)
