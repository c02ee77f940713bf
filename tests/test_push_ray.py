"""Who waits and who holds, in numbers and over outages, on live Ray (docs/protocol.md, "Wire" and "Leases").

Faults it stands for: a grant that does not reach its waiter; an actor that is wedged by those who wait at it; a kill
of an actor, or an outage of Ray's GCS, that costs somebody more than a delay; a group that goes before its time.
"""

# ruff: noqa: PT012 - the block of a slot is what is tested
from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from live_pools import WAIT_S, LivePools, live_pools

import ray_pools as pools
from ray_pools import wire
from ray_pools.core import records as ev
from ray_pools.log_check import check_logs

pytestmark = [pytest.mark.ray, pytest.mark.slow]

NAMES = ["crowd", "seats", "soft", "hard"]
CONFIG = """
namespace: push
pools:
  crowd: {capacity: {seat: 16}, placement: none}
  seats: {capacity: {seat: 10}, placement: none}
  soft: {capacity: {mcpu: 1000}, grace_s: 600}
  hard: {capacity: {mcpu: 1000}, grace_s: 3}
policies:
  - {requester: many, pool: crowd}
  - {requester: vision, pool: seats}
  - {requester: low-soft, pool: soft, priority: 1}
  - {requester: high-soft, pool: soft, priority: 9}
  - {requester: low-hard, pool: hard, priority: 1}
  - {requester: high-hard, pool: hard, priority: 9}
"""
CLIENTS, WAITERS, LONG_POLLS = 8, 1000, 2000


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LivePools]:
    with live_pools(tmp_path_factory.mktemp("push"), CONFIG) as live:
        yield live


@pytest.fixture(autouse=True)
def _logs_hold(live: LivePools) -> Iterator[None]:
    """Whatever happened: no request is held twice, no log has a hole."""
    yield
    report = check_logs(live.store, NAMES)
    assert report.ok, "\n".join(str(problem) for problem in report.problems)


def json_of(process: subprocess.Popen[str]) -> Any:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(("{", "true")):
            return json.loads(line)
    raise AssertionError("a client process ended early")


def test_every_grant_of_a_thousand_reaches_its_waiter(live: LivePools) -> None:
    command = [sys.executable, "-m", "benchmarks.waiters", "many", str(WAITERS // CLIENTS)]
    top = Path(__file__).parent.parent
    env = {**live.env, "RAY_POOLS_BENCH_NAMESPACE": live.client.namespace}  # of benchmarks/live.py
    processes = [
        subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=top)
        for _ in range(CLIENTS)
    ]
    known: dict[str, float] = {}
    try:
        for process in processes:
            json_of(process)
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        for process in processes:
            json_of(process)
            known.update(json_of(process))
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    granted = {event.id: at for at, event in live.events("pool:crowd") if isinstance(event, ev.Granted)}
    assert len(known) == WAITERS
    assert known.keys() == granted.keys()
    took = sorted(at - granted[id] for id, at in known.items())
    print(
        f"grant to known: p50 {took[len(took) // 2] * 1e3:.1f} ms, p99 {took[len(took) * 99 // 100] * 1e3:.1f} ms"
    )


def test_thousands_of_long_polls_leave_room_for_calls_and_are_woken_one_by_one(live: LivePools) -> None:
    """Fault: an async actor runs so many calls at once and no more; who waits takes the place of who releases."""
    start, name = live.client._transport.start, wire.coordinator_actor_name()
    seq = live.client.ping()["seq"]
    polls = [start(name, "wait", wire.encode_wait(f"poll-{n}", seq, 45.0)) for n in range(LONG_POLLS)]
    last = f"poll-{LONG_POLLS - 1}"
    op = {
        "op": "submit",
        "id": last,
        "requester": "vision",
        "amounts": {"seat": 1, "step_run": 1},
        "client": last,
    }
    assert live.client.coordinator(op)["id"] == last
    _, changes = wire.decode_changes(polls[-1].result(WAIT_S))
    assert changes[0]["id"] == last
    assert live.client.coordinator({"op": "release", "id": last})["state"] in ("released", "cancelled")
    assert not any(poll.done() for poll in polls[:-1]), "nobody else was woken"


def held_and_waiting(live: LivePools, count: int) -> tuple[list[pools.Ticket], list[pools.Client]]:
    """So many requests, each of a client of its own with a long poll and renewals of its own."""
    clients = [pools.connect(namespace=live.client.namespace, quiet=True) for _ in range(count)]
    return [client.submit("vision", pool_resources={"seat": 1}) for client in clients], clients


def test_killed_actors_are_a_delay_for_fifty_who_wait_and_ten_who_hold(live: LivePools) -> None:
    holders, clients = held_and_waiting(live, 10)
    slots = [ticket.wait(WAIT_S) for ticket in holders]
    waiters, more = held_and_waiting(live, 50)

    def use(ticket: pools.Ticket) -> str:
        with ticket.wait(WAIT_S) as slot:
            slot.check()
        return ticket.state

    try:
        with ThreadPoolExecutor(50) as threads:
            using = [threads.submit(use, ticket) for ticket in waiters]
            for actor in ("seats", "coordinator", "seats"):
                os.kill(live.ask(actor, "ping")["pid"], signal.SIGKILL)
            for slot in slots:
                slot.check()
                assert not slot.preempting.is_set()
            os.kill(live.ask("seats", "ping")["pid"], signal.SIGKILL)
            for slot in slots:
                slot.release()
            assert Counter(done.result(WAIT_S) for done in using) == {"released": 50}
    finally:
        for client in [*clients, *more]:
            client.close()
    mine = {ticket.id for ticket in [*holders, *waiters]}
    granted = Counter(
        event.id
        for _, event in live.events("pool:seats")
        if isinstance(event, ev.Granted) and event.id in mine
    )
    assert granted == dict.fromkeys(mine, 1)


def gcs_of(live: LivePools) -> int:
    def name(pid: int) -> str:
        try:
            return Path(f"/proc/{pid}/comm").read_text().strip()
        except OSError:
            return ""

    (found,) = [pid for pid in live.cluster.pids() if name(pid).startswith("gcs_server")]
    return found


def test_ten_seconds_without_the_gcs_cost_nobody_a_slot(live: LivePools) -> None:
    """And neither does a coordinator that is killed meanwhile, which can't be started anew before it is back."""
    holder = live.client.submit("vision", pool_resources={"seat": 10}, lease_s=20.0)
    slot = holder.wait(WAIT_S)
    waiter = live.client.submit("vision", pool_resources={"seat": 10}, lease_s=20.0)
    gcs, epoch = gcs_of(live), live.client.ping()
    os.kill(gcs, signal.SIGSTOP)
    try:
        os.kill(epoch["pid"], signal.SIGKILL)
        threading.Event().wait(10.0)  # the outage itself
    finally:
        os.kill(gcs, signal.SIGCONT)
    assert live.client.ping()["epoch"] > epoch["epoch"]
    slot.check()
    assert holder.status()["state"] == "allocated"
    slot.release()
    with waiter.wait(WAIT_S):
        pass
    assert (holder.state, waiter.state) == ("released", "released")


# --- called back


def called_back(live: LivePools, pool: str) -> tuple[pools.Slot, pools.Ticket, Any, float]:
    """A holder with work in its group is preempted: its slot, who it is for, its work, and when it was told."""
    import ray

    slot = live.client.submit(f"low-{pool}", cpus=1, retries=1).wait(WAIT_S)

    @ray.remote(num_cpus=1)
    class Work:
        def step(self) -> str:
            return "done"

    work = Work.options(**slot.options()).remote()
    assert ray.get(work.step.remote(), timeout=WAIT_S) == "done"
    told: list[float] = []
    heard = threading.Event()
    slot.on_preempt(lambda _: (told.append(time.time()), heard.set()))
    winner = live.client.submit(f"high-{pool}", cpus=1)
    assert heard.wait(WAIT_S)
    (decided,) = [at for at, event in live.events(f"pool:{pool}") if isinstance(event, ev.Nominated)]
    print(f"{pool}: the holder was told {(told[0] - decided) * 1e3:.1f} ms after the decision")
    assert slot.preempting.is_set()
    return slot, winner, work, decided


def group_state(slot: pools.Slot) -> str:
    from ray.util import placement_group_table

    return str(placement_group_table().get(slot._placement["pg"], {}).get("state", "REMOVED"))


def ends_of(live: LivePools, pool: str, slot: pools.Slot) -> list[tuple[float, str]]:
    """When the attempt ended for its holder, and when its group was gone."""
    return [
        (at, type(event).__name__)
        for at, event in live.events(f"pool:{pool}")
        if isinstance(event, (ev.Ending, ev.Ended)) and event.id == slot.id and event.k == slot.k
    ]


def test_the_group_of_who_ignores_the_call_goes_at_the_deadline_and_not_before(live: LivePools) -> None:
    import ray

    slot, winner, work, decided = called_back(live, "hard")
    left_s = slot.grace_left_s()
    assert left_s is not None
    if left_s > 0:  # else this machine is too slow to look in between; the log tells all the same
        assert group_state(slot) == "CREATED"
        assert ray.get(work.step.remote(), timeout=WAIT_S) == "done"
    with pytest.raises(pools.SlotPreempted):
        slot.check()
    granted = winner.wait(WAIT_S)
    (ending, first), (_, last) = ends_of(live, "hard", slot)
    assert (first, last) == ("Ending", "Ended")
    assert ending - decided >= 3.0, "the whole grace is the holder's"
    assert group_state(slot) == "REMOVED"
    granted.release()
    again = slot._ticket.wait(WAIT_S)
    assert again.k == 2, "a retry was left"
    again.release()


def test_the_group_of_who_says_stopped_goes_then_and_its_block_raises(live: LivePools) -> None:
    slot, winner, work, _ = called_back(live, "soft")
    with pytest.raises(pools.SlotPreempted), slot:
        assert group_state(slot) == "CREATED"
        assert ends_of(live, "soft", slot) == [], "nothing ends before the holder says so"
        del work
    granted = winner.wait(WAIT_S)  # with ten minutes of grace left
    assert [name for _, name in ends_of(live, "soft", slot)] == ["Ending", "Ended"]
    asked = [e.what for _, e in live.events("coordinator") if isinstance(e, ev.Asked) and e.id == slot.id]
    assert asked == ["stopped"]
    assert group_state(slot) == "REMOVED"
    granted.release()
    slot._ticket.cancel()
