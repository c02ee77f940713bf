"""A client process that waits for many slots at once, a thread for each: `python -m benchmarks.waiters WHO COUNT`.

It prints true once all are submitted; then, when each has had its slot and has given it back, {id: when it knew}, by
this machine's wall clock. Once more for each line on its standard input.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time

from benchmarks.live import NAMESPACE_ENV
from ray_pools.client import Client, Ticket, connect


def one_round(client: Client, requester: str, count: int) -> dict[str, float]:
    """Submits, waits for all, and gives each back as soon as it is there."""
    known: dict[str, float] = {}

    def use(ticket: Ticket) -> None:
        with ticket.wait():
            known[ticket.id] = time.time()

    tickets = client.submit_many([{"requester": requester, "pool_resources": {"seat": 1}}] * count)
    threads = [threading.Thread(target=use, args=(ticket,)) for ticket in tickets]
    for thread in threads:
        thread.start()
    print("true", flush=True)
    for thread in threads:
        thread.join()
    return known


def main(requester: str, count: int) -> None:
    client = connect(namespace=os.environ[NAMESPACE_ENV], quiet=True)
    print("true", flush=True)
    for _ in sys.stdin:
        print(json.dumps(one_round(client, requester, count)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
