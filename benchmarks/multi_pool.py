"""What it costs to queue in three pools at once, each of which must be asked (bids), over one pool that is told.

The same closed loop as of `clients`, by one client process and by eight; `ratio` is to the single pool in the same
round.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.cycles import side_by_side
from benchmarks.figures import Figure, middle, ratios, size, verdict
from benchmarks.live import live, quantile, workers

ROUNDS, SECONDS = 5, 2.0
PROCESSES = (1, 8)
TIMES_MAX = 2.0

CONFIG = """
pools:
  first: {capacity: {seat: 1000000}, placement: none}
  second: {capacity: {seat: 1000000}, placement: none}
  third: {capacity: {seat: 1000000}, placement: none}
policies:
  - {requester: single, pool: first}
  - {requester: triple, pool: first, priority: 3}
  - {requester: triple, pool: second, priority: 2}
  - {requester: triple, pool: third, priority: 1}
"""


def run() -> Iterator[Figure]:
    """The figures, medians of 5 rounds in turn."""
    counts, seconds = size(PROCESSES, (1, 2)), size(SECONDS, 0.2)
    found: dict[tuple[int, str], list[float]] = {}
    with (
        live(CONFIG) as bench,
        workers([bench.process("benchmarks.cycles", "slots") for _ in range(max(counts))]) as all_of_them,
    ):
        side_by_side(all_of_them, seconds, ["single", "triple"])
        for _ in range(ROUNDS):
            for count in counts:
                for requester in ("single", "triple"):
                    _, times = side_by_side(all_of_them[:count], seconds, [requester])
                    found.setdefault((count, requester), []).append(quantile(times, 0.5))
    for (count, requester), values in found.items():
        value, spread = middle(values)
        ratio = ratios(values, found[count, "single"])
        target, met = "", None
        if requester == "triple":
            target, met = f"at most {TIMES_MAX:g} times one pool", verdict(ratio <= TIMES_MAX)
        pools = "one pool" if requester == "single" else "three pools"
        clients = f"{count} client{'s' * (count > 1)}"
        yield Figure(
            f"multi-pool: cycle in {pools}, {clients}, p50", value * 1e3, "ms", ratio, target, met, spread
        )
