"""What a slot with a placement group costs over the group alone.

acquire: `client.submit(...).wait()` in a pool that places: from the call to a slot whose group is ready. bare: a
group of the same bundle, made by Ray's own call and watched until it is ready, in the same churn: one at a time,
each removed and left to settle before the next, as the pool does before it says that capacity is free. The groups
ask for a hundredth of a CPU, so that they find room on any cluster that is not full.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from benchmarks.figures import Figure, middle, ratios, size, verdict
from benchmarks.live import Bare, Live, live, quantile

ROUNDS, GROUPS = 5, 20
BARE_CALLS_MAX = 5.0
CPUS = 0.01
_LOOK_S, _SETTLED_S = 0.0005, 0.15

CONFIG = """
pools:
  places: {capacity: {seat: 1000000}, placement: {}}
policies:
  - {requester: placed, pool: places}
"""


def acquires(bench: Live, count: int) -> list[float]:
    """Seconds of each."""
    found = []
    for _ in range(count):
        begun = time.perf_counter()
        slot = bench.client.submit("placed", cpus=CPUS, pool_resources={"seat": 1}).wait()
        found.append(time.perf_counter() - begun)
        assert slot.bundles, "the slot has no placement group"
        slot.release()
    return found


def bare_groups(bundle: dict[str, float], count: int) -> list[float]:
    """Seconds of each, from the call that makes it until it is ready."""
    from ray.util import placement_group, placement_group_table, remove_placement_group

    found = []
    for _ in range(count):
        begun = time.perf_counter()
        group = placement_group([bundle], "PACK", lifetime="detached")
        while placement_group_table(group)["state"] != "CREATED":
            time.sleep(_LOOK_S)
        found.append(time.perf_counter() - begun)
        remove_placement_group(group)
        time.sleep(_SETTLED_S)
    return found


def run() -> Iterator[Figure]:
    """The figures, medians of 5 rounds in turn."""
    count, calls = size(GROUPS, 2), size(100, 5)
    bare_s, group_s, acquire_s = [], [], []
    with live(CONFIG) as bench:
        bare, bundle = Bare(), {"CPU": CPUS}
        acquires(bench, 2), bare_groups(bundle, 2)
        for _ in range(ROUNDS):
            bare_s.append(bare.p50(calls))
            group_s.append(quantile(bare_groups(bundle, count), 0.5))
            acquire_s.append(quantile(acquires(bench, count), 0.5))
        bare.close()
    for name, values in (("bare group, p50", group_s), ("acquire to usable, p50", acquire_s)):
        value, spread = middle(values)
        yield Figure(f"placed: {name}", value * 1e3, "ms", ratios(values, bare_s), "", None, spread)
    over = [a - b for a, b in zip(acquire_s, group_s, strict=True)]
    value, spread = middle(over)
    ratio = ratios(over, bare_s)
    target, met = f"at most {BARE_CALLS_MAX:g} bare calls", verdict(ratio <= BARE_CALLS_MAX)
    yield Figure("placed: over the bare group", value * 1e3, "ms", ratio, target, met, spread)
