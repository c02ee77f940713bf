"""Many at once: `submit_many` of 100, all of them usable, and the release of all, by one client.

The pool counts only and has room for all. `ratio` is grants for the time of one bare call, measured in the same round.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from benchmarks.cycles import ROOMY
from benchmarks.figures import Figure, middle, ratios, size, verdict
from benchmarks.live import Bare, Live, live

ROUNDS, BATCHES, COUNT = 5, 20, 100
PER_BARE_CALL_MIN = 10.0


def once(bench: Live) -> tuple[float, float]:
    """Seconds until all can be used, and until all are given back."""
    begun = time.perf_counter()
    tickets = bench.client.submit_many([{"requester": "loops", "pool_resources": {"seat": 1}}] * COUNT)
    for ticket in tickets:
        ticket.wait()
    usable = time.perf_counter() - begun
    bench.client.release_many(tickets)
    return usable, time.perf_counter() - begun


def run() -> Iterator[Figure]:
    """The figures, medians of 5 rounds."""
    count = size(BATCHES, 2)
    bare_s, usable_s, all_s = [], [], []
    with live(ROOMY) as bench:
        bare = Bare()
        once(bench)
        for _ in range(ROUNDS):
            before = bare.p50(size(100, 5))
            found = [once(bench) for _ in range(count)]
            bare_s.append((before + bare.p50(size(100, 5))) / 2)
            usable_s.append(sum(each[0] for each in found) / count)
            all_s.append(sum(each[1] for each in found) / count)
        bare.close()
    value, spread = middle(usable_s)
    yield Figure(f"batch: {COUNT} usable", value * 1e3, "ms", ratios(usable_s, bare_s), "", None, spread)
    rate, spread = middle([COUNT / each for each in all_s])
    per_call = ratios([COUNT * each for each in bare_s], all_s)
    target, met = f"at least {PER_BARE_CALL_MIN:g} per bare call", verdict(per_call >= PER_BARE_CALL_MIN)
    yield Figure(f"batch: {COUNT} granted and released", rate, "grants/s", per_call, target, met, spread)
