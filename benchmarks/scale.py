"""One, four and sixteen pools: what all of them do together, and what keeps it from being more.

Eight client processes in a closed loop, each taking and giving back 20 slots at a time from one pool after the
other. Beside the throughput stands how busy the coordinator, all pools and all clients were, in processors: what is
at 1 (one process each: the coordinator, a pool) or what adds up to the machine is what the plateau comes from. One
long name to run: it is not part of a run without names.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

from benchmarks.cycles import side_by_side
from benchmarks.figures import Figure, middle, ratios, say, size
from benchmarks.live import Live, cpu_s, live, workers

ROUNDS, SECONDS = 5, 3.0
POOLS = (1, 4, 16)
PROCESSES, BATCH = 8, 20
_FULL = 0.85


def config(pools: int) -> str:
    """So many pools, and a requester for each."""
    names = range(1, pools + 1)
    lines = ["pools:", *(f"  pool{n}: {{capacity: {{seat: 1000000}}, placement: none}}" for n in names)]
    return "\n".join([*lines, "policies:", *(f"  - {{requester: team{n}, pool: pool{n}}}" for n in names)])


class Busy:
    """Processors that groups of processes used since this was made."""

    def __init__(self, groups: dict[str, list[int]]) -> None:
        self._groups, self._begun = groups, time.monotonic()
        self._before = {name: sum(map(cpu_s, pids)) for name, pids in groups.items()}

    def found(self) -> dict[str, float]:
        """By group."""
        seconds = time.monotonic() - self._begun
        return {
            name: (sum(map(cpu_s, pids)) - self._before[name]) / seconds
            for name, pids in self._groups.items()
        }


def measure(bench: Live, pools: int) -> tuple[list[float], dict[str, list[float]]]:
    """Throughput of each round, and how busy each group was in it."""
    requesters = [f"team{n}" for n in range(1, pools + 1)]
    rates: list[float] = []
    busy: dict[str, list[float]] = {}
    with workers([bench.process("benchmarks.cycles", "slots") for _ in range(PROCESSES)]) as clients:
        side_by_side(clients, size(1.0, 0.2), requesters, BATCH)
        groups = {
            "coordinator": [bench.pid()],
            "pools": [bench.pid(f"pool{n}") for n in range(1, pools + 1)],
            "clients": [client.pid for client in clients],
        }
        for _ in range(size(ROUNDS, 2)):
            meter = Busy(groups)
            rates.append(side_by_side(clients, size(SECONDS, 0.2), requesters, BATCH)[0])
            for name, value in meter.found().items():
                busy.setdefault(name, []).append(value)
    return rates, busy


def reason(busy: dict[str, float], processors: int) -> str:
    """Why it is not more, as far as processor time tells."""
    if busy["coordinator"] >= _FULL:
        return "the coordinator, one process, is busy all the time"
    if sum(busy.values()) >= _FULL * processors:
        most = max(busy, key=lambda name: busy[name])
        return f"the {processors} processors of this machine are busy, most of all with the {most}"
    return "nothing here is busy all the time: who waits for whom (calls, disk) decides"


def run() -> Iterator[Figure]:
    """The figures, medians of 5 rounds of each number of pools."""
    first: list[float] = []
    for pools in size(POOLS, (1, 2)):
        with live(config(pools)) as bench:
            rates, busy = measure(bench, pools)
        first = first or rates
        value, spread = middle(rates)
        shown = f"scale: throughput, {pools} pool{'s' * (pools > 1)}"
        yield Figure(shown, value, "cycles/s", ratios(rates, first), "", None, spread)
        for name, values in busy.items():
            value, spread = middle(values)
            yield Figure(
                f"scale: {name}, {pools} pool{'s' * (pools > 1)}", value, "processors", None, "", None, spread
            )
        processors = len(os.sched_getaffinity(0))
        means = {name: middle(values)[0] for name, values in busy.items()}
        say(f"scale: with {pools} pool{'s' * (pools > 1)}: {reason(means, processors)}")
