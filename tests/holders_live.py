"""What `test_holders_ray.py` runs in processes of their own: clients that take a slot, and come to an end in some way.

`python holders_live.py KIND [LEASE_S]` takes a seat and prints its request's id and the pid of who holds it; then it
does what its standard input says, a line at a time, and says "done" after each.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import ray

import ray_pools as pools
from ray_pools.client import connect_ray


def take(lease_s: float) -> tuple[Any, str, int]:
    client = pools.connect(quiet=True)
    slot = client.submit("vision", pool_resources={"seat": 1}, lease_s=lease_s).wait(60)
    return slot, slot.id, os.getpid()


@ray.remote(num_cpus=0, max_restarts=0)
class Holder:
    """An actor that holds."""

    def take(self, lease_s: float) -> tuple[str, int]:
        self.slot, *said = take(lease_s)
        return said[0], said[1]

    def state(self) -> str:
        return str(self.slot._ticket.status()["state"])


ACTORS: dict[str, dict[str, Any]] = {
    "actor": {},
    "detached": {"name": "holder", "lifetime": "detached", "namespace": "test"},
    # on a node of its own
    "away": {"num_gpus": 1, "label_selector": {"ray-pools.io/node-type": "gpu_ondemand"}},
}


@ray.remote(num_cpus=0)
class Board:
    """Where a task says what it can't return, for it goes on."""

    def __init__(self) -> None:
        import asyncio

        self.said: Any = asyncio.Queue()

    async def say(self, what: Any) -> None:
        await self.said.put(what)

    async def hear(self) -> Any:
        return await self.said.get()


@ray.remote(num_cpus=0, max_retries=0)
def hold_in_task(board: Any, lease_s: float) -> None:
    slot, *said = take(lease_s)
    ray.get(board.say.remote(said))
    slot.preempting.wait()


def main(kind: str, lease_s: float) -> None:
    connect_ray(quiet=True)
    held: Any = None
    if kind in ("driver", "job"):
        held, *said = take(lease_s)
    elif kind in ACTORS:
        held = Holder.options(**ACTORS[kind]).remote()
        said = ray.get(held.take.remote(lease_s))
    else:
        board = Board.remote()
        held = hold_in_task.remote(board, lease_s)
        said = ray.get(board.hear.remote())
    print("held", *said, flush=True)
    if kind == "job":  # nobody can tell it anything
        held.preempting.wait()
    for line in sys.stdin:
        obey(line.strip(), held)
        print("done", flush=True)


def obey(what: str, slot: Any) -> None:
    if what == "leave ray":
        ray.shutdown()
    elif what == "come back":
        connect_ray(quiet=True)
        slot.check()
    elif what == "release":
        slot.release()
    elif what == "lost":  # it was stopped for longer than its lease
        try:
            slot.check()
        except pools.LeaseExpired:
            pass
        else:
            raise AssertionError("it works on in a slot that is gone")
        try:
            with slot:
                pass
        except pools.LeaseExpired:
            return
        raise AssertionError("the block ended as if all had been well")
    elif what == "exit":
        sys.exit(0)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]) if len(sys.argv) > 2 else 60.0)
