"""Kueue's public performance set-up, live: 15,000 jobs of 30 teams in five pools of 120 units, as Kueue plays it.

Jobs do nothing: a timer ends them, as a controller does in Kueue's own run. Queueing, grants, logs and calls are
real. Beside each figure stands the one that Kueue publishes for it (351 s in all, 55.9 % of the capacity used, and
215.5, 76.8 and 16.5 s on average until a small, medium and large job is admitted), made on other hardware and by
other means: it is reported, and no verdict. Kueue gives large jobs the highest priority; here a priority belongs to
a policy, so all wait alike. Times are those of the logs.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from typing import Any

from benchmarks.figures import Figure, say, size
from benchmarks.live import Live, live
from ray_pools.client import Slot
from ray_pools.client.replay import play
from ray_pools.core import records as ev
from ray_pools.simulate.kueue import CAPACITY, CLASSES, COHORTS, config_text, trace
from ray_pools.store import open_reader

PUBLISHED_S, PUBLISHED_USE = 351.0, 55.9
CLASS_NAMES = ("small", "medium", "large")
PUBLISHED_WAIT_S = (215.5, 76.8, 16.5)


class Nap:
    """One job's work: over when its time is, or when it is told to stop."""

    def __init__(self) -> None:
        self.ended: Future[Any] = Future()

    def cancel(self) -> None:
        """Ends it now."""
        if not self.ended.done():
            self.ended.set_result(None)


class Timer:
    """What runs in slots: one thread that ends each job when its time is over."""

    def __init__(self) -> None:
        self._due: list[tuple[float, int, Nap]] = []
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        threading.Thread(target=self._run, name="jobs", daemon=True).start()

    def start(self, slot: Slot, seconds: float) -> list[Nap]:
        """One part for each job."""
        nap = Nap()
        with self._changed:
            heapq.heappush(self._due, (time.monotonic() + seconds, next(self._numbers), nap))
            self._changed.notify()
        return [nap]

    def nodes(self) -> int:
        """Nobody looks at nodes here."""
        return 0

    def _run(self) -> None:
        while True:
            with self._changed:
                now = time.monotonic()
                left_s = self._due[0][0] - now if self._due else None
                if left_s is None or left_s > 0:
                    self._changed.wait(left_s)
                    continue
                _, _, nap = heapq.heappop(self._due)
            nap.cancel()


class Told:
    """What the logs tell of the jobs."""

    def __init__(self) -> None:
        self.submitted: dict[str, float] = {}
        self.units: dict[str, int] = {}
        self.granted: dict[str, float] = {}
        self.ended: dict[str, float] = {}

    def read(self, bench: Live, pools: Mapping[str, Any]) -> Told:
        """All logs."""
        for name in ("coordinator", *(f"pool:{pool}" for pool in pools)):
            reader = open_reader(bench.store, name)
            try:
                for row in reader.read(1):
                    self.hear(row.at, ev.unpack(row.body))
            finally:
                reader.close()
        return self

    def hear(self, at: float, event: Any) -> None:
        """One event."""
        if isinstance(event, ev.Submitted):
            self.submitted[event.id] = at
            self.units[event.id] = dict(event.amounts).get("gpu", 0)
        elif isinstance(event, ev.Granted):
            self.granted.setdefault(event.id, at)
        elif isinstance(event, ev.Ended) and event.id in self.granted:
            self.ended[event.id] = at

    def seconds(self) -> float:
        """From the first submission to the last end."""
        return max(self.ended.values()) - min(self.submitted.values())

    def use(self, capacity: int) -> float:
        """Of the capacity over that time, in percent."""
        used = sum(self.units[id] * (at - self.granted[id]) for id, at in self.ended.items())
        return 100 * used / (capacity * self.seconds())

    def waits(self) -> dict[int, list[float]]:
        """Seconds from submission to grant, by the size of the job."""
        found: dict[int, list[float]] = {}
        for id, at in self.granted.items():
            found.setdefault(self.units[id], []).append(at - self.submitted[id])
        return found


def run() -> Iterator[Figure]:
    """The figures of one run."""
    cohorts = size(COHORTS, 1)
    jobs = trace(cohorts)[: size(None, 300)]
    with live(config_text(cohorts)) as bench:
        played = play(bench.client, jobs, work=Timer(), timeout_s=3600.0)
        told = Told().read(bench, bench.client.config()["uids"])
    if played.timed_out or len(told.ended) < len(jobs):
        say(f"kueue: only {len(told.ended)} of {len(jobs)} jobs came to their end")
    seconds, use = told.seconds(), told.use(cohorts * CAPACITY)
    yield Figure("kueue: wall time", seconds, "s", seconds / PUBLISHED_S, "", None, 0.0)
    yield Figure("kueue: mean use", use, "% of capacity", use / PUBLISHED_USE, "", None, 0.0)
    waits = told.waits()
    for name, kind, published in zip(CLASS_NAMES, CLASSES, PUBLISHED_WAIT_S, strict=True):
        if found := waits.get(kind.gpus):
            mean = sum(found) / len(found)
            yield Figure(f"kueue: wait of {name} jobs, mean", mean, "s", mean / published, "", None, 0.0)
