"""A client process in a closed loop: `python -m benchmarks.cycles WHAT [NAME]`.

WHAT it does in a cycle:

- slots: takes a slot, waits until it can be used, and gives it back; with a `batch`, so many at once.
- bare: two calls of the no-op actor NAME.
- semaphore: acquires and releases dask's distributed.Semaphore of the scheduler at NAME.

It prints true once it is connected. For each line {"seconds": s, "requesters": [...], "batch": n} on its standard
input it goes round for so long and prints {"cycles": n, "seconds": s, "times": [seconds of each]}.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.live import NAMESPACE_ENV, Worker

ROOMY = """
pools:
  free: {capacity: {seat: 1000000}, placement: none}
policies:
  - {requester: loops, pool: free}
"""
"""A pool that counts only, and has room for all."""

MAX_LEASES = 1_000_000
"""Of the semaphore: nobody waits for anybody, as in a pool with room."""

Cycle = Callable[[str, int], None]


def slots() -> Cycle:
    """Of the pools in this process's environment."""
    from ray_pools.client import connect

    client = connect(namespace=os.environ[NAMESPACE_ENV], quiet=True)

    def cycle(requester: str, batch: int) -> None:
        if batch == 1:
            client.submit(requester, pool_resources={"seat": 1}).wait().release()
            return
        asked = {"requester": requester, "pool_resources": {"seat": 1}}
        tickets = client.submit_many([asked] * batch)
        for ticket in tickets:
            ticket.wait()
        client.release_many(tickets)

    return cycle


def bare(name: str) -> Cycle:
    """Two calls of a no-op actor."""
    import ray

    from ray_pools.client import connect_ray

    connect_ray(quiet=True)
    actor: Any = ray.get_actor(name, namespace=name)

    def cycle(requester: str, batch: int) -> None:
        ray.get(actor.call.remote(b"x" * 100))
        ray.get(actor.call.remote(b"x" * 100))

    return cycle


def semaphore(address: str) -> Cycle:
    """dask's, with its own client; the release is acknowledged there too."""
    from distributed import Client, Semaphore  # type: ignore[import-not-found,unused-ignore]

    Client(address, set_as_default=True)
    found = Semaphore(max_leases=MAX_LEASES, name="benchmark")

    def cycle(requester: str, batch: int) -> None:
        found.acquire()
        found.release()

    return cycle


def go_round(cycle: Cycle, seconds: float, requesters: Sequence[str], batch: int) -> dict[str, Any]:
    """Cycles until the time is over, the requesters in turn."""
    times = []
    begun = at = time.perf_counter()
    for requester in itertools.cycle(requesters):
        cycle(requester, batch)
        before, at = at, time.perf_counter()
        times.append(at - before)
        if at - begun >= seconds:
            break
    return {"cycles": len(times) * batch, "seconds": at - begun, "times": [round(each, 7) for each in times]}


def side_by_side(
    processes: Sequence[Worker], seconds: float, requesters: Sequence[str] = ("",), batch: int = 1
) -> tuple[float, list[float]]:
    """All of them at once for some seconds: their cycles a second together, and the seconds of each cycle. Each begins
    with another requester.
    """
    for index, process in enumerate(processes):
        at = index % len(requesters)
        turned = [*requesters[at:], *requesters[:at]]
        process.tell({"seconds": seconds, "requesters": turned, "batch": batch})
    found: list[Mapping[str, Any]] = [process.read() for process in processes]
    rate = sum(each["cycles"] / each["seconds"] for each in found)
    return rate, [each for one in found for each in one["times"]]


def main(what: str, *arguments: str) -> None:
    cycle = {"slots": slots, "bare": bare, "semaphore": semaphore}[what](*arguments)
    print("true", flush=True)
    for line in sys.stdin:
        print(json.dumps(go_round(cycle, **json.loads(line))), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
