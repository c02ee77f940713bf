"""Metrics are what the logs say (docs/metrics.md), and are counted beside the turns.

Faults it stands for: a count that the log does not have, a gauge that drifts from the state over preemptions, retries,
changes and restarts; series without end from names that anybody can make up; a sink that fails and stops the actor or
the counting; a gauge that stays at the last value of what is gone; a name in a dashboard or an alert that nobody sends.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import yaml
from log_counts import Counts, PoolCounts, Rows, coordinator_counts
from test_shells import Shells
from write_histories import HISTORIES, read_rows

from ray_pools.actors import metrics as actor_metrics
from ray_pools.actors import shell as shell_module
from ray_pools.actors.metrics import MetricsFeed, RaySink, ready_on
from ray_pools.core import meter as meter_module
from ray_pools.core import records as ev
from ray_pools.core.config_rules import PolicyConfig, PoolConfig
from ray_pools.core.coordinator_state import CoordinatorState
from ray_pools.core.meter import CoordinatorMeter, PoolMeter, eviction_reason
from ray_pools.core.metrics import COUNTER, HISTOGRAM, OTHER, SPECS, Requesters, Samples
from ray_pools.core.pool_state import PoolState
from ray_pools.core.system import System
from ray_pools.dashboard.history import History
from ray_pools.errors import PoolsError
from ray_pools.store import open_store
from ray_pools.store.memory import forget

TOP = Path(__file__).parent.parent
TEAMS = ("a", "b", "c")


def random_world(seed: int, steps: int = 120) -> System:
    """Two pools, three teams and what they do: all kinds of ends, changes of policies, leases that run out."""
    rng = random.Random(seed)
    world = System(
        {
            "p": PoolConfig("p", {"gpu": 8, "step_run": 9}, grace_s=5.0),
            "q": PoolConfig("q", {"gpu": 4}, grace_s=0.0),
        },
        [
            PolicyConfig("p", "a", 1, {"gpu": 4}),
            PolicyConfig("p", "b", 5, {"gpu": 2}),
            PolicyConfig("p", "c", 9),
            PolicyConfig("q", "a", 2),
            PolicyConfig("q", "b", 3, {"gpu": 2}),
        ],
    )
    ids: list[str] = []
    for number in range(steps):
        verb = rng.choice(("submit", "submit", "submit", "release", "stopped", "cancel", "advance", "change"))
        with suppress(PoolsError):
            if verb == "submit" or not ids:
                ids.append(f"r{number}")
                amounts = {"gpu": rng.choice((1, 1, 2, 4)), "step_run": 1}
                keeps, retries = rng.random() < 0.7, rng.choice((0, 0, 2))
                lease_s = rng.choice((None, None, 4.0))
                world.submit(ids[-1], rng.choice((*TEAMS, "stranger")), amounts, keeps, retries, lease_s)
            elif verb == "advance":
                world.advance(rng.choice((0.5, 3.0, 7.0)))
            elif verb == "change":
                world.attach(
                    PolicyConfig("p", rng.choice(TEAMS), rng.randrange(9), {"gpu": rng.randrange(3)})
                )
            else:
                told = [id for id, state in world.states().items() if state.startswith("preempting")]
                getattr(world, verb)(rng.choice(told if told and verb == "stopped" else ids))
    return world


def rows_of(world: System, log: str) -> list[tuple[float, Any]]:
    return [(at, ev.unpack(body)) for at, body in world.logs[log]]


def turns_of(rows: Rows, rng: random.Random) -> Iterator[tuple[float, list[Any]]]:
    """Rows of one time, in one turn or in several."""
    turn: list[Any] = []
    before = 0.0
    for at, event in rows:
        if turn and (at != before or rng.random() < 0.5):
            yield before, turn
            turn = []
        turn.append(event)
        before = at
    yield before, turn


def flat(samples: Samples) -> Counts:
    return Counter({(name, *labels): by for (name, labels), by in samples.counts.items()})


def of(metric: str, samples: Samples) -> dict[tuple[str, ...], float]:
    return {labels: value for (name, labels), value in samples.gauges.items() if name == metric}


@pytest.mark.parametrize("seed", range(6))
def test_a_random_workload_counts_as_its_logs_do(seed: int) -> None:
    world, rng, reasons = random_world(seed), random.Random(seed), set()
    for pool in ("p", "q"):
        rows = rows_of(world, pool)
        meter = PoolMeter(pool, PoolState())
        for at, turn in turns_of(rows, rng):
            meter.hear(turn, at)
        samples, wanted = meter.take(rows[-1][0]), PoolCounts(pool, rows)
        del wanted.counts["pools_log_rows", "pool:" + pool]
        assert flat(samples) == wanted.counts
        waits = sorted(value for (name, _), value in samples.observed if name == "pools_wait_seconds")
        assert waits == pytest.approx(sorted(chain.from_iterable(wanted.waits.values())))
        reasons |= {labels[-1] for labels in flat(samples) if labels[0] == "pools_preemptions"}
    coordinator = CoordinatorMeter(CoordinatorState())
    rows = rows_of(world, "coordinator")
    coordinator.hear([event for _, event in rows], 0.0)
    wanted_there = coordinator_counts(rows)
    del wanted_there["pools_log_rows", "coordinator"]
    samples = coordinator.take(0.0)
    assert flat(samples) == wanted_there
    shown = Counter(r.shown for r in world.coordinator.state.waiting_or_holding.values())
    requests = of("pools_requests", samples)
    assert requests == {(state,): shown[state] for state in ("allocated", "preempting", "queued")}
    assert reasons, "nobody was preempted: the workload shows nothing"


def test_the_workloads_have_every_reason() -> None:
    """Else the test above compares nothing with nothing."""
    counted = sum(
        (PoolCounts(p, rows_of(random_world(s), p)).counts for s in range(6) for p in "pq"), Counter()
    )
    preempted = {labels[-1] for labels in counted if labels[0] == "pools_preemptions"}
    assert preempted == {"reclaim", "priority", "own"}
    evicted = {labels[-1] for labels in counted if labels[0] == "pools_evictions"}
    assert {"stopped", "grace_over", "expired"} <= evicted


@pytest.mark.parametrize("seed", range(3))
def test_gauges_follow_the_state_also_after_a_restart_at_any_row(seed: int) -> None:
    """Two meters: one that heard all, one that starts from the state in the middle."""
    world, rng = random_world(seed), random.Random(seed)
    rows = rows_of(world, "p")
    for _ in range(8):
        cut = rng.randrange(1, len(rows))
        state = PoolState()
        for at, event in rows[:cut]:
            state.apply(event, at)
        restarted, whole = PoolMeter("p", state), PoolMeter("p", PoolState())
        whole.hear([event for _, event in rows], rows[-1][0])
        restarted.hear([event for _, event in rows[cut:]], rows[-1][0])
        wanted = PoolCounts("p", rows).gauges()
        for meter in (restarted, whole):
            found = meter.take(rows[-1][0]).gauges
            shown = Counter({(name, *labels): int(value) for (name, labels), value in found.items()})
            for name in ("pools_oldest_pending_seconds", "pools_configuration_version"):
                for key in [key for key in shown if key[0] == name]:
                    del shown[key]
            assert +shown == wanted


def test_a_pool_that_is_emptied_calls_back_for_the_operator() -> None:
    """An operator's evictions stop somebody too (rules 9): these were three grants."""
    folder = HISTORIES / "v4"
    rows = [(at, ev.unpack(body)) for at, body in read_rows(folder / "emptied-pool-p.log")]
    meter = PoolMeter("p", PoolState())
    for at, event in rows:
        meter.hear([event], at)
    counted, wanted = flat(meter.take(100.0)), PoolCounts("p", rows).counts
    del wanted["pools_log_rows", "pool:p"]
    assert counted == wanted
    preempted = {key: by for key, by in counted.items() if key[0] == "pools_preemptions"}
    assert {key[-1] for key in preempted} == {"operator"}
    assert sum(preempted.values()) == 3
    # and the page's chart has the same
    for log, file in (("coordinator", "emptied-coordinator.log"), ("pool:p", "emptied-pool-p.log")):
        writer = open_store("memory:emptied", log)
        writer.open()
        writer.append(list(read_rows(folder / file)), 0)
    history = History("memory:emptied")
    history.read()
    grants = history.grants("p", 0.0, 1e12, 0, 1000)["grants"]
    history.close()
    forget("memory:emptied")
    assert Counter((grant["requester"], grant["reason"]) for grant in grants if grant["reason"]) == {
        key[2:]: by for key, by in preempted.items()
    }


def test_the_oldest_request_that_waits_is_timed_from_its_submission() -> None:
    world = System({"p": PoolConfig("p", {"gpu": 1})}, [PolicyConfig("p", "a")])
    world.submit("holds", "a", {"gpu": 1})
    world.advance(10.0)
    world.submit("waits", "a", {"gpu": 1})
    world.advance(30.0)
    meter = PoolMeter("p", world.pools["p"].state)
    assert of("pools_oldest_pending_seconds", meter.take(world.now)) == {("p",): 30.0}


def test_one_that_waits_for_ever_does_not_keep_all_that_passed_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meter_module, "_QUEUE_SLACK", 5)
    meter = PoolMeter("p", PoolState())
    meter.hear([ev.Queued("old", 1, True, "a", [["gpu", 9]], True, 0, 1.0, 0.0, {})], 1.0)
    for number in range(40):
        queued = ev.Queued(f"r{number}", 1, True, "a", [["gpu", 1]], True, number, 2.0, 0.0, {})
        meter.hear([queued, ev.Granted(queued.id, 1), ev.Ended(queued.id, 1, "released", "")], 2.0)
        assert of("pools_oldest_pending_seconds", meter.take(11.0)) == {("p",): 10.0}
        assert len(meter._queue) < 10


def test_a_stranger_makes_no_series_and_the_many_share_one() -> None:
    names = Requesters(most=2)
    assert names.label("stranger", has_policy=False) == OTHER
    assert [names.label(name) for name in ("a", "b", "c", "a")] == ["a", "b", OTHER, "a"]
    assert names.label("b", has_policy=False) == "b"
    world = System(
        {"p": PoolConfig("p", {"gpu": 4})}, [PolicyConfig("p", name, 0, {"gpu": 1}) for name in "abcd"]
    )
    for name in "abcd":
        world.submit(name, name, {"gpu": 1})
    samples = PoolMeter("p", world.pools["p"].state, Requesters(most=2)).take(0.0)
    assert of("pools_allocated", samples) == {
        ("p", "a", "gpu"): 1,
        ("p", "b", "gpu"): 1,
        ("p", OTHER, "gpu"): 2,
    }
    assert of("pools_reserved", samples)["p", OTHER, "gpu"] == 2


@pytest.mark.parametrize(
    ("how", "why", "reason"),
    [
        ("stopped", ev.HOLDER_STOPPED, "stopped"),
        ("stopped", ev.GRACE_RAN_OUT, "grace_over"),
        ("stopped", ev.NOT_PLACED_YET, "not_placed"),
        ("stopped", "its placement group is gone", "group_lost"),
        ("returned", "not placed within 60 s", "not_placed"),
        ("expired", "", "expired"),
        ("released", "", ""),
        ("cancelled", "", ""),
    ],
)
def test_why_a_grant_ended(how: str, why: str, reason: str) -> None:
    assert eviction_reason(how, why) == reason


# --- beside the turns


class Sink:
    """Takes samples; fails as often as it is told to."""

    def __init__(self) -> None:
        self.counts: Counts = Counter()
        self.observed: Counts = Counter()
        self.gauges: dict[tuple[str, ...], float] = {}
        self.fails = 0
        self.called = threading.Semaphore(0)

    def __call__(self, samples: Samples) -> None:
        self.counts += flat(samples)
        self.observed.update((name, *labels) for (name, labels), _ in samples.observed)
        self.gauges = {(name, *labels): value for (name, labels), value in samples.gauges.items()}
        self.called.release()
        if self.fails:
            self.fails -= 1
            raise OSError("no agent")


def test_actors_count_what_they_log_and_a_turn_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    sinks: dict[str, Sink] = {}
    made = iter(("coordinator", "pool:p"))

    def sink(namespace: str) -> Sink:
        assert namespace == "ns"
        return sinks.setdefault(next(made), Sink())

    async def main() -> str:
        monkeypatch.setattr(Shells, "options", {"metrics": True})
        monkeypatch.setattr(shell_module, "RaySink", sink)
        monkeypatch.setattr(actor_metrics, "add_cluster_gauges", lambda *_: None)
        shells = Shells(monkeypatch)
        shells.start()
        policies = [["policy", PolicyConfig("p", *each).to_wire()] for each in (("low",), ("high", 1))]
        await shells.ask(
            "change", changes=[["pool", PoolConfig("p", {"gpu": 2}).to_wire(), "p#1"], *policies]
        )
        for id, team in (("l1", "low"), ("l2", "low"), ("h", "high")):
            await shells.submit(id, team, 1)
        await shells.until({"l1": "allocated", "l2": "preempting", "h": "queued"})
        log = shells.pool.store
        monkeypatch.setattr(type(log), "append", _fails_once(type(log).append))
        with pytest.raises(PoolsError):
            await shells.ask("cancel", id="l1")
        for shell in shells.actors.values():
            assert shell.metrics is not None
            shell.metrics.beat(shells.clock.now())
            await asyncio.to_thread(shell.metrics.close)
        shells.stop()
        return shells.address

    address = asyncio.run(main())
    for log, counts in (
        ("pool:p", lambda rows: PoolCounts("p", rows).counts),
        ("coordinator", coordinator_counts),
    ):
        store = open_store(address, log)
        store.open()
        rows = [(row.at, ev.unpack(row.body)) for row in store.read()]
        turns = {batch.last_seq for batch in store.read_batches()}
        failed = sinks[log].counts.pop(("pools_failed_turns", log), 0)
        assert failed == (log == "coordinator")
        assert sinks[log].counts == counts(rows)
        assert sinks[log].observed["pools_log_sync_seconds", log] == len(turns)
    assert sinks["pool:p"].counts["pools_preemptions", "p", "low", "priority"] == 1
    assert sinks["coordinator"].gauges["pools_unreachable", "p"] == 0
    forget(address)


def _fails_once(append: Callable[..., int]) -> Callable[..., int]:
    from ray_pools.store import AppendFailed

    left = [1]

    def failing(self: Any, records: Any, expected_seq: int) -> int:
        if records and left and left.pop():
            raise AppendFailed("here", "the disk is full")
        return append(self, records, expected_seq)

    return failing


def test_a_sink_that_fails_is_tried_again_and_nothing_is_counted_twice() -> None:
    sink = Sink()
    sink.fails = 1
    feed = MetricsFeed(PoolMeter("p", PoolState()), sink)
    for number in range(2):
        feed.hear([ev.Ended(f"x{number}", 1, "withdrawn", "")], 1.0, 0.001)
        feed.beat(1.0)
        assert sink.called.acquire(timeout=30.0)
    feed.close()
    assert sink.counts == {("pools_log_rows", "pool:p"): 2}


def test_gauges_that_cant_be_asked_for_cost_no_count_and_stay_as_they_were() -> None:
    """As `ray.nodes()` while the GCS is away: 0 nodes would be another thing than not to know."""
    sink, answers = Sink(), iter((3, None, 5))

    def more(samples: Samples) -> None:
        answer = next(answers)
        if answer is None:
            raise OSError("no GCS")
        samples.gauge("pools_prewarm_ready", answer, "q", "GPU")

    feed = MetricsFeed(PoolMeter("p", PoolState()), sink, more)
    for number, shown in enumerate((3, 3, 5)):
        feed.hear([ev.Ended(f"x{number}", 1, "withdrawn", "")], 1.0, 0.001)
        feed.beat(1.0)
        assert sink.called.acquire(timeout=30.0)
        assert sink.counts == {("pools_log_rows", "pool:p"): number + 1}
        assert sink.gauges["pools_prewarm_ready", "q", "GPU"] == shown
    feed.close()


def test_what_is_gone_is_shown_as_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray keeps showing the last value of a gauge that nobody sets."""
    sink, seen = RaySink("ns"), {}

    class Metric:
        def set(self, value: float, tags: dict[str, str]) -> None:
            seen[tuple(tags.values())] = value

    monkeypatch.setattr(sink, "_metric", lambda series: Metric())
    for value in (3, None):
        samples = Samples()
        if value:
            samples.gauge("pools_pending", value, "p", "a")
        sink(samples)
    assert seen == {("ns", "p", "a"): 0}


def test_nodes_that_are_ready_have_the_labels_and_live() -> None:
    nodes = [
        {"Alive": True, "Labels": {"type": "gpu"}, "Resources": {"GPU": 4.0, "CPU": 8.0, "node:x": 1.0}},
        {"Alive": True, "Labels": {"type": "spot"}, "Resources": {"GPU": 2.0}},
        {"Alive": False, "Labels": {"type": "gpu"}, "Resources": {"GPU": 4.0}},
        {"Alive": True, "Labels": {}, "Resources": {"CPU": 2.0}},
    ]
    assert ready_on(nodes, {"type": "gpu"}) == {"GPU": 4.0, "CPU": 8.0}
    assert ready_on(nodes, {"type": "!gpu"}) == {"GPU": 2.0, "CPU": 2.0}
    assert ready_on(nodes, {"type": "in(gpu, spot)"}) == {"GPU": 6.0, "CPU": 8.0}


# --- what is made of them

_NAME = re.compile(r"\bray_pools_\w+")


def scraped_names() -> set[str]:
    names = set()
    for spec in SPECS.values():
        names |= (
            {spec.scraped + end for end in ("_bucket", "_sum", "_count")} if spec.kind == HISTOGRAM else set()
        )
        names |= {spec.scraped} if spec.kind != HISTOGRAM else set()
    return names


def test_dashboard_and_alerts_name_metrics_that_exist_with_their_labels() -> None:
    dashboard = json.loads((TOP / "examples/metrics/grafana.json").read_text())
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    asked = [target["expr"] for panel in panels for target in panel["targets"]]
    asked += [
        variable["query"] for variable in dashboard["templating"]["list"] if variable["type"] == "query"
    ]
    alerts = yaml.safe_load((TOP / "examples/metrics/alerts.yaml").read_text())
    rules = [rule for group in alerts["groups"] for rule in group["rules"]]
    assert {"summary", "description"} <= set.intersection(*(set(rule["annotations"]) for rule in rules))
    asked += [rule["expr"] for rule in rules]
    for text in asked:
        names = set(_NAME.findall(text))
        assert names, text
        assert names <= scraped_names(), text
        labels = {"namespace", "le", "SessionName"}.union(*(set(SPECS[_spec(name)].labels) for name in names))
        for grouped in re.findall(r"by ?\(([^)]*)\)", text):
            assert {label.strip() for label in grouped.split(",")} <= labels, text
        for matched in re.findall(r"(\w+)(?:=~|=|!=)\"", text):
            assert matched in labels, text
    used = {_spec(name) for text in asked for name in _NAME.findall(text)}
    unused = set(SPECS) - used
    assert unused <= {"pools_configuration_version"}, f"in no panel and no alert: {unused}"


def _spec(scraped: str) -> str:
    return re.sub("_(bucket|sum|count|total)$", "", scraped.removeprefix("ray_"))


def test_every_metric_is_in_the_documentation() -> None:
    text = (TOP / "docs/metrics.md").read_text()
    rows = dict(re.findall(r"^\| `(ray_pools_\w+)` \| (\w+) \|", text, re.MULTILINE))
    assert rows == {spec.scraped: spec.kind for spec in SPECS.values()}
    for spec in SPECS.values():
        (row,) = re.findall(rf"^\| `{spec.scraped}` \|.*$", text, re.MULTILINE)
        assert re.findall(r"`(\w+)`", row.split("|")[3]) == list(spec.labels), row
    assert [spec for spec in SPECS.values() if spec.kind == COUNTER and spec.name.endswith("_total")] == []
