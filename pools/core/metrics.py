"""Which metrics there are: names, kinds, labels and what they mean. Nothing is counted here (meter.py) or sent.

Ray puts `ray_` before each name, and Prometheus' `_total` behind a counter's: `pools_grants` is scraped as
`ray_pools_grants_total`. docs/metrics.md is for whoever reads them.
"""

from __future__ import annotations

from typing import NamedTuple

GAUGE, COUNTER, HISTOGRAM = "gauge", "counter", "histogram"

REQUESTERS_MAX = 200
"""So many requesters have series of their own, in each actor; what further ones do is counted together."""

OTHER = "(other)"
"""The label of all further requesters, and of those that no pool has admitted yet."""

_WAIT_S = (0.01, 0.1, 0.5, 1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 14400.0, 86400.0)
_GRANT_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_SYNC_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)

Series = tuple[str, tuple[str, ...]]
"""A metric's name, and the values of its labels."""


class Spec(NamedTuple):
    """One metric. Every one has the label `namespace` besides."""

    name: str
    kind: str
    labels: tuple[str, ...]
    about: str
    buckets: tuple[float, ...] = ()

    @property
    def scraped(self) -> str:
        """Its name at Ray's metrics endpoint."""
        return f"ray_{self.name}" + ("_total" if self.kind == COUNTER else "")


_AMOUNT = ("pool", "requester", "resource")
_TEAM = ("pool", "requester")

SPECS: dict[str, Spec] = {
    spec.name: spec
    for spec in (
        # --- of a pool
        Spec("pools_capacity", GAUGE, ("pool", "resource"), "Total of each metered key."),
        Spec("pools_reserved", GAUGE, _AMOUNT, "What a requester is sure of."),
        Spec("pools_allocated", GAUGE, _AMOUNT, "Held by grants, those that are told to stop among them."),
        Spec("pools_borrowed", GAUGE, _AMOUNT, "Booked beyond what is reserved."),
        Spec("pools_nominated", GAUGE, _AMOUNT, "Booked for requests that others are being stopped for."),
        Spec("pools_preempting", GAUGE, _AMOUNT, "Held by grants that were told to stop."),
        Spec("pools_pending", GAUGE, _TEAM, "Requests that wait in the pool; one may wait in several."),
        Spec("pools_running", GAUGE, _TEAM, "Grants that hold capacity."),
        Spec(
            "pools_oldest_pending_seconds", GAUGE, ("pool",), "How long the oldest request waits; 0 if none."
        ),
        Spec("pools_grants", COUNTER, _TEAM, "Grants."),
        Spec(
            "pools_preemptions",
            COUNTER,
            (*_TEAM, "reason"),
            "Grants of the requester that were told to stop; reason: reclaim, priority, own, operator.",
        ),
        Spec(
            "pools_evictions",
            COUNTER,
            (*_TEAM, "reason"),
            "Grants that ended without their holder's wish; reason: stopped, grace_over, expired, not_placed,"
            " group_lost.",
        ),
        Spec("pools_wait_seconds", HISTOGRAM, _TEAM, "From queueing to the grant, of each attempt.", _WAIT_S),
        Spec(
            "pools_grant_latency_seconds",
            HISTOGRAM,
            ("pool",),
            "From the grant to its placement group being ready.",
            _GRANT_S,
        ),
        # --- of the coordinator
        Spec("pools_requests", GAUGE, ("state",), "Requests that are queued, allocated or preempting."),
        Spec("pools_submissions", COUNTER, ("requester",), "Requests that came in."),
        Spec(
            "pools_finished", COUNTER, ("requester", "state"), "Requests that became final; by which state."
        ),
        Spec(
            "pools_lease_expiries",
            COUNTER,
            ("requester", "state"),
            "Leases that ended, of requests that a pool had taken; state: waiting, holding.",
        ),
        Spec("pools_holders_gone", COUNTER, (), "Client processes that were found dead."),
        Spec("pools_refusals", COUNTER, ("reason",), "Calls refused: wrong_token, wrong_key, not_operator."),
        Spec("pools_prewarm_wanted", GAUGE, ("pool", "resource"), "Asked of the autoscaler, use included."),
        Spec("pools_prewarm_ready", GAUGE, ("pool", "resource"), "On living nodes with the pool's labels."),
        Spec("pools_prewarm_cut", GAUGE, ("pool",), "GPUs of the wish that the node types can't provide."),
        Spec("pools_prewarm_overwritten", COUNTER, (), "Times that others wrote over the wish for nodes."),
        Spec("pools_outside_gpus", GAUGE, (), "GPUs of the pools' nodes that are used without a slot."),
        Spec("pools_unreachable", GAUGE, ("pool",), "1 while the coordinator does not reach the pool."),
        # --- of every actor
        Spec("pools_configuration_version", GAUGE, ("log",), "Version of the configuration it goes by."),
        Spec("pools_heartbeat_timestamp_seconds", GAUGE, ("log",), "When the actor's loop last came round."),
        Spec("pools_log_rows", COUNTER, ("log",), "Events that became durable."),
        Spec("pools_log_sync_seconds", HISTOGRAM, ("log",), "One turn's append with its sync.", _SYNC_S),
        Spec("pools_failed_turns", COUNTER, ("log",), "Turns that were undone, as on a full disk."),
    )
}


class Samples:
    """What is to be sent: increments of counters, observations of histograms, values of gauges."""

    def __init__(self) -> None:
        self.counts: dict[Series, int] = {}
        self.observed: list[tuple[Series, float]] = []
        self.gauges: dict[Series, float] = {}

    def count(self, name: str, *labels: str, by: int = 1) -> None:
        """The counter goes up."""
        series = (name, labels)
        self.counts[series] = self.counts.get(series, 0) + by

    def observe(self, name: str, value: float, *labels: str) -> None:
        """The histogram gets a value."""
        self.observed.append(((name, labels), value))

    def gauge(self, name: str, value: float, *labels: str) -> None:
        """The gauge is at a value; of several with the same labels, at their sum."""
        series = (name, labels)
        self.gauges[series] = self.gauges.get(series, 0) + value


class Requesters:
    """Which requesters have series of their own: the first so many, so that nobody can make series without end."""

    def __init__(self, most: int = REQUESTERS_MAX) -> None:
        self._most = most
        self._known: set[str] = set()

    def label(self, requester: str, has_policy: bool = True) -> str:
        """The requester's own name, or `OTHER`. A stranger does not get a place: who has no policy, so that no pool
        admits what it submits; or whose submissions were all rejected, which looks the same. Once known, it stays so.
        """
        if requester not in self._known:
            if not has_policy or len(self._known) >= self._most:
                return OTHER
            self._known.add(requester)
        return requester
