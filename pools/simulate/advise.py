"""Reserved shares out of a trace's demand, and what a simulation says of them.

The rule: a team's demand at a moment is the GPUs of its jobs if each ran from its submission on, without waiting; what
counts is its mean over the trace. A share is that mean times the number of GPUs over the sum of means where the sum is
more than there are, rounded down to whole GPUs; but at least the team's largest job as long as there is room (else that
job could only ever be borrowed for). What is left over stays unreserved: it is lent to whoever needs it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from ..config_export import inline_yaml
from ..core.config_rules import PolicyConfig, PoolConfig
from ..trace import TraceJob
from .play import KEY, play
from .report import report_of

POOL = "gpus"


class Demand(NamedTuple):
    """What a team asks for. GPUs; p95 over time."""

    mean: float
    p95: int
    most: int
    largest_job: int


def demands(trace: Sequence[TraceJob]) -> dict[str, Demand]:
    """Per team, from the first submission to the last one."""
    first_s, last_s = trace[0].submit_s, trace[-1].submit_s
    span_s = max(last_s - first_s, 1.0)
    steps: dict[str, list[tuple[float, int]]] = {}
    largest: dict[str, int] = {}
    for job in trace:
        team = steps.setdefault(job.requester, [])
        team += [(job.submit_s, job.gpus), (job.submit_s + job.duration_s, -job.gpus)]
        largest[job.requester] = max(largest.get(job.requester, 0), job.gpus)
    found: dict[str, Demand] = {}
    for name, team in sorted(steps.items()):
        held_s = _held_s(sorted(team), last_s)
        mean = sum(gpus * seconds for gpus, seconds in held_s.items()) / span_s
        found[name] = Demand(mean, _p95(held_s), max(held_s, default=0), largest[name])
    return found


def _held_s(steps: Sequence[tuple[float, int]], until_s: float) -> dict[int, float]:
    """How long so many GPUs were asked for at once."""
    found: dict[int, float] = {}
    now, gpus = steps[0][0], 0
    for at, change in steps:
        if at > until_s:
            break
        if at > now:
            found[gpus] = found.get(gpus, 0.0) + at - now
            now = at
        gpus += change
    if until_s > now:
        found[gpus] = found.get(gpus, 0.0) + until_s - now
    return found


def _p95(held_s: dict[int, float]) -> int:
    left_s = 0.05 * sum(held_s.values())
    for gpus in sorted(held_s, reverse=True):
        left_s -= held_s[gpus]
        if left_s <= 0:
            return gpus
    return 0


def shares(demand: dict[str, Demand], gpus: int) -> dict[str, int]:
    """The module's rule."""
    total = sum(each.mean for each in demand.values())
    scale = min(1.0, gpus / total) if total else 0.0
    found = {team: math.floor(each.mean * scale) for team, each in demand.items()}
    left = gpus - sum(found.values())
    # the teams that lack least first: as many as can be can have their largest job in their share
    for team in sorted(found, key=lambda team: (demand[team].largest_job - found[team], team)):
        lack = demand[team].largest_job - found[team]
        if 0 < lack <= left:
            found[team] += lack
            left -= lack
    return found


def advise(trace: Sequence[TraceJob], gpus: int) -> dict[str, Any]:
    """The shares, and beside each other what the simulation says of them, of hard partitions and of one queue."""
    demand = demands(trace)
    reserved = shares(demand, gpus)
    pool = {POOL: PoolConfig(POOL, {KEY: gpus})}
    teams = sorted(demand)
    policies = {
        "advised shares": [PolicyConfig(POOL, team, 0, {KEY: reserved[team]}) for team in teams],
        "hard partitions": [
            PolicyConfig(POOL, team, 0, {KEY: reserved[team]}, {KEY: reserved[team]}) for team in teams
        ],
        "one queue": [PolicyConfig(POOL, team) for team in teams],
    }
    return {
        "gpus": gpus,
        "teams": {
            team: {**{k: round(v, 1) for k, v in demand[team]._asdict().items()}, "reserved": reserved[team]}
            for team in teams
        },
        "unreserved": gpus - sum(reserved.values()),
        "configs": {name: report_of(play(pool, each, trace)) for name, each in policies.items()},
    }


_COUNTS_ONLY = (
    "# placement: none makes a pool that only counts, without placement groups: enough for `pools simulate`.\n"
    "# For `pools up` take it out, and say where its slots lie (docs/admins.md)."
)


def config_text(said: dict[str, Any]) -> str:
    """The advised shares as a configuration for `pools simulate`, or for `pools up` once its pool is filled in."""
    pool = {"capacity": {KEY: said["gpus"]}, "placement": "none"}
    policies = (
        {"pool": POOL, "requester": team, "reserved": {KEY: each["reserved"]}}
        for team, each in said["teams"].items()
    )
    lines = [_COUNTS_ONLY, "pools:", f"  {POOL}: {inline_yaml(pool)}", "policies:"]
    return "\n".join([*lines, *(f"  - {inline_yaml(policy)}" for policy in policies)]) + "\n"
