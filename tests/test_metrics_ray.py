"""Metrics at Ray's own endpoint, scraped as Prometheus does, after a random workload (docs/metrics.md).

Faults it stands for: metrics that are right in the actor and never arrive, arrive under another name or without their
labels, or differ from what the logs say.
"""

from __future__ import annotations

import random
import re
import time
import urllib.request
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import ray
from live_pools import WAIT_S, LivePools, live_pools
from log_counts import Counts, PoolCounts, coordinator_counts

import ray_pools as pools
from ray_pools.core.metrics import COUNTER, GAUGE, HISTOGRAM, SPECS

pytestmark = [pytest.mark.ray, pytest.mark.slow]

CONFIG = """
namespace: measured
store: store
pools:
  counted: {capacity: {gpu: 8}, grace_s: 1, placement: none}
  spot:
    capacity: {gpu: 4}
    placement: {labels: {ray.io/market-type: spot}}
policies:
  - {pool: counted, requester: a, priority: 1, reserved: {gpu: 4}}
  - {pool: counted, requester: b, priority: 5, reserved: {gpu: 2}}
  - {pool: counted, requester: c, priority: 9}
  - {pool: spot, requester: placed}
"""
_SAMPLE = re.compile(r"^(ray_pools_\w+)\{(.*)\} (\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def work(live: LivePools, seed: int) -> None:
    """Submissions of three teams, releases, cancels, holders that stop and that do not, leases that run out."""
    rng = random.Random(seed)
    client = live.client
    tickets: list[pools.Ticket] = []
    for _ in range(60):
        amounts = {"gpus": rng.choice((1, 1, 2, 4)), "retries": rng.choice((0, 2))}
        tickets.append(client.submit(requester=rng.choice("abcx"), preemptible=rng.random() < 0.7, **amounts))
        other = rng.choice(tickets)
        with suppress(pools.PoolsError):
            verb = rng.choice(("release", "cancel", "stopped", "nothing"))
            if verb == "stopped":
                view = client.get(other.id)
                assert view is not None
                op = {"op": "stopped", "id": other.id, "operator": "test", "k": view["k"]}
                client.coordinator(op)
            elif verb != "nothing":
                getattr(other, verb)()
    with suppress(pools.PoolsError):  # refused, and counted
        client.coordinator({"op": "release", "id": tickets[0].id, "token": b"not this one"})
    with client.slot(requester="placed", gpus=1, timeout_s=WAIT_S):
        pass
    secret = b"known to nobody else"
    held = client.submit(requester="placed", gpus=1, token=secret)
    held.wait(WAIT_S)
    client.coordinator({"op": "leave", "items": [[held.id, secret]]})


def scraped() -> tuple[Counts, dict[tuple[str, ...], float]]:
    """Every sample of ours: its metric and its own labels, those of counters and histograms' counts summed up."""
    found: Counts = Counter()
    gauges: dict[tuple[str, ...], float] = {}
    by_name = {spec.scraped: spec for spec in SPECS.values()}
    for node in ray.nodes():
        if not node["Alive"]:
            continue
        where = f"http://127.0.0.1:{node['MetricsExportPort']}/metrics"
        with suppress(OSError), urllib.request.urlopen(where, timeout=10) as answer:
            for name, said, value in _SAMPLE.findall(answer.read().decode()):
                labels = dict(_LABEL.findall(said))
                spec = by_name.get(name) or by_name.get(name.removesuffix("_count"))
                if spec is None:
                    continue
                assert labels["namespace"] == "measured"
                key = (spec.name, *(labels[label] for label in spec.labels))
                if spec.kind == GAUGE:
                    gauges[key] = float(value)
                else:
                    found[key] += int(float(value))
    return found, gauges


def wanted(live: LivePools) -> tuple[Counts, Counts]:
    """Counters and histograms' counts, and gauges, by the logs."""
    counts = coordinator_counts(live.events("coordinator"))
    gauges: Counts = Counter()
    for pool in ("counted", "spot"):
        of_pool = PoolCounts(pool, live.events(f"pool:{pool}"))
        counts += of_pool.counts
        gauges += of_pool.gauges()
        for requester, waits in of_pool.waits.items():
            counts["pools_wait_seconds", pool, requester] += len(waits)
        counts["pools_grant_latency_seconds", pool] += len(of_pool.placings)
    return +counts, gauges


def test_what_is_scraped_is_what_the_logs_say(tmp_path: Path) -> None:
    fast = {"RAY_metrics_report_interval_ms": "300"}
    with live_pools(tmp_path, CONFIG, {"metrics_every_s": 0.2}, env=fast) as live:
        begun = time.time()
        work(live, 7)
        until = time.monotonic() + WAIT_S
        while True:
            counts, gauges = scraped()
            rows = sum(by for key, by in counts.items() if key[0] == "pools_log_rows")
            counts_wanted, gauges_wanted = wanted(live)
            if rows and counts_wanted == without_syncs(counts) and nonzero(gauges) == gauges_wanted:
                break
            assert time.monotonic() < until, difference(counts, counts_wanted, gauges, gauges_wanted)
            time.sleep(0.3)
        kinds = {SPECS[key[0]].kind for key in counts}
        assert kinds == {COUNTER, HISTOGRAM}
        assert {key[-1] for key in counts if key[0] == "pools_preemptions"} >= {"reclaim", "priority"}
        assert counts["pools_finished", "(other)", "rejected"] > 0, "the stranger has no series of its own"
        assert counts["pools_refusals", "wrong_token"] == 1
        assert counts["pools_lease_expiries", "placed", "holding"] == 1
        assert 0 < counts["pools_log_sync_seconds", "coordinator"] <= counts["pools_log_rows", "coordinator"]
        assert gauges["pools_prewarm_ready", "spot", "GPU"] == 4
        assert gauges["pools_heartbeat_timestamp_seconds", "coordinator"] > begun


def without_syncs(counts: Counts) -> Counts:
    """A turn's events stand together in the log, but turns of one time may stand in one batch: not comparable here."""
    return Counter({key: by for key, by in counts.items() if key[0] != "pools_log_sync_seconds"})


def nonzero(gauges: dict[tuple[str, ...], float]) -> Counts:
    names = ("allocated", "borrowed", "capacity", "nominated", "pending", "preempting", "reserved", "running")
    mine = {f"pools_{name}" for name in names}
    return +Counter({key: int(value) for key, value in gauges.items() if key[0] in mine})


def difference(counts: Counts, wanted: Counts, gauges: dict[Any, float], gauges_wanted: Counts) -> str:
    found, shown = without_syncs(counts), nonzero(gauges)
    both = [(found, wanted), (shown, gauges_wanted)]
    return "\n".join(
        f"{key}: scraped {a[key]}, by the log {b[key]}"
        for a, b in both
        for key in {*a, *b}
        if a[key] != b[key]
    )
