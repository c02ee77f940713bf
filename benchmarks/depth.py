"""Whether grants come as fast behind 50,000 waiting requests as behind 100.

Two installations side by side, one with a short and one with a long queue, each a full pool of 64 seats for eight
requesters. In each step a client gives 32 seats back, waits until the 32 requests that are next have them, and submits
32 more: the queue stays as long as it is.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator

from benchmarks.figures import Figure, middle, ratios, rounds, size, verdict
from benchmarks.live import Live, live
from ray_pools.client import Ticket

ROUNDS, STEPS = 5, 10
SEATS, STEP, REQUESTERS = 64, 32, 8
DEPTHS = (100, 50_000)
RATIO_MIN = 0.7

CONFIG = f"""
pools:
  full: {{capacity: {{seat: {SEATS}}}, placement: none, queueing: strict}}
policies:
{"".join(f"  - {{requester: waits-{n}, pool: full}}{chr(10)}" for n in range(REQUESTERS))}
limits: {{waiting_per_requester: 20000}}
"""


def seats(first: int, count: int) -> list[dict[str, object]]:
    """Requests of one seat each, of the requesters in turn."""
    return [
        {"requester": f"waits-{number % REQUESTERS}", "pool_resources": {"seat": 1}, "lease_s": 0}
        for number in range(first, first + count)
    ]


class Full:
    """A pool whose seats are all held, with a queue in front of it."""

    def __init__(self, bench: Live, depth: int) -> None:
        self._client, self._next = bench.client, 0
        self._tickets: deque[Ticket] = deque()
        self._submit(SEATS + depth)
        for _ in range(2):
            self.step()

    def _submit(self, count: int) -> None:
        """In the order of the queue: one policy is as good as another, so that the oldest is next."""
        self._tickets += self._client.submit_many(seats(self._next, count))
        self._next += count

    def step(self) -> None:
        """Grants STEP requests, with the queue as long afterwards as before."""
        self._client.release_many([self._tickets.popleft() for _ in range(STEP)])
        for index in range(SEATS - STEP, SEATS):
            self._tickets[index].wait()
        self._submit(STEP)

    def rate(self, steps: int) -> float:
        """Grants a second."""
        begun = time.perf_counter()
        for _ in range(steps):
            self.step()
        return steps * STEP / (time.perf_counter() - begun)


def run() -> Iterator[Figure]:
    """The figures, medians of 5 rounds in turn."""
    depths, steps = size(DEPTHS, (100, 1000)), size(STEPS, 2)
    with live(CONFIG) as one, live(CONFIG) as other:
        short, long = (Full(bench, depth) for bench, depth in zip((one, other), depths, strict=True))
        found = rounds(ROUNDS, lambda: short.rate(steps), lambda: long.rate(steps))
    for depth, values in zip(depths, found, strict=True):
        value, spread = middle(values)
        ratio = ratios(values, found[0])
        target, met = "", None
        if depth == depths[1]:
            target = f"at least {RATIO_MIN:g} of {depths[0]} waiting"
            met = verdict(ratio >= RATIO_MIN)
        yield Figure(f"depth: grants, {depth:,} waiting", value, "grants/s", ratio, target, met, spread)
