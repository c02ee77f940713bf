"""Client processes in a closed loop: each takes a slot of a pool that counts only, gives it back, and begins anew.

With 1, 8 and 32 of them: what they do in all grows until the actors can't do more, and must not fall from there.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.cycles import ROOMY, side_by_side
from benchmarks.figures import Figure, middle, ratios, rounds, size, verdict
from benchmarks.live import live, workers

ROUNDS, SECONDS = 5, 3.0
PROCESSES = (1, 8, 32)
OF_PLATEAU_MIN = 0.8


def run() -> Iterator[Figure]:
    """The figures, medians of 5 rounds in turn."""
    counts, seconds = size(PROCESSES, (1, 2)), size(SECONDS, 0.2)
    with (
        live(ROOMY) as bench,
        workers([bench.process("benchmarks.cycles", "slots") for _ in range(max(counts))]) as all_of_them,
    ):

        def rate(count: int) -> float:
            return side_by_side(all_of_them[:count], seconds, ["loops"])[0]

        rate(max(counts))
        found = rounds(ROUNDS, *(lambda count=count: rate(count) for count in counts))
    best = [max(each) for each in zip(*found, strict=True)]
    for count, each in zip(counts, found, strict=True):
        value, spread = middle(each)
        ratio = ratios(each, best)
        target, met = "", None
        if count == max(counts):
            target, met = f"at least {OF_PLATEAU_MIN:g} of the best", verdict(ratio >= OF_PLATEAU_MIN)
        name = f"clients: throughput, {count} process{'es' * (count > 1)}"
        yield Figure(name, value, "cycles/s", ratio, target, met, spread)
