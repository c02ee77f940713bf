"""What actors hold in memory with 50,000 requests waiting and 5,000 held, over what they hold when idle.

By the resident memory of coordinator and pool, five readings each, while slots are released and granted.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.depth import REQUESTERS, seats
from benchmarks.figures import Figure, middle, size, verdict
from benchmarks.live import Live, live, rss_mb
from ray_pools.client import Ticket

READINGS = 5
WAITING, HELD = 50_000, 5_000
MORE_MAX_MB = 150.0


def config(held: int) -> str:
    """A pool of so many seats."""
    policies = "".join(f"  - {{requester: waits-{n}, pool: full}}\n" for n in range(REQUESTERS))
    pools = f"pools:\n  full: {{capacity: {{seat: {held}}}, placement: none}}\n"
    return f"{pools}policies:\n{policies}limits: {{waiting_per_requester: 20000}}\n"


def _submit(bench: Live, count: int) -> list[Ticket]:
    return bench.client.submit_many(seats(0, count))


def run() -> Iterator[Figure]:
    """The figures, medians of 5 readings."""
    waiting, held = size(WAITING, 500), size(HELD, 50)
    with live(config(held)) as bench:
        actors = {"coordinator": bench.pid(), "pool": bench.pid("full")}
        _submit(bench, 1)[0].wait().release()
        idle = {name: rss_mb(pid) for name, pid in actors.items()}
        holding = _submit(bench, held)
        for ticket in holding:
            ticket.wait()
        _submit(bench, waiting)
        readings: dict[str, list[float]] = {name: [] for name in actors}
        for _ in range(READINGS):
            for ticket in holding[:10]:
                ticket.release()
            del holding[:10]
            for name, pid in actors.items():
                readings[name].append(rss_mb(pid))
    for name in actors:
        whole, spread = middle(readings[name])
        more = whole - idle[name]
        target, met = f"at most {MORE_MAX_MB:g} MB more", verdict(more <= MORE_MAX_MB)
        shown = f"memory: {name}, {waiting:,} waiting and {held:,} held, over idle"
        yield Figure(shown, more, "MB", whole / idle[name], target, met, spread)
