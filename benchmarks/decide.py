"""How much a decision of the pure core costs: no actors, no log, no clock; one turn for each cycle.

- cycle: a submission, a release and the grant that follows from it, in a full pool of 480 GPUs with 8 requesters
  (each with a share) and 6 shapes, while others wait. A turn is what a live pool does: work a message of two
  directives in, walk, hand out the events.
- no: a walk in which the first waiter looks for victims among 10,000 grants and there are none for it, in the three
  ways that this happens: nobody borrows, all are too young, those that may be stopped are not enough.
- yes: the same with victims found.
"""

from __future__ import annotations

import gc
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.figures import Figure, middle, rounds, size, verdict
from ray_pools.core import walk
from ray_pools.core.config_rules import PolicyConfig, PoolConfig
from ray_pools.core.link import Message
from ray_pools.core.pool import Pool
from ray_pools.core.pool_state import PoolState

ROUNDS = 7
CYCLES = 4_000
GRANTS = 10_000
SHAPES = (1, 2, 3, 4, 8, 16)


class Bench:
    """A pool's core, and the coordinator's side of its stream."""

    def __init__(self, config: PoolConfig, policies: list[PolicyConfig], now: float = 0.0) -> None:
        self.pool = Pool(config.name, PoolState(), 1, now)
        self.seq = 0
        self.ages = 0
        self.tell(["", "configure", 1, "uid", config.to_wire(), [policy.to_wire() for policy in policies]])

    def tell(self, *directives: list[Any]) -> list[Any]:
        """One turn: these directives, the walk, and the events that came of it."""
        after = self.seq
        items = []
        for directive in directives:
            self.seq += 1
            items.append([self.seq, *directive])
        acknowledged = self.pool.state.seq
        self.pool.exchange(
            Message("coordinator", "", 1, self.seq, after, self.seq, items, acknowledged, [], 0, 0, 1)
        )
        self.pool.walk()
        return self.pool.take_step().events

    def submission(self, requester: str, gpus: int, preemptible: bool = True) -> list[Any]:
        """The directive that queues one more request."""
        self.ages += 1
        amounts = [["gpu", gpus], ["step_run", 1]]
        fields = [requester, amounts, preemptible, self.ages, 0.0, 0.0, {}]
        return [f"request-{self.ages}", "enqueue", 1, True, fields]


def _cycling(waiting: int) -> Callable[[], float]:
    """Seconds for each cycle of submit, release and grant, with so many waiting."""
    config = PoolConfig("bench", {"gpu": 480, "step_run": 1_000_000})
    policies = [PolicyConfig("bench", f"team-{n}", 0, {"gpu": 30, "step_run": 1000}) for n in range(8)]
    bench = Bench(config, policies)

    def more() -> list[Any]:
        return bench.submission(f"team-{bench.ages % 8}", SHAPES[bench.ages % len(SHAPES)])

    bench.tell(*(more() for _ in range(400)))
    while bench.pool.state.queue.size < waiting:
        bench.tell(*(more() for _ in range(min(1000, waiting - bench.pool.state.queue.size))))
    grants = sorted(
        (a for a in bench.pool.state.attempts.values() if a.state == "granted"), key=lambda a: a.grant_number
    )
    held = deque(a.id for a in grants)

    def measure() -> float:
        gc.collect()
        cycles = size(CYCLES, 20)
        started = time.perf_counter()
        for _ in range(cycles):
            for event in bench.tell(more(), [held.popleft(), "ask", 1, "release"]):
                if type(event).__name__ == "Granted":
                    held.append(event.id)
        return (time.perf_counter() - started) / cycles

    return measure


def _searching(lack: int, *, borrowed: int, min_runtime_s: float, expected: bool) -> Callable[[], float]:
    """Seconds for a walk in which one waiter looks for victims among 10,000 grants of lower priority."""
    config = PoolConfig("bench", {"gpu": GRANTS}, min_runtime_s=min_runtime_s)
    low = [PolicyConfig("bench", f"low-{n}", 1, {"gpu": (GRANTS - borrowed) // 4}) for n in range(4)]
    bench = Bench(config, [*low, PolicyConfig("bench", "high", 9)])
    bench.tell(*(bench.submission(f"low-{n % 4}", 1) for n in range(GRANTS)))
    directive = bench.submission("high", lack)
    _, _, k, owned, fields = directive
    bench.seq += 1
    bench.pool._enqueue(directive[0], k, owned, fields)
    state, now = bench.pool.state, bench.pool.now

    def measure() -> float:
        started = time.perf_counter()
        for _ in range(200):
            attempt, asking = walk.first(state, now)
            found = None if attempt is not None else walk.first_preemption(state, now, asking)
            assert (found is not None) == expected
        return (time.perf_counter() - started) / 200

    return measure


def run() -> Iterator[Figure]:
    """The figures, medians of 7 rounds taken in turn."""
    counts = size((100, 10_000, 100_000), (100, 1_000, 2_000))
    times = rounds(ROUNDS, *map(_cycling, counts))
    base, _ = middle(times[0])
    for count, each in zip(counts, times, strict=True):
        value, spread = middle(each)
        ratio = value / base
        target, met = (
            ("", None) if count == counts[0] else ("at most 2 times 100 waiting", verdict(ratio <= 2))
        )
        yield Figure(f"decide: cycle, {count:,} waiting", value * 1e6, "us", ratio, target, met, spread)
    rate, spread = middle([1 / each for each in times[1]])
    shown, met = f"decide: cycles, {counts[1]:,} waiting", verdict(rate >= 25_000)
    yield Figure(shown, rate, "1/s", None, "at least 25,000", met, spread)
    cases = {
        "yes, one victim": _searching(1, borrowed=GRANTS, min_runtime_s=0, expected=True),
        "yes, 16 victims": _searching(16, borrowed=GRANTS, min_runtime_s=0, expected=True),
        "no, nobody borrows": _searching(16, borrowed=0, min_runtime_s=0, expected=False),
        "no, all too young": _searching(16, borrowed=GRANTS, min_runtime_s=60, expected=False),
        "no, not enough": _searching(16, borrowed=8, min_runtime_s=0, expected=False),
    }
    found = dict(zip(cases, rounds(ROUNDS, *cases.values()), strict=True))
    yes, _ = middle(found["yes, 16 victims"])
    for name, each in found.items():
        value, spread = middle(each)
        target, met = (
            ("at most 2 times the yes", verdict(value / yes <= 2)) if name.startswith("no") else ("", None)
        )
        yield Figure(f"decide: {name} of 10,000", value * 1e6, "us", value / yes, target, met, spread)
