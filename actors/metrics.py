"""Metrics of an actor, to Ray's own metrics endpoint: counted and sent in a thread, never in a turn's way.

A turn only puts its events into a list. The actor's loop wakes the thread every few seconds, which is its heartbeat;
the thread counts (`ray_pools.core.meter`) and hands over to Ray, which reports to its agent every 10 s by default.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from ray_pools.actors.wishes import Wishes
from ray_pools.core.bundles import selector_for
from ray_pools.core.coordinator import Coordinator
from ray_pools.core.coordinator_state import CoordinatorState
from ray_pools.core.feasible import matches
from ray_pools.core.metrics import COUNTER, GAUGE, SPECS, Samples, Series
from ray_pools.errors import shown

log = logging.getLogger("ray_pools")

SEND_EVERY_S = 2.0

_PREWARMED = ("CPU", "GPU")

# Turns that are kept for a thread that does not come round; what is beyond is not counted.
_KEPT_MAX = 100_000


class Meter(Protocol):
    """`PoolMeter` or `CoordinatorMeter`."""

    log: str
    samples: Samples

    def hear(self, events: Iterable[Any], at: float) -> None: ...
    def take(self, now: float) -> Samples: ...


Sink = Callable[[Samples], None]
More = Callable[[Samples], None]
"""Adds gauges that are in no log; called in the thread, so it may block."""


class MetricsFeed:
    """What an actor's turns brought, on its way to a sink. All methods but `close` return at once.

    `more` adds to the samples. `sink` is Ray, but for tests.
    """

    def __init__(self, meter: Meter, sink: Sink, more: More | None = None) -> None:
        self._meter, self._sink, self._more = meter, sink, more
        # (events, the core's time, seconds of the append); None: a turn that failed
        self._turns: deque[tuple[list[Any], float, float] | None] = deque(maxlen=_KEPT_MAX)
        # what `more` said last
        self._beside: dict[Series, float] = {}
        self._now, self._beat_at = 0.0, time.time()
        self._wake = threading.Event()
        self._closed = False
        self._complained = ""
        self._thread = threading.Thread(target=self._loop, name="metrics", daemon=True)
        self._thread.start()

    def hear(self, events: list[Any], at: float, append_s: float) -> None:
        """A turn is durable."""
        self._turns.append((events, at, append_s))

    def failed(self) -> None:
        """A turn was undone."""
        self._turns.append(None)

    def beat(self, now: float) -> None:
        """The actor's loop came round, at the core's time: what there is is sent."""
        self._now, self._beat_at = now, time.time()
        self._wake.set()

    def close(self, timeout_s: float = 5.0) -> None:
        """Sends the rest, and ends the thread."""
        self._closed = True
        self._wake.set()
        self._thread.join(timeout_s)

    def _loop(self) -> None:
        while not self._closed:
            self._wake.wait()
            self._wake.clear()
            try:
                self._send()
                self._complained = ""
            except Exception as problem:  # noqa: BLE001 - no metric is worth an actor
                said = f"{type(problem).__name__}: {shown(str(problem), 300)}"
                if said != self._complained:
                    log.warning("metrics of %s: %s", self._meter.log, said)
                self._complained = said

    def _send(self) -> None:
        meter, name = self._meter, self._meter.log
        for _ in range(len(self._turns)):
            turn = self._turns.popleft()
            if turn is None:
                meter.samples.count("pools_failed_turns", name)
                continue
            events, at, append_s = turn
            meter.hear(events, at)
            meter.samples.count("pools_log_rows", name, by=len(events))
            meter.samples.observe("pools_log_sync_seconds", append_s, name)
        samples = meter.take(self._now)
        samples.gauge("pools_heartbeat_timestamp_seconds", self._beat_at, name)
        try:
            if self._more is not None:
                beside = Samples()
                self._more(beside)
                self._beside = beside.gauges
                for (name, labels), by in beside.counts.items():
                    samples.count(name, *labels, by=by)
        finally:
            # what was counted is gone from the meter; what `more` can't say now is as it was, not 0
            samples.gauges.update(self._beside)
            self._sink(samples)


class RaySink:
    """Ray's metrics of this process. A gauge that has no value any more is set to 0: Ray would show its last one."""

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace
        self._metrics: dict[str, Any] = {}
        self._shown: set[Series] = set()

    def __call__(self, samples: Samples) -> None:
        for series, by in samples.counts.items():
            self._metric(series).inc(by, tags=self._tags(series))
        for series, value in samples.observed:
            self._metric(series).observe(value, tags=self._tags(series))
        for series in self._shown - set(samples.gauges):
            self._metric(series).set(0, tags=self._tags(series))
        for series, value in samples.gauges.items():
            self._metric(series).set(value, tags=self._tags(series))
        self._shown = set(samples.gauges)

    def _tags(self, series: Series) -> dict[str, str]:
        name, labels = series
        return {"namespace": self._namespace, **dict(zip(SPECS[name].labels, labels, strict=True))}

    def _metric(self, series: Series) -> Any:
        name = series[0]
        if name not in self._metrics:
            from ray.util.metrics import Counter, Gauge, Histogram

            spec = SPECS[name]
            keys = ("namespace", *spec.labels)
            if spec.kind == COUNTER:
                self._metrics[name] = Counter(name, spec.about, keys)
            elif spec.kind == GAUGE:
                self._metrics[name] = Gauge(name, spec.about, keys)
            else:
                self._metrics[name] = Histogram(name, spec.about, list(spec.buckets), keys)
        return self._metrics[name]


class Cluster(Protocol):
    """What the coordinator's shell knows besides its log."""

    state: CoordinatorState
    core: Coordinator
    wishes: Wishes


def add_cluster_gauges(cluster: Cluster, samples: Samples) -> None:
    """Pools that the coordinator does not reach, nodes that are wanted and there. Called in the metrics' thread."""
    cluster.wishes.measure(samples)
    prewarmer, silent = cluster.wishes.prewarmer, set(cluster.core.silent)
    wishes = {wish.pool: wish for wish in (prewarmer.sent() if prewarmer is not None else ())}
    nodes: list[Any] | None = None
    for name, config in list(cluster.state.pools.items()):
        samples.gauge("pools_unreachable", name in silent, name)
        if config.placement is None or prewarmer is None:
            continue
        if nodes is None:
            import ray

            nodes = ray.nodes()
        ready, wish = ready_on(nodes, selector_for(config.placement)), wishes.get(name)
        for resource in _PREWARMED:
            samples.gauge("pools_prewarm_wanted", wish.total(resource) if wish else 0, name, resource)
            samples.gauge("pools_prewarm_ready", ready.get(resource, 0), name, resource)


def ready_on(nodes: Iterable[Mapping[str, Any]], selector: Mapping[str, str]) -> dict[str, float]:
    """Ray's resources of the living nodes that have these labels. `nodes`: as of `ray.nodes()`."""
    found: dict[str, float] = {}
    for node in nodes:
        labels = node.get("Labels") or {}
        if node.get("Alive") and matches(selector, labels):
            for resource, amount in (node.get("Resources") or {}).items():
                if resource in _PREWARMED:
                    found[resource] = found.get(resource, 0.0) + amount
    return found
